"""Verdicts from paired differences: pure functions of numbers.

A difference is measured seed by seed between two arms with the same random numbers. Its interval is Student's t over
the seeds, and for a share of the seeds, such as those that collapsed, Newcombe's of paired shares, which stays between
-1 and 1. What counts is the smallest difference that would matter, fixed before the runs; its sign is the direction
that the claim gives.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from proximo.losses.intervals import half_width
from proximo.rl.evaluate import known_mean, wilson

Word = Literal["holds here", "does not hold here", "not detectable at this size", "contrary", "no verdict"]
"""Verdicts as results store them; wording.py has the labels that a reader sees."""


@dataclass(frozen=True)
class Difference:
    """A mean difference over paired seeds and its 95 % interval."""

    values: tuple[float, ...]
    """The difference of each seed that both arms have."""
    mean: float
    low: float
    """Lower end of the interval; NaN with fewer than two seeds."""
    high: float
    visible: float
    """Smallest mean difference whose interval would have excluded 0: half the interval's width, or of shares the fewest
    seeds with the event against none. NaN if no number of seeds is enough."""

    @property
    def half(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.low)

    @property
    def excludes_0(self) -> bool:
        return self.low > 0 or self.high < 0


def difference(values: Sequence[float]) -> Difference:
    """The mean of paired differences with its interval of Student's t."""
    known = tuple(value for value in values if not math.isnan(value))
    mean, half = known_mean(known), half_width(known)
    return Difference(known, mean, mean - half, mean + half, half)


def share_difference(ours: Sequence[float], theirs: Sequence[float] | None = None) -> Difference:
    """The difference between two shares of the same seeds, each 1 (it happened) or 0; without `theirs` the share
    itself. Seeds without a number are left out."""
    others = [0.0] * len(ours) if theirs is None else theirs
    pairs = [pair for pair in zip(ours, others, strict=True) if not any(map(math.isnan, pair))]
    values = tuple(mine - other for mine, other in pairs)
    if len(pairs) < 2:
        return Difference(values, known_mean(values), math.nan, math.nan, math.nan)
    if theirs is None:
        low, high = wilson(round(sum(values)), len(values))
    else:
        low, high = newcombe(*(pairs.count(kind) for kind in ((1, 1), (1, 0), (0, 1), (0, 0))))
    # One seed is enough for a share by itself: Wilson's interval then excludes 0.
    visible = 1 / len(pairs) if theirs is None else _visible(len(pairs))
    return Difference(values, known_mean(values), low, high, visible)


def newcombe(both: int, first: int, second: int, neither: int) -> tuple[float, float]:
    """95 % interval of the difference between two shares of the same seeds, from the seeds with both events, only the
    first, only the second, and neither. It cannot leave -1 to 1, and seeds that all agree do not look certain.

    Newcombe, "Improved confidence intervals for the difference between binomial proportions based on paired data",
    Statistics in Medicine 17 (1998) 2635-2650: his method 10.
    """
    total = both + first + second + neither
    (low_1, high_1), (low_2, high_2) = wilson(both + first, total), wilson(both + second, total)
    share_1, share_2 = (both + first) / total, (both + second) / total
    phi = _correlation(both, first, second, neither)
    below, above = share_1 - low_1, high_2 - share_2
    under = below**2 - 2 * phi * below * above + above**2
    below, above = high_1 - share_1, share_2 - low_2
    over = below**2 - 2 * phi * below * above + above**2
    middle = (first - second) / total
    return middle - math.sqrt(max(under, 0.0)), middle + math.sqrt(max(over, 0.0))


def _correlation(both: int, first: int, second: int, neither: int) -> float:
    """Phi of the two events, with Newcombe's correction where it is positive; 0 where an event has one value only."""
    scale = math.sqrt((both + first) * (second + neither) * (both + second) * (first + neither))
    product = both * neither - first * second
    if product > 0:
        product = max(product - (both + first + second + neither) / 2, 0.0)
    return product / scale if scale else 0.0


def _visible(seeds: int) -> float:
    """The fewest seeds with the event, against none, whose interval excludes 0, as a share."""
    seen = (count for count in range(1, seeds + 1) if newcombe(0, count, 0, seeds - count)[0] > 0)
    return next(seen, math.nan) / seeds


def shows(difference: Difference, counts: float) -> bool:
    """Tell whether the effect is there: as large as what counts, in its direction, and its interval without 0."""
    if counts < 0:
        return difference.is_known and difference.mean <= counts and difference.high < 0
    return difference.is_known and difference.mean >= counts and difference.low > 0


def verdict(difference: Difference, counts: float, *, controls: bool = True, room: float = math.inf) -> Word:
    """`controls` says whether all of the study's controls came out as they must; without them there is no verdict.
    `room` is the largest effect that there could have been: where it is less than what counts, nothing is excluded."""
    if not controls or not difference.is_known:
        return "no verdict"
    if shows(difference, counts):
        return "holds here"
    if shows(difference, -counts):
        return "contrary"
    excluded = difference.low > counts if counts < 0 else difference.high < counts
    return "does not hold here" if excluded and room >= abs(counts) else "not detectable at this size"
