"""An environment of two turns, as a user would write it: one file, and no change anywhere else.

The policy writes a few tokens, a tool answers, and the policy goes on behind the tool's answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from proximo.environments.kinds import Ask, Question
from proximo.samplers.sampler import Stream, gathered
from proximo.types import Completion


@dataclass(frozen=True)
class TwoTurns:
    """Two answers, with a tool's note between them."""

    first_tokens: int = 2
    """Tokens of the first turn, at most."""
    note: str = "1+"
    """What the tool says."""

    def play(self, questions: Sequence[Question], ask: Ask) -> Stream:
        tool = tuple(ask.tokenizer.encode(self.note, add_special_tokens=False))
        short = replace(ask.options, max_tokens=self.first_tokens)
        firsts = gathered(ask([each.request for each in questions], short), len(questions))
        places = [(number, sample) for number, siblings in enumerate(firsts) for sample in range(len(siblings))]
        requests = [
            replace(
                questions[number].request,
                prompt_tokens=questions[number].request.prompt_tokens + firsts[number][sample].tokens + tool,
                num_samples=1,
                turn=1,
                first_sample=sample,
            )
            for number, sample in places
        ]
        rest = replace(ask.options, max_tokens=ask.options.max_tokens - self.first_tokens - len(tool))
        done: dict[int, dict[int, Completion]] = {number: {} for number in range(len(questions))}
        for place, (second,) in ask(requests, rest):
            number, sample = places[place]
            done[number][sample] = self._joined(firsts[number][sample], tool, second)
            if len(done[number]) == len(firsts[number]):
                yield number, tuple(done[number][each] for each in range(len(firsts[number])))

    def _joined(self, first: Completion, tool: tuple[int, ...], second: Completion) -> Completion:
        nothing = (0.0,) * len(tool)
        return replace(
            second,
            tokens=first.tokens + tool + second.tokens,
            logprobs=first.logprobs + nothing + second.logprobs,
            entropies=first.entropies + nothing + second.entropies,
            text=first.text + self.note + second.text,
            sampled=(True,) * len(first.tokens) + (False,) * len(tool) + (True,) * len(second.tokens),
        )
