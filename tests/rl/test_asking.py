"""Dynamic sampling without rounds: a step's groups are the first that are kept, whatever the sampler does and when."""

import json
import random
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proximo.environments.kinds import Ask, Question
from proximo.losses import KeepMixed
from proximo.models import tiny_model, tiny_tokenizer
from proximo.rl.asking import Demand
from proximo.rl.config import Curriculum, TrainingOptions
from proximo.rl.rollouts import Collector
from proximo.runs.records import Collected, DataCursor
from proximo.runs.rollout_json import plain_collected, read_collected
from proximo.samplers.embedded import EmbeddedSampler
from proximo.samplers.sampler import SamplingOptions
from proximo.types import Completion, Grade, Group, Problem, Request

TOKENIZER = tiny_tokenizer()
GROUPS = 4


@dataclass
class Slots:
    """A sampler with some slots, in which the group that ends next is drawn at random, or is the shortest."""

    slots: int = 3
    chance: random.Random | None = None
    """None: groups end by their lengths."""
    takes_more: bool = True
    lengths: Mapping[int, int] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    """Keys of all requests, in the order in which they came."""
    unfinished: int = 0
    """Requests of streams that were left before they ended."""
    repeats = True

    def refresh(self, policy, version: int) -> int:
        return version

    def stream(self, requests: Sequence[Request], options, *, seed: int, step: int, version: int = 0, more=tuple):
        waiting, live, now = deque(enumerate(requests)), dict[int, tuple[int, Request]](), 0
        count = len(requests)
        self.asked += [request.key for request in requests]
        try:
            while waiting or live:
                while waiting and len(live) < self.slots:
                    number, request = waiting.popleft()
                    live[number] = now + self.length(request), request
                number = self.next(live)
                now, request = live.pop(number)
                yield number, tuple(said(request, sample, version) for sample in range(request.num_samples))
                new = more()
                self.asked += [request.key for request in new]
                waiting.extend(enumerate(new, start=count))
                count += len(new)
        finally:
            self.unfinished += len(waiting) + len(live)

    def next(self, live: Mapping[int, tuple[int, Request]]) -> int:
        if self.chance is not None:
            return self.chance.choice(sorted(live))
        return min(live, key=lambda number: (live[number][0], number))

    def length(self, request: Request) -> int:
        return self.lengths.get(request.key, 1)


def said(request: Request, sample: int, version: int) -> Completion:
    return Completion((7, 8), (-0.1, -0.2), f"{request.key}.{sample}", "stop", version)


@dataclass(frozen=True)
class Verdicts:
    """Groups are mixed or all wrong as they are told."""

    mixed: tuple[bool, ...]
    """Of the first problems; those after them are mixed."""
    while_sampling: bool = True
    graded: list[str] = field(default_factory=list)

    def size(self, split) -> int | None:
        return None

    def problem(self, index: int, split, seed: int) -> Problem:
        return Problem(str(index), f"{index}=", str(index))

    def grade(self, problems, completions) -> list[Grade]:
        self.graded.extend(dict.fromkeys(problem.id for problem in problems))
        return [
            Grade(float(self.is_mixed(int(problem.id)) and completion.text.endswith(".0")))
            for problem, completion in zip(problems, completions, strict=True)
        ]

    def is_mixed(self, index: int) -> bool:
        return index >= len(self.mixed) or self.mixed[index]

    def reference(self, problem: Problem) -> str | None:
        return problem.answer


def collector(task: Any, sampler: Any, **changes) -> Collector:
    options = replace(TrainingOptions(groups=GROUPS, group_size=2, minibatches=1), **changes)
    return Collector(task, sampler, TOKENIZER, SamplingOptions(), options, KeepMixed(), seed=5)


def collected(
    mixed: Sequence[bool], sampler: Any = None, *, along: bool = True, share: float = 1.0, **changes
) -> Collected:
    return collector(Verdicts(tuple(mixed), along), sampler or Slots(), **changes).collect(
        DataCursor(kept_share=share), step=0, version=0
    )


def names(groups: Sequence[Group]) -> list[int]:
    return [int(group.problem.id) for group in groups]


verdicts = st.lists(st.booleans(), max_size=60)


# Which groups a step has


