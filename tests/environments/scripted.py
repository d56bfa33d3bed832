"""A sampler that says what it is told, turn by turn, for tests of what is around it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from proximo.environments.kinds import Ask, MultiTurn, Question, play
from proximo.models import problem_tokens
from proximo.samplers.sampler import SamplingOptions, Stream
from proximo.types import Completion, Problem, Request


@dataclass
class Scripted:
    """`say(key, sample, turn)` is the reply; an end follows it where there is room."""

    tokenizer: PreTrainedTokenizerBase
    say: Callable[[int, int, int], str]
    asked: list[Request] = field(default_factory=list)
    repeats = True

    def refresh(self, policy: object, version: int) -> int:
        return version

    def stream(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> Stream:
        self.asked += requests
        for number, request in enumerate(requests):
            yield (
                number,
                tuple(
                    self._completion(request, request.first_sample + sample, options, version)
                    for sample in range(request.num_samples)
                ),
            )

    def _completion(self, request: Request, sample: int, options: SamplingOptions, version: int) -> Completion:
        text = self.say(request.key, sample, request.turn)
        whole = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        tokens = tuple(whole[: request.limit(options.max_tokens)])
        values = tuple(-0.5 - place / 100 for place in range(len(tokens)))
        finish = "stop" if len(tokens) == len(whole) else "length"
        return Completion(tokens, values, text, finish, version, tuple(-value for value in values))


def played(
    environment: MultiTurn,
    tokenizer: PreTrainedTokenizerBase,
    say: Callable[[int, int, int], str],
    problems: Sequence[Problem],
    *,
    samples: int = 2,
    max_tokens: int = 400,
    step: int = 0,
) -> tuple[list[tuple[Completion, ...]], Scripted]:
    """The completions of problems, and the sampler that was asked."""
    sampler = Scripted(tokenizer, say)
    prepared = [environment.prepared(each, tokenizer) for each in problems]
    questions = [
        Question(each, Request(key, problem_tokens(tokenizer, each), samples)) for key, each in enumerate(prepared)
    ]
    ask = Ask(sampler, tokenizer, SamplingOptions(max_tokens=max_tokens), seed=0, step=step, version=3)
    found = dict(play(environment, questions, ask))
    return [found[number] for number in range(len(problems))], sampler
