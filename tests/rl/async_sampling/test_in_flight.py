"""Groups that are sampled while weights change: which of them a step takes, how old they are, and what is lost."""

import json
import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from proximo.rl.async_sampling.in_flight import GroupSlot, InFlight, choice, num_slots
from proximo.rl.config import AheadOptions, TrainingOptions
from proximo.rl.rollouts import collect
from proximo.runs.records import Active, Collected, DataCursor, Pending
from proximo.runs.rollout_json import plain_active, read_active
from proximo.samplers.in_progress import Begun, BegunRequests
from proximo.types import Completion, Grade, Group, Problem, Rollout

SOON = 60.0
"""Seconds that nothing here needs; a bound, not a measure."""


def group(ordinal: int, outcome: float = 1.0) -> Group:
    problem = Problem(str(ordinal), "?", "")
    completion = Completion((1, 2), (0.0, 0.0), "a", "stop")
    return Group(problem, (0,), (Rollout(completion, Grade(outcome)),), ordinal=ordinal)


def slots(states: str, passed: Sequence[int] = ()) -> list[GroupSlot]:
    """One for each letter: `e` has ended, `w` has not."""
    found = [GroupSlot(number, Problem(str(number), "?", ""), 0, 0) for number in range(len(states))]
    for slot, state in zip(found, states, strict=True):
        if state == "e":
            slot.result.set_result(group(slot.ordinal))
    for slot, count in zip(found, passed, strict=False):
        slot.passed = count
    return found


@pytest.mark.parametrize(
    ("states", "window", "passed", "chosen", "blocking"),
    [
        ("eewee", 0, (), [0, 1], []),  # what comes after the step's share does not matter
        ("eweee", 0, (), [0, 2], [1]),  # no window: in order
        ("eweee", 1, (), [0, 2], []),
        ("eweee", 1, (0, 1), [0, 2], [1]),  # one has passed it before
        ("wweee", 2, (), [2, 3], []),
        ("wweee", 1, (), [2, 3], [0, 1]),
        ("wewee", 1, (), [1, 3], [0]),  # two pass the first, one the third
        ("wwwww", 2, (), [], []),
        ("ewwww", 0, (), [0], []),
    ],
)
def test_which_groups_a_step_takes_and_for_which_it_waits(states, window, passed, chosen, blocking):
    found = choice(slots(states, passed), 2, window)
    assert [[slot.ordinal for slot in each] for each in found] == [chosen, blocking]


