"""No sampled token is ever tokenised again: a run checks it at every turn, and ends where it is not so."""

import importlib.util
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from proximo.environments.kinds import Ask, MultiTurn, Question, play
from proximo.models import problem_tokens, tiny_tokenizer
from proximo.models.loading import load_tokenizer
from proximo.models.shipped import resolve
from proximo.rewards.grading import Grading
from proximo.samplers.sampler import SamplingOptions, Stream
from proximo.types import Completion, Problem, Request
from tests.environments.chat_templates import ENDS, TEMPLATES
from tests.environments.scripted import Scripted

TOKENIZER = tiny_tokenizer()
CALLS = {
    "llama": '{"name": "calculate", "parameters": {"expression": "6*7"}}',
    "qwen": '<tool_call>\n{"name": "calculate", "arguments": {"expression": "6*7"}}\n</tool_call>',
    "smollm": '<tool_call>{"name": "calculate", "arguments": {"expression": "6*7"}}</tool_call>',
}


@dataclass(frozen=True)
class Again:
    """Asks twice, the second time with another spelling of the first reply."""

    def play(self, questions: Sequence[Question], ask: Ask) -> Stream:
        [(_, (first,))] = list(ask([question.request for question in questions]))
        request = questions[0].request
        changed = (*request.prompt_tokens, *reversed(first.tokens))
        later = replace(request, prompt_tokens=changed, turn=1, max_tokens=4)
        return ask([later])


def test_a_prompt_that_spells_an_earlier_reply_anew_is_refused():
    sampler = Scripted(TOKENIZER, lambda *_: "abc")
    ask = Ask(sampler, TOKENIZER, SamplingOptions(max_tokens=20), seed=0, step=0, version=0)
    problem = Problem("1", "3+4=", "7")
    question = Question(problem, Request(0, problem_tokens(TOKENIZER, problem), 1))
    with pytest.raises(ValueError, match="turn 1 of sample 0 was asked with a prompt that does not begin with the"):
        list(play(Again(), [question], ask))


class Wild:
    """Samples tokens at random from the whole vocabulary, and every other time the letters of a call one by one."""

    repeats = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, call: str, seed: int) -> None:
        self._draw, self._end = random.Random(seed), int(tokenizer.eos_token_id)  # pyright: ignore[reportArgumentType]
        marks = set(tokenizer.added_tokens_decoder)
        self._ordinary = [token for token in range(len(tokenizer)) if token not in marks]
        self._call = [token for letter in call for token in tokenizer.encode(letter, add_special_tokens=False)]
        self.drawn: list[tuple[int, ...]] = []

    def refresh(self, policy: object, version: int) -> int:
        return version

    def stream(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> Iterator[tuple[int, tuple[Completion, ...]]]:
        for number, request in enumerate(requests):
            yield number, tuple(self._completion(version) for _ in range(request.num_samples))

    def _completion(self, version: int) -> Completion:
        wild = self._draw.choices(self._ordinary, k=self._draw.randrange(1, 12))
        tokens = (*(self._call if self._draw.random() < 0.5 else wild), self._end)
        self.drawn.append(tokens)
        return Completion(tokens, (-0.5,) * len(tokens), "?", "stop", version, (0.5,) * len(tokens))


def real_tokenizer(family: str) -> PreTrainedTokenizerBase:
    """SmolLM2's vocabulary with a family's marks; its template is the real one where TRL, which ships it, is here."""
    try:
        tokenizer = load_tokenizer(resolve("smollm2-135m"))
    except ValueError as error:
        pytest.skip(str(error))
    if family == "smollm":
        return tokenizer
    marks = ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"]
    tokenizer.add_special_tokens({"eos_token": ENDS[family], "extra_special_tokens": marks})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    tokenizer.chat_template = TEMPLATES[family]
    if spec := importlib.util.find_spec("trl"):
        name = {"qwen": "qwen3", "llama": "llama3_1"}[family]
        tokenizer.chat_template = (
            Path(str(spec.origin)).with_name("chat_templates").joinpath(f"{name}.jinja").read_text()
        )
    return tokenizer


@pytest.mark.scale
@pytest.mark.parametrize("family", CALLS)
def test_a_thousand_episodes_keep_every_sampled_token(family):
    tokenizer = real_tokenizer(family)
    sampler = Wild(tokenizer, CALLS[family], seed=7)
    environment = MultiTurn(tools=("proximo.environments.examples:calculate",), max_turns=5)
    problem = Problem("1", ({"role": "user", "content": "What is 6*7?"},), "42")
    asked = environment.prepared(problem, tokenizer)
    tokens = problem_tokens(tokenizer, asked)
    questions = [Question(asked, Request(key, tokens, 8)) for key in range(125)]
    ask = Ask(sampler, tokenizer, SamplingOptions(max_tokens=4000), seed=0, step=0, version=0)
    with Grading().active() as grading:
        episodes = [each for _, siblings in play(environment, questions, ask) for each in siblings]
    grading.close()
    assert len(episodes) == 1000
    assert sum(turn.role == "tool" and turn.text == "42" for each in episodes for turn in each.turns) > 500
    sampled = [tuple(token for token, own in zip(each.tokens, each.sampled, strict=True) if own) for each in episodes]
    assert sum(map(len, sampled)) == sum(map(len, sampler.drawn))
    again = [tuple(tokenizer.encode(tokenizer.decode(list(each)), add_special_tokens=False)) for each in sampled]
    assert sum(one != other for one, other in zip(sampled, again, strict=True)) > 500  # it would have mattered
