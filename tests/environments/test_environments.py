"""Environments: what is asked of the sampler, and that training and evaluation both go through them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from proximo import presets
from proximo.algorithms import DAPO, GRPO
from proximo.environments.kinds import Ask, Interaction, MultiTurn, Question, SingleTurn, played
from proximo.models import tiny_model, tiny_tokenizer
from proximo.rl.config import EvaluationOptions, TrainingOptions
from proximo.rl.evaluate import evaluate
from proximo.rl.rollouts import Collector
from proximo.runs.records import DataCursor
from proximo.samplers.embedded import EmbeddedSampler
from proximo.samplers.sampler import SamplingOptions, Stream
from proximo.tasks.arithmetic import Arithmetic
from proximo.tasks.protocol import begin_grading
from proximo.types import Completion, Grade, Problem, Request

TOKENIZER = tiny_tokenizer()
OPTIONS = SamplingOptions(max_tokens=6)
REQUEST = Request(key=7, prompt_tokens=(5, 6, 7), num_samples=4)


@pytest.fixture(scope="module")
def sampler() -> EmbeddedSampler:
    return EmbeddedSampler(tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=1), TOKENIZER)


def asking(sampler: EmbeddedSampler, step: int = 3) -> Ask:
    return Ask(sampler, TOKENIZER, OPTIONS, seed=1, step=step, version=9)


def test_a_single_turn_is_what_the_sampler_streams(sampler):
    requests = [replace(REQUEST, key=key) for key in (1, 2, 3)]
    questions = [Question(Problem(str(each.key), "?", None), each) for each in requests]
    found = list(SingleTurn().play(questions, asking(sampler)))
    assert found == list(sampler.stream(requests, OPTIONS, seed=1, step=3, version=9))
    assert {each.version for _, siblings in found for each in siblings} == {9}
    assert isinstance(SingleTurn(), Interaction)


def test_a_sample_asked_for_alone_is_the_one_among_its_siblings(sampler):
    [(_, siblings)] = asking(sampler)([REQUEST])
    alone = asking(sampler)([replace(REQUEST, num_samples=1, first_sample=number) for number in range(4)])
    assert [completion.tokens for _, (completion,) in sorted(alone)] == [each.tokens for each in siblings]
    assert len({each.tokens for each in siblings}) > 1


def test_each_turn_has_random_numbers_of_its_own(sampler):
    turns = [dict(asking(sampler)([replace(REQUEST, turn=turn)]))[0] for turn in range(3)]
    assert len({tuple(each.tokens for each in siblings) for siblings in turns}) == 3
    again = dict(asking(sampler)([replace(REQUEST, turn=2)]))[0]
    assert again == turns[2]


@pytest.mark.slow("trains a run")
def test_the_same_turn_asked_again_is_drawn_anew(sampler):
    """Within a call and in later ones; and in the same order of asking, the same again."""

    def replies() -> list[tuple[int, ...]]:
        ask = Ask(sampler, TOKENIZER, OPTIONS, seed=3, step=1, version=0)
        request = Request(0, (5, 6, 7), 1)
        found = [one.tokens for _, (one,) in sorted(ask([request, request]))]
        found += [one.tokens for _ in range(2) for _, (one,) in ask([request])]
        found += [one.tokens for _, (one,) in ask([replace(request, first_sample=1)])]
        return found

    first = replies()
    assert len(set(first)) == 5
    assert first == replies()
    [(_, (alone, sibling))] = sampler.stream([Request(0, (5, 6, 7), 2)], OPTIONS, seed=3, step=1, version=0)
    assert [first[0], first[4]] == [alone.tokens, sibling.tokens]  # asked once, nothing has changed


def test_a_turn_before_the_first_is_refused(sampler):
    with pytest.raises(ValueError, match=r"requests\[0\]: turn -1, first_sample 0: both count from 0"):
        list(asking(sampler)([replace(REQUEST, turn=-1)]))


@dataclass(frozen=True)
class Marking:
    """Says who it was that sampled, in front of what was sampled."""

    def play(self, questions: Sequence[Question], ask: Ask) -> Stream:
        for number, siblings in ask([each.request for each in questions]):
            yield number, tuple(replace(each, text=f"{questions[number].problem.id}:{each.text}") for each in siblings)


def test_training_and_evaluation_go_through_the_environment(sampler):
    task, training = Arithmetic(held_out=5), TrainingOptions(groups=2, group_size=2, minibatches=1)
    collector = Collector(task, sampler, TOKENIZER, OPTIONS, training, GRPO.keep, seed=0, environment=Marking())
    groups = collector.collect(DataCursor(), step=0, version=0).groups
    assert all(each.completion.text.startswith(f"{g.problem.id}:") for g in groups for each in g.rollouts)
    options = EvaluationOptions(problems=3, samples=2)
    _, answered = evaluate(task, sampler, TOKENIZER, OPTIONS, options, seed=0, environment=Marking(), version=4)
    assert [each.completion.text.split(":")[0] for each in answered] == [each.problem.id for each in answered]
    assert {each.completion.version for each in answered} == {4}


# What breaks its promise is refused by name, where it enters the loop


def first(siblings: tuple[Completion, ...], **changes: Any) -> tuple[Completion, ...]:
    return replace(siblings[0], **changes), *siblings[1:]


def with_tool(siblings: tuple[Completion, ...], token: int) -> tuple[Completion, ...]:
    """The first completion with a tool's token in front, cut to its old length."""
    old = siblings[0]
    tokens, logprobs = (token, *old.tokens)[: len(old.tokens)], (0.0, *old.logprobs)[: len(old.tokens)]
    sampled = (False, *[True] * len(old.tokens))[: len(old.tokens)]
    return first(siblings, tokens=tokens, logprobs=logprobs, entropies=(), sampled=sampled)