class Source:
    """Groups that end when the test says so."""

    sampler: Any = None

    def __init__(self, groups: int = 2, *, refills: bool = False, outcomes: Mapping[int, float] | None = None) -> None:
        self.training, self.refills = TrainingOptions(groups=groups, minibatches=1, refill_rounds=3), refills
        self.outcomes = outcomes or {}
        self.started: dict[int, tuple[int, int]] = {}
        """Step and version by ordinal."""
        self.ended: dict[int, threading.Event] = {}
        self.given_up: list[tuple[int, int]] = []
        self.changed = threading.Condition()

    def chosen(self, first, count, rates):
        return [(ordinal, Problem(str(ordinal), "?", "")) for ordinal in range(first, first + count)], []

    def group(self, ordinal, problem, *, step, version, grading):
        with self.changed:
            self.started[ordinal] = step, version
            event = self.ended.setdefault(ordinal, threading.Event())
            self.changed.notify_all()
        assert event.wait(SOON)
        if (step, ordinal) in self.given_up:
            raise RuntimeError("given up")
        with grading:
            return group(ordinal, self.outcomes.get(ordinal, 1.0))

    def drops(self, group):
        return group.rollouts[0].grade.outcome == 0

    def rates(self, rates, groups):
        return rates

    def drop(self, step: int, ordinal: int) -> None:
        self.given_up.append((step, ordinal))
        self.end(ordinal)

    def end(self, *ordinals: int) -> None:
        with self.changed:
            for ordinal in ordinals:
                self.ended.setdefault(ordinal, threading.Event()).set()

    def wait_for(self, count: int) -> None:
        """Until so many groups were started."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.started) >= count, SOON)


def made(source: Source, *, steps: int = 9, **options) -> InFlight:
    return InFlight(source, source.drop, AheadOptions(switch="in_flight", **options), steps=steps)


def finish(ahead: InFlight, source: Source, *numbers: int) -> None:
    """End these groups, and wait until their slots know."""
    source.end(*numbers)
    for slot in ahead._slots:
        if slot.ordinal in numbers:
            slot.result.result(SOON)


def ordinals(collected: Collected) -> list[int]:
    return [each.ordinal for each in collected.groups if each.ordinal is not None]


def test_slots_are_filled_when_a_step_begins_and_freed_when_it_is_collected():
    source = Source()
    ahead = made(source, staleness=1)
    assert ahead.start_step(0, DataCursor(), 0) == 0
    source.wait_for(4)
    finish(ahead, source, 0, 1)
    collected = collect(ahead, source)
    assert (ordinals(collected), collected.cursor.next_problem, collected.sampled_tokens) == ([0, 1], 4, 4)
    assert (collected.late, collected.expired) == ((), ())
    assert [each.ordinal for each in ahead.pending().active] == [2, 3]
    assert ahead.start_step(5, collected.cursor, 1) == 0  # groups of the first weights are still there
    source.wait_for(6)
    assert source.started[4] == source.started[5] == (1, 5)
    finish(ahead, source, 2, 3, 4, 5)
    assert ordinals(collect(ahead, source)) == [2, 3]
    assert ahead.start_step(9, DataCursor(6), 2) == 5
    ahead.close()
    assert set(source.given_up) == {(2, 6), (2, 7)}


@pytest.mark.slow("trains a run")
@pytest.mark.parametrize("window", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("refills", [False, True])
def test_no_group_is_older_than_the_bound_and_none_is_lost(window: float, refills: bool):
    """Groups end in a drawn order, one in five is dropped, and stragglers are many."""
    chance, steps, groups, staleness = random.Random(int(8 * window) + refills), 30, 4, 2
    outcomes = {ordinal: float(chance.random() > 0.2) for ordinal in range(1000)}
    source = Source(groups, refills=refills, outcomes=outcomes)
    ahead = made(source, steps=steps, staleness=staleness, window=window)
    cursor, ages, states = DataCursor(), list[int](), dict[int, list[str]]()
    for step in range(steps):
        ahead.start_step(step, cursor, step)
        most = num_slots(groups, staleness, int(window * groups))
        assert len(ahead.pending().active) == min(most, (steps - step) * groups)
        is_collected = threading.Event()
        ending = threading.Thread(target=_end_in_any_order, args=(source, chance, is_collected))
        ending.start()
        collected = collect(ahead, source)
        is_collected.set()
        ending.join()
        cursor = collected.cursor
        taken = [*collected.groups, *(() if refills else collected.dropped)]
        assert len(taken) == groups
        ages += [step - source.started[each.ordinal or 0][1] for each in taken]
        for each in (*collected.groups, *collected.dropped):
            states.setdefault(each.ordinal or 0, []).append("ended")
        for ordinal, _ in collected.late:
            states.setdefault(ordinal, []).append("late")
        seen = max(states)
        active = {each.ordinal for each in ahead.pending().active}
        assert [each for each in range(seen + 1) if each not in states] == []
        assert all(states[each] == ["late"] for each in active if each < seen)
    assert max(ages) == staleness if window == 0 else max(ages) <= staleness
    assert ahead.pending().active == ()
    assert all(each in (["ended"], ["late", "ended"]) for each in states.values())
    assert any(each == ["late", "ended"] for each in states.values()) == (window > 0 or refills)


def _end_in_any_order(source: Source, chance: random.Random, is_collected: threading.Event) -> None:
    """End what was started, one by one, until the step has been collected."""
    while not is_collected.wait(0.0005):
        with source.changed:
            running = [each for each in source.started if not source.ended[each].is_set()]
        if running:
            source.end(chance.choice(running))


def test_younger_groups_pass_one_that_takes_long_until_the_window_is_used_up():
    source = Source()
    ahead = made(source, staleness=2, window=1.0)
    ahead.start_step(0, DataCursor(), 0)
    source.wait_for(4)
    finish(ahead, source, 1, 2, 3)
    first = collect(ahead, source)
    assert (ordinals(first), [ordinal for ordinal, _ in first.late]) == ([1, 2], [0])
    [straggler, *_] = ahead.pending().active
    assert (straggler.ordinal, straggler.passed, straggler.is_noted) == (0, 2, True)
    ahead.start_step(1, first.cursor, 1)
    source.wait_for(6)
    finish(ahead, source, 4, 5)
    threading.Timer(0.1, source.end, [0]).start()
    second = collect(ahead, source)  # waits, since two have passed it
    assert ordinals(second) == [0, 3]
    assert second.late == ()  # the ledger has it already
    ahead.close()


def test_a_group_that_holds_up_a_full_step_is_given_up_and_replaced():
    source = Source()
    ahead = made(source, staleness=1, expire=0.05)
    ahead.start_step(0, DataCursor(), 0)
    source.wait_for(4)
    finish(ahead, source, 1)
    threading.Timer(0.2, source.end, [2]).start()  # until then there is nothing to fill the step with
    collected = collect(ahead, source)
    assert (ordinals(collected), [ordinal for ordinal, _ in collected.expired]) == ([1, 2], [0])
    assert source.given_up == [(0, 0)]
    assert collected.late == ()
    assert [notice.kind for notice in ahead.take_notices()] == ["expired"]
    assert ahead.take_notices() == []
    ahead.start_step(1, collected.cursor, 1)
    assert [each.ordinal for each in ahead.pending().active] == [3, 4, 5, 6]
    ahead.close()


def test_a_step_ends_where_everything_is_dropped():
    source = Source(refills=True, outcomes=dict.fromkeys(range(100), 0.0))
    ahead = made(source, staleness=1)
    ahead.start_step(0, DataCursor(), 0)
    source.end(*range(100))
    collected = collect(ahead, source)
    assert collected.groups == ()
    assert len(collected.dropped) >= 3 * 2  # refill_rounds
    ahead.close()


def test_what_sampling_raises_comes_out_of_the_step():
    source = Source()
    ahead = made(source, staleness=1)
    ahead.start_step(0, DataCursor(), 0)
    source.drop(0, 3)
    with pytest.raises(RuntimeError, match="given up"):
        collect(ahead, source)
    ahead.close()


def test_a_resume_keeps_what_has_ended_and_samples_the_rest_again_in_its_place():
    source = Source()
    ahead = made(source, staleness=2, window=1.0)
    ahead.start_step(0, DataCursor(), 0)
    source.wait_for(4)
    finish(ahead, source, 1, 2, 3)
    cursor = collect(ahead, source).cursor
    active = ahead.pending().active
    ahead.close()
    assert [(each.ordinal, each.passed, each.is_noted, each.group is None) for each in active] == [
        (0, 2, True, True),
        (3, 0, False, False),
    ]
    again = Source()
    resumed = made(again, staleness=2, window=1.0)
    resumed.restore(Pending(active=active))
    assert resumed.start_step(7, cursor, 1) == 0  # the group that has ended was sampled by the first weights
    again.wait_for(3)
    assert again.started == {0: (0, 7), 4: (1, 7), 5: (1, 7)}
    finish(resumed, again, 0, 4, 5)
    assert ordinals(collect(resumed, again)) == [0, 3]
    resumed.close()
    assert isinstance(active[0], Active)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"staleness": 1, "window": 0.5}, r'ahead.window is 0.5, but ahead.switch is "between"'),
        ({"staleness": 1, "expire": 2.0}, r'ahead.expire is 2.0, but ahead.switch is "between"'),
        ({"switch": "in_flight"}, "ahead.staleness is 0: give a staleness of at least 1"),
        (
            {"switch": "in_flight", "staleness": 1, "window": 1.5},
            "ahead.window is 1.5: give 0, or less than ahead.staleness, 1",
        ),
        ({"switch": "in_flight", "staleness": 1, "expire": 0.0}, "ahead.expire is 0.0: give a positive number"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AheadOptions(**options)


def begun(ordinal: int, tokens: tuple[int, ...]) -> Begun:
    return Begun(ordinal, 0, "", tokens, (0.0,) * len(tokens), (3,) * len(tokens), "abort")


def test_a_resumed_run_continues_what_was_begun_with_its_version():
    source, kept = Source(), BegunRequests(lambda: None)
    options = AheadOptions(switch="in_flight", staleness=1)
    ahead = InFlight(source, source.drop, options, steps=9, begun=kept)
    ahead.start_step(3, DataCursor(), 3)
    source.wait_for(4)
    kept.note(3, 0, begun(0, (5, 6)))
    kept.note(3, 1, begun(1, ()))
    saved = ahead.pending().active
    assert [[each.tokens for each in slot.begun] for slot in saved] == [[(5, 6)], [()], [], []]
    asked: Any = lambda ordinal, *_: saved[ordinal].problem  # noqa: E731
    assert [read_active(json.loads(json.dumps(plain_active(slot, {}))), asked, {}) for slot in saved] == list(saved)
    finish(ahead, source, 1)
    kept.interrupt = lambda: kept.note(3, 0, begun(0, (5, 6, 7)))
    later = ahead.newest(Pending(active=saved), interrupt=False).active
    assert [(slot.group is None, len(slot.begun)) for slot in later[:2]] == [(True, 1), (False, 0)]
    assert later[0].begun[0].tokens == (5, 6)
    later = ahead.newest(Pending(active=saved), interrupt=True).active
    assert later[0].begun[0].tokens == (5, 6, 7)
    ahead.close()

    source, kept = Source(), BegunRequests(lambda: None)
    again = InFlight(source, source.drop, options, steps=9, begun=kept)
    again.restore(Pending(active=later))
    assert again.start_step(4, DataCursor(4), 4) == 3
    source.wait_for(3)
    assert source.started == {0: (3, 3), 2: (3, 4), 3: (3, 4)}  # those that had no token begin with the new weights
    assert [each.tokens for each in kept.of_group(3, 0)] == [(5, 6, 7)]
    again.close()
    assert kept.of_group(3, 0) == ()


def test_a_step_that_is_given_up_loses_none_of_what_it_collected():
    source, kept = Source(), BegunRequests(lambda: None)
    ahead = InFlight(source, source.drop, AheadOptions(switch="in_flight", staleness=1), steps=9, begun=kept)
    ahead.start_step(0, DataCursor(), 0)
    source.wait_for(4)
    saved = ahead.pending().active
    finish(ahead, source, 0, 1)
    collect(ahead, source)
    later = ahead.newest(Pending(active=saved), interrupt=False).active
    assert [slot.ordinal for slot in later if slot.group is not None] == [0, 1]
    assert [slot.ordinal for slot in later] == [0, 1, 2, 3]
    ahead.close()
