"""Verdicts of differences that are worked out by hand."""

import math

import pytest

from proximo.studies.verdict import difference, shows, verdict


def test_an_interval_is_students_t_over_the_seeds():
    found = difference([0.1, 0.3])
    # s = 0.2/√2, s/√2 = 0.1, t = 12.706 for one degree of freedom.
    assert found.mean == pytest.approx(0.2)
    assert found.half == pytest.approx(1.2706)
    assert (found.low, found.high) == pytest.approx((-1.0706, 1.4706))


def test_one_seed_has_no_interval_and_no_verdict():
    found = difference([0.5, math.nan])
    assert found.values == (0.5,)
    assert not found.is_known
    assert verdict(found, 0.1) == "no verdict"


def around(mean: float) -> list[float]:
    """Four seeds: t = 3.182, s = 0.01155, half = 0.01837."""
    return [mean - 0.01, mean - 0.01, mean + 0.01, mean + 0.01]


@pytest.mark.parametrize(
    ("values", "counts", "word"),
    [
        (around(0.05), 0.02, "holds here"),  # 0.032 to 0.068
        (around(-0.05), -0.02, "holds here"),  # claimed to be lower, and lower
        (around(-0.05), 0.02, "contrary"),
        (around(0.0), 0.02, "does not hold here"),  # at most 0.018: an effect of 0.02 is excluded
        (around(-0.015), 0.02, "does not hold here"),
        (around(0.01), 0.02, "not detectable at this size"),  # -0.008 to 0.028
        (around(0.019), 0.02, "not detectable at this size"),  # 0.0006 to 0.037: not 0, but smaller than what counts
        (around(0.019), 0.04, "does not hold here"),  # there is an effect, and one that counts is excluded
    ],
)
def test_verdicts(values, counts, word):
    assert difference(values).half == pytest.approx(3.182 * math.sqrt(4e-4 / 3) / 2)
    assert verdict(difference(values), counts) == word


def test_without_the_controls_there_is_no_verdict():
    assert verdict(difference(around(0.05)), 0.02, controls=False) == "no verdict"


def test_seeds_that_all_agree_on_an_event_are_not_certain():
    """Eight seeds without a collapse in either arm: s of eight zeros, +1 and −1 is √(2/9)."""
    none = difference([0.0] * 8, grain=1.0)
    assert none.half == pytest.approx(2.365 * math.sqrt(2 / 9) / math.sqrt(8))
    assert verdict(none, 5 / 8) == "does not hold here"
    five = difference([1.0] * 5 + [0.0] * 3, grain=1.0)
    assert shows(five, 5 / 8)
    assert not shows(difference([1.0] * 4 + [0.0] * 4, grain=1.0), 5 / 8)