BROKEN: dict[str, tuple[Callable[[list], object], str]] = {
    "no stream": (lambda found: None, "None: it must return an iterator"),
    "no entry": (lambda found: [each for _, each in found], r"\(Completion\(.*: each entry must be"),
    "no tuple": (lambda found: [(0, None)], r"\(0, None\): each entry must be \(number of the prompt, its completions"),
    "text": (lambda found: [(0, ["a", "b"])], "'a': it must return objects of proximo.types.Completion"),
    "lost": (lambda found: found[:1], "no completions of prompt 1: it must answer all 2 prompts"),
    "unknown": (lambda found: [(7, found[0][1])], "prompt 7: it must return each number from 0 to 1 once"),
    "twice": (lambda found: [*found, found[0]], "prompt 0: it must return each number from 0 to 1 once"),
    "few": (lambda found: [(0, found[0][1][:1])], "1 completions of prompt 0: num_samples is 2"),
    "long": (
        lambda found: [(0, first(found[0][1], tokens=(7,) * 9, logprobs=(0.0,) * 9, entropies=()))],
        "a completion of prompt 0 of 9 tokens: max_tokens is 6, and tokens that were not sampled count",
    ),
    "no log-probs": (
        lambda found: [(0, first(found[0][1], logprobs=()))],
        r"a completion of prompt 0 of \d tokens without log-probs: give one for each token, 0 where it was not sampled",
    ),
    "version": (
        lambda found: [(0, first(found[0][1], version=2))],
        "a completion of prompt 0 of version 2: completions must carry .* which is 5",
    ),
    "token": (
        lambda found: [(0, with_tool(found[0][1], 10_000))],
        "a completion of prompt 0 with token ids from 10000 to 10000 that were not sampled: the tokenizer has 0 to ",
    ),
}


@dataclass(frozen=True)
class Breaking:
    """An environment, and a sampler, that returns something else than it should."""

    case: str
    sampler: EmbeddedSampler | None = None
    repeats = True

    def refresh(self, policy: object, version: int) -> int:
        return version

    def play(self, questions: Sequence[Question], ask: Ask) -> Any:
        return BROKEN[self.case][0](list(SingleTurn().play(questions, ask)))

    def stream(self, requests: Sequence[Request], options: SamplingOptions, **draws: Any) -> Any:
        assert self.sampler is not None
        return BROKEN[self.case][0](list(self.sampler.stream(requests, options, **draws)))


def breaking(sampler: Any, environment: Interaction) -> Collector:
    task, training = Arithmetic(held_out=5), TrainingOptions(groups=2, group_size=2, minibatches=1)
    return Collector(task, sampler, TOKENIZER, OPTIONS, training, GRPO.keep, seed=0, environment=environment)


@pytest.mark.parametrize("case", BROKEN)
def test_an_environment_that_breaks_its_promise_is_named(sampler, case):
    with pytest.raises(ValueError, match=f"^environment Breaking returned {BROKEN[case][1]}") as refusal:
        breaking(sampler, Breaking(case)).collect(DataCursor(), step=0, version=5)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("case", BROKEN)
def test_a_sampler_that_breaks_its_promise_is_named(sampler, case):
    with pytest.raises(ValueError, match=f"^sampler Breaking returned {BROKEN[case][1]}"):
        breaking(Breaking(case, sampler), SingleTurn()).collect(DataCursor(), step=0, version=5)


def test_evaluation_checks_what_an_environment_returns(sampler):
    options = EvaluationOptions(problems=2)
    with pytest.raises(ValueError, match="environment Breaking returned no completions of prompt 1"):
        evaluate(Arithmetic(held_out=5), sampler, TOKENIZER, OPTIONS, options, seed=0, environment=Breaking("lost"))


def test_a_sampler_that_returns_no_version_is_named(sampler):
    with pytest.raises(ValueError, match=r"EmbeddedSampler.refresh returned None.*must return the"):
        breaking(sampler, SingleTurn()).collect(DataCursor(), step=0, version=None)  # pyright: ignore[reportArgumentType]


def test_the_unit_of_length_penalties_is_what_pays():
    task = Arithmetic()
    tools = MultiTurn(tools=("proximo.environments.examples:calculate",))
    game = MultiTurn("proximo.environments.examples:NumberGuessing")
    declared = replace(game, reward_range=(-1.0, 3.0))
    config = replace(presets.ARITHMETIC, algorithm=DAPO, task=task)
    units = [replace(config, environment=each).penalty_unit for each in (SingleTurn(), tools, game, declared)]
    assert units == [0.5, 0.5, 1.0, 2.0]
    assert "or on the environment" in replace(config, environment=game).penalty_remarks[0]
    assert not replace(config, environment=declared).penalty_remarks
    with pytest.raises(ValueError, match="environment.reward_range is"):
        replace(game, reward_range=(1.0, 1.0))


def test_a_task_that_waits_for_its_grades_still_does_with_tools():
    class Waits(Arithmetic):
        def begin(self, problems, completions):
            return lambda: [Grade(0.5)] * len(completions)

    task = played(Waits(chat=True), MultiTurn(tools=("proximo.environments.examples:calculate",)), tiny_tokenizer())
    waiting = begin_grading(task, [Problem("1", "1+1=", "2")], [Completion((), (), "2", "stop")])
    assert waiting() == [Grade(0.5)]
