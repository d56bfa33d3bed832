"""Verdicts from paired differences: pure functions of numbers.

A difference is measured seed by seed between two arms with the same random numbers; its interval is Student's t over
the seeds. What counts is the smallest difference that would matter, fixed before the runs; its sign is the direction
that the claim gives.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from proximo.maths.intervals import t95
from proximo.training.rl.evaluate import known_mean

Word = Literal["holds here", "does not hold here", "not detectable at this size", "contrary", "no verdict"]


@dataclass(frozen=True)
class Difference:
    """A mean difference over paired seeds and its 95 % interval."""

    values: tuple[float, ...]
    """The difference of each seed that both arms have."""
    mean: float
    half: float
    """Half the interval's width: also the smallest mean difference whose interval would have excluded 0. NaN with
    fewer than two seeds."""

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.half)


def difference(values: Sequence[float], grain: float = 0.0) -> Difference:
    """The mean of paired differences with its interval.

    `grain` is the size of one event where a run's number is a count of events, such as 1 for "it collapsed": one event
    for and one against are then added to the spread, so that seeds that all agree do not look certain.
    """
    known = [value for value in values if not math.isnan(value)]
    if len(known) < 2:
        return Difference(tuple(known), known_mean(known), math.nan)
    spread = statistics.stdev([*known, grain, -grain] if grain else known)
    half = t95(len(known) - 1) * spread / math.sqrt(len(known))
    return Difference(tuple(known), known_mean(known), half)


def shows(found: Difference, counts: float) -> bool:
    """Whether the effect is there: as large as what counts, in its direction, and its interval without 0."""
    sign = math.copysign(1.0, counts)
    return found.is_known and sign * found.mean >= abs(counts) and sign * found.mean > found.half


def verdict(found: Difference, counts: float, *, controls: bool = True) -> Word:
    """`controls` says whether all of the study's controls came out as they must; without them there is no verdict."""
    if not controls or not found.is_known:
        return "no verdict"
    if shows(found, counts):
        return "holds here"
    if shows(found, -counts):
        return "contrary"
    sign = math.copysign(1.0, counts)
    excluded = sign * found.mean + found.half < abs(counts)
    return "does not hold here" if excluded else "not detectable at this size"
