"""The simulator: steps by hand, against a reference that goes event by event, and laws."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proximo_lab.cluster_plan.pool import Engines
from proximo_lab.cluster_plan.rules import Rule, aggregate, between, in_flight
from proximo_lab.cluster_plan.simulate import Learner, Work, groups_needed, simulate
from tests.lab.cluster_plan.reference import simulated

PLAIN = Engines(number=2, slots=4, base=1.0, per_request=0.0, per_token=0.0)
ENGINES = st.builds(
    Engines,
    number=st.integers(1, 4),
    slots=st.integers(1, 4),
    base=st.floats(0.01, 1.0),
    per_request=st.floats(0.0, 0.1),
    per_token=st.floats(0.0, 0.01),
    prefill=st.floats(0.0, 0.01),
)
LEARNERS = st.builds(Learner, fixed=st.floats(0.1, 30.0), per_token=st.floats(0.0, 0.1), chunks=st.sampled_from([1, 2]))
WORKS = st.builds(
    Work,
    groups=st.sampled_from([2, 4]),
    group_size=st.integers(1, 3),
    prompt_tokens=st.integers(1, 20),
    push=st.floats(0.0, 5.0),
    recompute=st.booleans(),
)
RULES = st.one_of(
    st.integers(0, 3).map(in_flight),
    st.integers(0, 3).map(between),
    st.sampled_from([0.0, 0.5, 1.0, 2.5]).map(aggregate),
    st.builds(lambda depth, slack: Rule(depth, depth + slack), st.integers(0, 2), st.integers(1, 2)),
)
STEPS = 6


def lengths_for(work, rule, seed, steps=STEPS):
    drawn = np.random.default_rng(seed).lognormal(3.0, 1.0, (groups_needed(work, rule, steps), work.group_size))
    return np.maximum(drawn, 1.0)


def test_a_step_by_hand():
    # Two groups of two: lengths 3, 5 and 2, 9. A decode step takes 1 s and 0.1 s for each request of an engine; four
    # requests on two engines are two each.
    engines = replace(PLAIN, per_request=0.1)
    work, learner = Work(groups=2, group_size=2, prompt_tokens=1, push=3.0), Learner(fixed=4.0, per_token=0.5)
    lengths = np.array([[3, 5], [2, 9]] * 2, float)
    found = simulate(engines, learner, work, in_flight(0), lengths, steps=2)
    # 2 steps with 4 requests, 1 with 3 on two engines, 2 with 2 (one each), 4 with 1.
    sampling = 2 * 1.2 + 1 * 1.15 + 2 * 1.1 + 4 * 1.1
    training = 4.0 + 0.5 * (19 + 2)
    assert found.ends == pytest.approx([sampling + training, 2 * (sampling + training) + 3])
    assert found.updating == pytest.approx(training)
    assert found.ages == found.token_ages == {0: 1.0}


def test_keys_that_grow_by_hand():
    # One request of 4 tokens with a prompt of 10: 0.5 s a token of context, that goes from 10 to 14 while it decodes.
    engines = Engines(1, 1, base=1.0, per_request=0.0, per_token=0.5, prefill=0.1)
    work = Work(groups=1, group_size=1, prompt_tokens=10)
    found = simulate(engines, Learner(2.0), work, in_flight(0), np.full((1, 1), 4.0), steps=1)
    assert found.ends == pytest.approx([10 * 0.1 + 4 * (1 + 0.5 * 12) + 2])


def test_one_step_ahead_by_hand():
    # A step samples 10 s and trains 4 s: with one step of slots more, sampling never waits, and training is hidden.
    work, lengths = Work(groups=1, group_size=2, prompt_tokens=1), np.full((20, 2), 10.0)
    alone = simulate(PLAIN, Learner(4.0), work, in_flight(0), lengths, steps=8, first=2)
    ahead = simulate(PLAIN, Learner(4.0), work, between(1), lengths, steps=8, first=2)
    assert (alone.seconds, ahead.seconds) == (pytest.approx(14), pytest.approx(10))
    assert ahead.ages == {1: 1.0}
    assert ahead.learner_busy == pytest.approx(0.4)
    assert ahead.engines_busy == pytest.approx(1.0)


def test_requests_wait_for_slots():
    work = Work(groups=1, group_size=3, prompt_tokens=1)
    one = Engines(1, 1, base=1.0, per_request=0.0, per_token=0.0)
    found = simulate(one, Learner(1.0), work, in_flight(0), np.array([[2.0, 3.0, 4.0]]), steps=1)
    assert found.ends == pytest.approx([2 + 3 + 4 + 1])


def test_the_aggregate_rule_passes_its_bound_and_slots_do_not():
    # Group 7 is slow. It is issued at version 2; the steps go on without it, or wait for it at version 3, or at 5.
    work, lengths = Work(groups=2, group_size=1, prompt_tokens=1), np.full((60, 1), 1.0)
    lengths[7] = 20.0
    many, run = replace(PLAIN, slots=100), {"lengths": lengths, "steps": 16}
    assert simulate(many, Learner(1.0), work, aggregate(1), **run).oldest > 8
    assert simulate(many, Learner(1.0), work, in_flight(1), **run).oldest == 1
    passing = simulate(many, Learner(1.0), work, Rule(1, 3), **run)
    assert passing.oldest == 3
    assert passing.ends[4] < 20 < passing.ends[5]


def test_tokens_are_younger_than_their_groups():
    # The group begins with version 0 and is trained at version 1; a push comes in the middle of its tokens.
    work = Work(groups=1, group_size=1, prompt_tokens=1)
    lengths = np.array([[10.0], [20.0], [20.0], [20.0]])
    found = simulate(replace(PLAIN, number=4), Learner(5.0), work, in_flight(1), lengths, steps=2, first=1)
    assert found.ages == {1: 1.0}
    assert found.token_ages == pytest.approx({0: 0.25, 1: 0.75})


def test_a_request_that_waits_for_a_push_begins_with_the_weights_of_the_next():
    """Updates of 0.1 s while engines read contexts again for longer: what is issued in that time has not begun."""
    engines = replace(PLAIN, number=1, prefill=0.0078125)
    work = Work(groups=2, group_size=2, prompt_tokens=1)
    lengths = np.array([[23.0, 18.0], [38.0, 22.0], [12.0, 29.0], [74.0, 52.0], *[[10.0, 6.0]] * 20])
    found = simulate(engines, Learner(0.1), work, in_flight(3), lengths, steps=STEPS)
    ends, staleness, _ = simulated(engines, Learner(0.1), work, in_flight(3), lengths, steps=STEPS)
    assert found.ends == pytest.approx(ends, rel=1e-9)
    assert found.staleness == staleness


@settings(max_examples=50, deadline=None)
@example(
    Engines(1, 4, base=1.0, per_request=0.0, per_token=0.0, prefill=0.0078125),
    Learner(0.109375),
    Work(groups=2, group_size=2, prompt_tokens=1),
    in_flight(3),
    0,
)
@given(ENGINES, LEARNERS, WORKS, RULES, st.integers(0, 99))
def test_it_is_what_the_reference_says(engines, learner, work, rule, seed):
    lengths = lengths_for(work, rule, seed)
    found = simulate(engines, learner, work, rule, lengths, steps=STEPS)
    ends, staleness, _ = simulated(engines, learner, work, rule, lengths, steps=STEPS)
    assert found.ends == pytest.approx(ends, rel=1e-9)
    assert found.staleness == staleness


@settings(max_examples=25, deadline=None)
@given(ENGINES, LEARNERS, WORKS, st.integers(0, 3), st.integers(0, 2), st.booleans(), st.integers(0, 99))
def test_the_bound_is_never_passed(engines, learner, work, depth, slack, drained, seed):
    rule = Rule(depth, depth + slack, drained=drained)
    found = simulate(engines, learner, work, rule, lengths_for(work, rule, seed), steps=STEPS)
    assert found.oldest <= depth + slack
    assert max(found.tokens) <= depth + slack


@settings(max_examples=15, deadline=None)
@given(ENGINES, LEARNERS, WORKS, st.integers(0, 99))
def test_without_staleness_a_step_is_the_sum_of_its_phases(engines, learner, work, seed):
    learner = replace(learner, chunks=1)
    lengths = lengths_for(work, in_flight(0), seed)
    found = simulate(engines, learner, work, in_flight(0), lengths, steps=STEPS)
    total = 0.0
    for step in range(STEPS):
        rows = lengths[step * work.groups : (step + 1) * work.groups]
        alone = simulate(engines, Learner(0.0), work, in_flight(0), rows, steps=1).ends[0]
        training = learner.fixed + learner.per_token * (rows.sum() + work.groups * work.prompt_tokens)
        total += alone + training + work.push * bool(step)
        assert found.ends[step] == pytest.approx(total)
    same = simulate(engines, learner, work, between(0), lengths, steps=STEPS)
    assert same.ends == pytest.approx(found.ends)


@pytest.mark.parametrize("waits", [True, False])
@settings(max_examples=25, deadline=None)
@given(ENGINES, LEARNERS, WORKS, st.integers(0, 99), st.integers(1, 3))
def test_more_engines_are_never_slower_without_staleness(waits, engines, learner, work, seed, more):
    """Where requests wait for slots this needs contexts that cost nothing: see `Pool`."""
    room = {"per_token": 0.0} if waits else {"slots": work.groups * work.group_size}
    engines = replace(engines, **room)
    lengths = lengths_for(work, in_flight(0), seed)
    run = {"learner": learner, "work": work, "rule": in_flight(0), "lengths": lengths, "steps": STEPS}
    few, many = simulate(engines, **run), simulate(replace(engines, number=engines.number + more), **run)
    assert many.ends[-1] <= few.ends[-1] * (1 + 1e-9)


@pytest.mark.parametrize("rule", [in_flight(1), in_flight(2), between(1)])
def test_more_engines_are_not_slower_where_they_are_many(rule):
    # Not a law for a handful of requests: steps that end sooner issue groups sooner, which slow down the last ones.
    work, learner = Work(groups=64, group_size=8, prompt_tokens=100, push=1.0), Learner(10.0, 1e-4)
    lengths = np.random.default_rng(5).lognormal(6.0, 1.0, (groups_needed(work, rule, 10), 8))
    engine = Engines(1, 256, base=0.005, per_request=1e-4, per_token=1e-7, prefill=1e-5)
    seconds = [
        simulate(replace(engine, number=number), learner, work, rule, lengths, steps=10, first=4).seconds
        for number in (1, 2, 3, 4, 6, 8, 12, 16, 32)
    ]
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(seconds))


@settings(max_examples=8, deadline=None)
@given(ENGINES, LEARNERS, WORKS, RULES, st.integers(0, 99))
def test_equal_lengths_give_equal_steps(engines, learner, work, rule, seed):
    first, second = (
        simulate(engines, learner, work, rule, lengths_for(work, rule, seed), steps=STEPS) for _ in range(2)
    )
    assert first == second


def test_values_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="staleness is -1: give 0 or more"):
        in_flight(-1)
    with pytest.raises(ValueError, match="the bound is 1, below the depth 2"):
        Rule(2, 1)
    with pytest.raises(ValueError, match="0 engines with 4 slots"):
        replace(PLAIN, number=0)
