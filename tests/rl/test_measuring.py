"""Lengths by verdict, loops, coverage and what the clip stopped, by hand."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proximo.algorithms import GRPO, SAPO
from proximo.learner.guard import Skipped, Update
from proximo.losses import Clip
from proximo.rl.assemble import to_batch
from proximo.rl.metrics import PERIOD, TIMES, clipping_metrics, coverage_metrics, has_loop, length_metrics
from proximo.types import Completion, Grade, Group, Problem, Rollout
from proximo.types.batches import Stats

PLAIN = replace(GRPO, kl=None, gate=Clip(0.2, 0.2))


def completion(*tokens: int, sampled: tuple[bool, ...] = ()) -> Completion:
    return Completion(tokens, (-1.0,) * len(tokens), "", "stop", sampled=sampled)


def rollout(length: int, outcome: float) -> Rollout:
    return Rollout(completion(*range(length)), Grade(outcome))


def group(*outcomes: float) -> Group:
    return Group(Problem("a", "a", ""), (5, 6), tuple(rollout(2, outcome) for outcome in outcomes))


def test_lengths_of_right_and_wrong_completions():
    found = length_metrics([rollout(2, 1.0), rollout(4, 1.0), rollout(9, 0.5), rollout(99, math.nan)])
    assert found == {"length_right": 3, "length_wrong": 9}
    assert math.isnan(length_metrics([rollout(2, 1.0)])["length_wrong"])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((7, 7, 7, 7), True),
        ((7, 7, 7, 1), False),
        ((3, 1, 2, 1, 2, 1, 2, 1, 2, 5), True),
        ((3, 1, 2, 1, 2, 1, 2, 1, 5, 2), False),  # the fourth time is not finished
        ((1, 2, 3, 4) * 4, True),
        ((1, 2, 3, 4, 5) * 4, False),  # a phrase of five
        ((), False),
    ],
)
def test_loops_by_hand(tokens, expected):
    assert has_loop(completion(*tokens)) is expected


@given(st.lists(st.integers(0, 2), max_size=40))
def test_a_loop_is_a_phrase_that_stands_there_four_times_in_a_row(tokens):
    starts = [(start, period) for period in range(1, PERIOD + 1) for start in range(len(tokens))]
    repeated = any(
        tokens[start : start + TIMES * period] == tokens[start : start + period] * TIMES
        for start, period in starts
        if start + TIMES * period <= len(tokens)
    )
    assert has_loop(completion(*tokens)) is repeated


def test_a_loop_of_an_environment_is_not_the_policys():
    assert not has_loop(completion(7, 7, 7, 7, 7, sampled=(True, False, False, False, True)))


def test_coverage_is_what_smaller_groups_would_have():
    """One right of four: half of the pairs have it. The estimate for all four is what was seen."""
    found = coverage_metrics([group(1, 0, 0, 0), group(0, 0, 0, 0), group(1, 1, math.nan, math.nan)])
    assert found == {"solved_by_any/2": pytest.approx((0.5 + 0 + 1) / 3), "solved_by_any/4": pytest.approx(0.5)}
    assert coverage_metrics([group(1)]) == {}


def an_update(ratios: list[list[float]], old: list[list[float]], **changes) -> Update:
    before = torch.tensor(old).log()
    logprobs = before + torch.tensor(ratios).log()
    rows = torch.arange(len(old))
    update = Update(Stats(), 1.0, None, None, rows, logprobs, before, torch.zeros_like(before))
    return replace(update, **changes)


def a_batch(advantages: list[list[float]]):
    batch = to_batch([group(1.0, 0.0)])
    return replace(batch, advantages=torch.tensor(advantages))


def test_what_the_clip_stopped_by_old_probability():
    """Blocked are the rare token at 1.3 and the likely one at 1.25; one with a negative advantage does not count."""
    batch = a_batch([[1.0, 1.0], [1.0, -1.0]])
    found = clipping_metrics(PLAIN, batch, [an_update([[1.3, 1.1], [1.25, 0.5]], [[0.05, 0.06], [0.6, 0.6]])])
    assert found["clip_high/rare"] == 0.5
    assert found["clip_high/likely"] == 1.0
    assert math.isnan(found["clip_high/unlikely"])
    assert found["clip_high/old_probability"] == pytest.approx((0.05 + 0.6) / 2)


def test_a_soft_gate_stops_nothing_and_other_rows_do_not_count():
    batch, ratios, old = a_batch([[1.0, 1.0], [1.0, -1.0]]), [[1.3, 1.1], [1.25, 0.5]], [[0.05, 0.06], [0.6, 0.6]]
    assert clipping_metrics(SAPO, batch, [an_update(ratios, old)])["clip_high/rare"] == 0
    skipped = an_update(ratios, old, skipped=Skipped("spike", torch.arange(2)))
    assert clipping_metrics(PLAIN, batch, [skipped]) == {}
    dead = [[1.3, 1.1], [math.nan, math.nan]]  # a row that was not run
    assert math.isnan(clipping_metrics(PLAIN, batch, [an_update(dead, old)])["clip_high/likely"])