@pytest.mark.slow("collects hundreds of steps")
@settings(max_examples=150, deadline=None)
@given(verdicts, st.integers(1, 40), st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_a_step_is_the_same_for_any_number_of_slots_and_any_order_of_ending(mixed, slots, chance, takes_more, along):
    assert_same_step(mixed, slots, chance, takes_more=takes_more, along=along)


@pytest.mark.parametrize("seed", range(6))
def test_a_step_is_the_same_with_some_slots_and_some_order_of_ending(seed):
    chance = random.Random(seed)
    mixed = [chance.random() < 0.3 for _ in range(40)]
    assert_same_step(mixed, chance.choice((2, 3, 7, 40)), chance, takes_more=seed != 4, along=seed != 5)


def assert_same_step(
    mixed: Sequence[bool], slots: int, chance: random.Random, *, takes_more: bool, along: bool
) -> None:
    """Nothing of it differs: groups, verdicts, the cursor, nor even how many prompts were asked for in vain."""
    one_by_one = collected(mixed, Slots(1))
    assert collected(mixed, Slots(slots, chance, takes_more), along=along) == one_by_one
    limit = GROUPS + 3 * 2 * GROUPS
    alive = [index for index in range(limit) if index >= len(mixed) or mixed[index]][:GROUPS]
    assert names(one_by_one.groups) == alive
    judged = alive[-1] + 1 if len(alive) == GROUPS else limit
    assert sorted([*names(one_by_one.dropped), *alive]) == list(range(judged))
    assert one_by_one.cursor.next_problem == judged


@pytest.mark.parametrize("seed", range(4))
def test_what_the_step_does_not_need_is_never_graded(seed):
    """Stateful graders, judges that cost and counts of failures do not see what was asked for in vain."""
    chance = random.Random(seed)
    mixed, slots = [chance.random() < 0.3 for _ in range(40)], chance.choice((2, 7, 40))
    task = Verdicts(tuple(mixed))
    step = collector(task, Slots(slots, chance)).collect(DataCursor(), step=0, version=0)
    assert sorted(map(int, task.graded)) == sorted(names([*step.groups, *step.dropped]))


def test_short_and_easy_groups_are_not_preferred():
    """Where hard groups are long, taking what ends first would take the easy ones; a step has the share of all."""
    chance = random.Random(3)
    mixed = [chance.random() < 0.5 for _ in range(400)]
    lengths = {index: chance.choice((10, 90) if kept else (90, 90, 10)) for index, kept in enumerate(mixed)}
    gather = collector(Verdicts(tuple(mixed)), Slots(8, lengths=lengths), groups=8)
    cursor, taken = DataCursor(), []
    for step in range(10):
        step = gather.collect(cursor, step=step, version=step)
        taken += names(step.groups)
        cursor = step.cursor
    waiting_for_all = [index for index in range(cursor.next_problem) if mixed[index]]
    assert taken == waiting_for_all
    first_to_end = sorted((index for index, kept in enumerate(mixed[:200]) if kept), key=lambda index: lengths[index])
    mean = statistics.fmean(lengths[index] for index in taken)
    assert mean > 40 > 10 == statistics.fmean(lengths[index] for index in first_to_end[: len(taken) // 2])


def test_dynamic_sampling_of_groups_that_are_all_kept_asks_for_one_round():
    sampler = Slots()
    step = collected([], sampler)
    assert (sampler.asked, sampler.unfinished) == ([0, 1, 2, 3], 0)
    assert (step.rounds, step.unneeded, step.cursor) == (1, 0, DataCursor(4))


# How much is asked for


@given(
    st.integers(1, 64),
    st.integers(0, 64),
    st.integers(1, 6),
    st.floats(0, 1),
    st.integers(0, 500),
    st.integers(0, 500),
)
def test_what_is_asked_for_is_bounded_and_always_goes_on(groups, missing, rounds, share, judged, kept):
    missing, kept = min(missing, groups), min(kept, judged)
    demand = Demand(groups, missing, rounds, share)
    if kept >= missing or judged >= demand.limit:
        return
    asked = demand.asked(judged, kept)
    assert judged < asked <= min(judged + 2 * groups, demand.limit)


def test_demand_by_hand():
    """Half was kept: 4 missing groups need 8 prompts and, with a deviation of √(4 · ½) / ½, 2.83 more."""
    assert Demand(groups=8, missing=4, rounds=4, share=0.5).asked(0, 0) == 11
    assert Demand(groups=8, missing=8, rounds=4, share=1.0).asked(0, 0) == 8
    # Of 4 none was kept: (8 + 0) / (8 + 4) are expected, and 8 · 3/2 + √(8/3) · 3/2 = 14.4 are needed.
    assert Demand(groups=8, missing=8, rounds=4, share=1.0).asked(4, 0) == 4 + 15
    assert Demand(groups=8, missing=8, rounds=4, share=0.01).asked(3, 0) == 3 + 16
    assert Demand(groups=8, missing=8, rounds=1, share=0.5).asked(0, 0) == 8
    assert [Demand(8, 8, 4, 1.0).rounds_of(judged) for judged in (0, 8, 9, 24, 25, 56)] == [0, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("seed", range(4))
def test_what_was_asked_for_in_vain_is_bounded_and_counted(seed):
    chance = random.Random(seed)
    mixed, sampler = [chance.random() < 0.2 for _ in range(40)], Slots(chance.choice((2, 7, 40)), chance)
    step = collected(mixed, sampler)
    judged = len(step.groups) + len(step.dropped)
    assert 0 <= step.unneeded <= 2 * GROUPS
    assert sampler.asked == list(range(len(sampler.asked)))
    assert judged <= len(sampler.asked) <= judged + step.unneeded


def test_more_is_asked_for_while_the_sampler_works_on_the_last():
    """With a known share all is asked for at once, and what is over is given up before it has ended."""
    sampler = Slots(4)
    step = collected([index % 3 == 0 for index in range(99)], sampler, share=1 / 3)
    assert names(step.groups) == [0, 3, 6, 9]
    assert sampler.unfinished > 0
    assert step.unneeded == len(sampler.asked) - 10 > 0


def test_the_next_step_begins_with_what_was_asked_for_in_vain():
    """Each prompt is judged once, in order, and drawn with the weights of the step that judges it."""
    mixed = [index % 3 == 0 for index in range(99)]
    cursor, judged = DataCursor(), []
    for number in range(5):
        step = collector(Verdicts(tuple(mixed)), Slots(5)).collect(cursor, step=number, version=number)
        judged += sorted(names([*step.groups, *step.dropped]))
        versions = {each.completion.version for group in step.groups for each in group.rollouts}
        assert versions == {number}
        assert step.cursor.carried == ()
        cursor = step.cursor
    assert judged == list(range(cursor.next_problem))
    assert 0.3 < cursor.kept_share < 0.4


def test_groups_that_an_earlier_version_carried_over_come_first():
    carried = collected([]).groups[:3]
    step = collector(Verdicts(()), Slots()).collect(DataCursor(9, carried), step=1, version=1)
    assert names(step.groups) == [0, 1, 2, 9]
    full = collector(Verdicts(()), Slots()).collect(DataCursor(9, (*carried, *carried)), step=1, version=1)
    assert names(full.groups) == [0, 1, 2, 0]
    assert (names(full.cursor.carried), full.rounds, full.cursor.next_problem) == ([1, 2], 0, 9)


def test_what_a_curriculum_passes_over_behind_the_last_group_is_looked_at_again():
    solved = {str(index): 1.0 for index in range(0, 40, 2)}
    gather = collector(Verdicts(tuple(index % 3 == 0 for index in range(99))), Slots(5), curriculum=Curriculum())
    step = gather.collect(DataCursor(rates=solved, kept_share=1 / 3), step=0, version=0)
    passed_over, judged = [index for index, _ in step.passed_over], names([*step.groups, *step.dropped])
    assert step.unneeded > 0 < len(passed_over)
    assert sorted([*passed_over, *judged]) == list(range(step.cursor.next_problem))
    assert step.cursor.rates.keys() - solved.keys() == {str(index) for index in judged if index % 2}


def test_a_step_of_an_earlier_version_opens_without_what_it_did_not_know():
    step, routes = collected([False, True] * 20), dict[str, Any]()
    values = json.loads(json.dumps(plain_collected(step, routes, "")))
    again = read_collected(values, PROBLEM_AT, routes, "")
    assert (again, again.unneeded > 0, again.cursor.kept_share < 1) == (step, True, True)
    del values["kept_share"], values["unneeded"]
    older = read_collected(values, PROBLEM_AT, routes, "")
    assert older == replace(step, unneeded=0, cursor=replace(step.cursor, kept_share=1.0))


PROBLEM_AT: Any = lambda index, split, known: Verdicts(()).problem(index, split, 0)  # noqa: E731


def test_a_step_of_which_nothing_can_be_used_ends_at_its_limit():
    step = collected([False] * 99, refill_rounds=3)
    assert (step.groups, len(step.dropped), step.rounds, step.unneeded) == ((), 20, 3, 0)


# Who takes part


@dataclass(frozen=True)
class AllAtOnce:
    """An environment that knows nothing of questions that come later."""

    def play(self, questions: Sequence[Question], ask: Ask) -> Iterator[tuple[int, tuple[Completion, ...]]]:
        return ask([question.request for question in questions])


def test_an_environment_that_takes_no_later_questions_is_called_again():
    mixed = [index % 3 == 0 for index in range(99)]
    gather = replace(collector(Verdicts(tuple(mixed)), Slots(5)), environment=AllAtOnce())
    assert gather.collect(DataCursor(), step=0, version=0) == collected(mixed)


def test_an_error_of_a_grader_ends_the_step():
    class Broken(Verdicts):
        def grade(self, problems, completions):
            raise RuntimeError("no grade")

    with pytest.raises(RuntimeError, match="no grade"):
        collector(Broken(()), Slots()).collect(DataCursor(), step=0, version=0)


def test_a_sampler_that_returns_what_was_never_asked_for_is_refused():
    class Wrong(Slots):
        def stream(self, requests, options, **more):
            yield len(requests) + 5, ()

    with pytest.raises(ValueError, match="it must return each number from 0 to 3 once"):
        collected([], Wrong())


# The embedded sampler


TEXTS = ("1+1=", "a", "the sum of 12 and 30 is ", "99*3=", "x", "a", "2+2=", "of all the numbers that there are 7 is ")
REQUESTS = [Request(100 + i, tuple(TOKENIZER(text)["input_ids"]), 2) for i, text in enumerate(TEXTS)]
OPTIONS = SamplingOptions(max_tokens=6)


@pytest.fixture(scope="module")
def model():
    return tiny_model(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48).double()


@pytest.mark.parametrize("shared_prefix", [False, True], ids=["padded", "paged"])
@pytest.mark.parametrize("slots", [5, 64])
def test_requests_that_come_later_are_drawn_as_if_they_had_been_there(model, slots: int, shared_prefix: bool):
    """Also longer prompts than there was room for, and one that others have too."""
    sampler = EmbeddedSampler(model, TOKENIZER, slots=slots, shared_prefix=shared_prefix)
    whole = sampler.sample(REQUESTS, OPTIONS, seed=1, step=2, version=3)
    later = deque([REQUESTS[2:4], REQUESTS[4:7], REQUESTS[7:]])
    stream = sampler.stream(
        REQUESTS[:2], OPTIONS, seed=1, step=2, version=3, more=lambda: later.popleft() if later else ()
    )
    parts = dict(stream)
    assert sorted(parts) == list(range(len(REQUESTS)))
    for number, wanted in enumerate(whole):
        assert [each.tokens for each in parts[number]] == [each.tokens for each in wanted]
        for one, other in zip(parts[number], wanted, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-9)


@pytest.mark.parametrize("shared_prefix", [False, True], ids=["padded", "paged"])
def test_a_call_that_is_given_up_leaves_nothing_behind(model, shared_prefix: bool):
    sampler = EmbeddedSampler(model, TOKENIZER, slots=5, shared_prefix=shared_prefix)
    stream = sampler.stream(REQUESTS, OPTIONS, seed=1, step=2, more=tuple)
    next(stream)
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    fresh = EmbeddedSampler(model, TOKENIZER, slots=5, shared_prefix=shared_prefix)
    assert sampler.sample(REQUESTS, OPTIONS, seed=1, step=3) == fresh.sample(REQUESTS, OPTIONS, seed=1, step=3)


def test_a_step_with_the_embedded_sampler_repeats_to_the_bit_and_has_the_same_groups_with_other_slots(model):
    def step(slots: int) -> Collected:
        task = Verdicts(tuple(index % 3 == 0 for index in range(99)))
        sampler = EmbeddedSampler(model, TOKENIZER, slots=slots)
        gather = replace(collector(MixedByText(task), sampler), sampling=OPTIONS)
        return gather.collect(DataCursor(kept_share=0.4), step=0, version=0)

    one, again, other = step(4), step(4), step(9)
    assert one == again
    assert [group.ordinal for group in one.groups] == [group.ordinal for group in other.groups]
    assert [tokens(group) for group in one.groups] == [tokens(group) for group in other.groups]
    assert one.unneeded == other.unneeded


def test_a_file_that_is_read_again_within_a_step_is_sampled_anew(model):
    """Equal prompts are in the sampler at the same time, each with random numbers of its own."""

    class Three(Verdicts):
        def problem(self, index: int, split, seed: int) -> Problem:
            return super().problem(index % 3, split, seed)

    task = MixedByText(Three((True, False, False)))
    gather = replace(collector(task, EmbeddedSampler(model, TOKENIZER, slots=5)), sampling=OPTIONS)
    step = gather.collect(DataCursor(kept_share=0.4), step=0, version=0)
    assert [group.ordinal for group in step.groups] == [0, 3, 6, 9]
    assert {group.problem.id for group in step.groups} == {"0"}
    assert len({str(tokens(group)) for group in step.groups}) == 4


def tokens(group: Group) -> list[tuple[int, ...]]:
    return [each.completion.tokens for each in group.rollouts]


@dataclass(frozen=True)
class MixedByText:
    """The same problems, of which one sample is right where they are mixed, whatever was sampled."""

    inner: Verdicts
    while_sampling = True

    def size(self, split) -> int | None:
        return None

    def problem(self, index: int, split, seed: int) -> Problem:
        return self.inner.problem(index, split, seed)

    def grade(self, problems, completions) -> list[Grade]:
        return [
            Grade(float(self.inner.is_mixed(int(problem.id)) and number == 0))
            for number, problem in enumerate(problems)
        ]

    def reference(self, problem: Problem) -> str | None:
        return problem.answer
