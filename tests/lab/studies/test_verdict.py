"""Verdicts of differences that are worked out by hand."""

import math
from itertools import product

import pytest

from proximo_lab.studies.verdict import difference, newcombe, share_difference, shows, verdict


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


def test_newcombes_interval_by_hand():
    """6 of 8 seeds have both events and 2 only the first. Wilson: 8 of 8 is 0.6756 to 1, 6 of 8 is 0.4093 to 0.9285;
    phi is 0, since the first event has one value only."""
    low, high = newcombe(6, 2, 0, 0)
    assert low == pytest.approx(0.25 - math.hypot(1 - 0.6756, 0.9285 - 0.75), abs=1e-4)
    assert high == pytest.approx(0.25 + (0.75 - 0.4093), abs=1e-4)
    # phi = (20·16 - 12·2 - 50/2) / √(32·18·22·28) = 0.4550; Wilson: 0.5014 to 0.7586 and 0.3116 to 0.5769
    below, above = 0.64 - 0.50141, 0.57694 - 0.44
    assert newcombe(20, 12, 2, 16)[0] == pytest.approx(
        0.2 - math.sqrt(below**2 + above**2 - 2 * 0.45496 * below * above), abs=1e-4
    )


@pytest.mark.parametrize("seeds", [2, 3, 5, 8])
def test_an_interval_of_shares_stays_within_1_and_holds_its_difference(seeds):
    for table in product(range(seeds + 1), repeat=4):
        if sum(table) == seeds:
            low, high = newcombe(*table)
            assert -1 <= low <= (table[1] - table[2]) / seeds <= high <= 1, table
            assert high > low, f"{table}: seeds that all agree are not certain"
            turned = newcombe(table[0], table[2], table[1], table[3])
            assert turned == pytest.approx((-high, -low)), table


def test_shares_of_seeds():
    """Eight seeds without a collapse in either arm: Wilson's 0 of 8 is 0 to 0.3244."""
    none = share_difference([0.0] * 8, [0.0] * 8)
    assert (none.low, none.high) == pytest.approx((-0.3244, 0.3244), abs=1e-4)
    assert verdict(none, 5 / 8) == "does not hold here"
    assert (
        none.visible == 4 / 8
    )  # 0.5 - √((0.5 - 0.2152)² + 0.3244²) is above 0, 0.375 - √((0.375 - 0.1368)² + …) is not
    every = share_difference([1.0] * 8, [0.0] * 8)
    assert (every.mean, every.high) == (1, 1)
    assert shows(every, 5 / 8)
    five = share_difference([1.0] * 5 + [0.0] * 3, [0.0] * 8)
    assert shows(five, 5 / 8)
    assert verdict(five, -5 / 8) == "contrary"
    assert not shows(share_difference([1.0] * 4 + [0.0] * 4, [0.0] * 8), 5 / 8)
    fewer = share_difference([1.0, math.nan, 0.0], [0.0, 0.0, math.nan])
    assert fewer.values == (1.0,)
    assert not fewer.is_known


def test_a_share_of_its_own_has_wilsons_interval():
    own = share_difference([1.0] * 6 + [0.0] * 2)
    assert (own.mean, own.low, own.high) == pytest.approx((0.75, 0.4093, 0.9285), abs=1e-4)


@pytest.mark.parametrize(("room", "word"), [(0.625, "does not hold here"), (0.5, "not detectable at this size")])
def test_nothing_is_excluded_where_there_was_no_room_for_it(room, word):
    """Five of eight seeds fewer, where the other arm has it in four."""
    found = share_difference([1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0])
    assert found.low > -0.625
    assert verdict(found, -0.625, room=room) == word
    assert verdict(found, -0.625, room=room, controls=False) == "no verdict"
