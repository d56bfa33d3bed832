"""Curves over several seeds: the mean, a band around it, and each seed's own curve."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from proximo.insight.compare.measured import MeasuredRun, Point, measures_among
from proximo.losses.intervals import half_width
from proximo.rl.evaluate import known_mean

BINS = 30
"""Maximum points of a curve; steps in between are averaged, since a single step is mostly noise."""
FEWEST = 3
"""Minimum seeds for a band; with two it would be too wide to mean anything."""
HELD_OUT = "held_out"

Axis = Literal["steps", "tokens"]
AXES: tuple[Axis, ...] = ("steps", "tokens")


@dataclass(frozen=True)
class ComparisonCurve:
    contender: str
    measure: str
    axis: Axis
    mean: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]]
    """95 % interval of the mean over seeds, cut at zero if no value is below it."""
    seeds: Mapping[int, Sequence[tuple[float, float]]]


def all_curves(runs: Mapping[str, Sequence[MeasuredRun]]) -> list[ComparisonCurve]:
    """The curves of every contender, in every measure and along both axes."""
    steps = max((run.details.steps_done for each in runs.values() for run in each), default=1)
    width = math.ceil(max(steps, 1) / BINS)
    curves = []
    names = (name for each in runs.values() for run in each for row in run.training for name in row)
    for measure in (None, *measures_among(names)):
        for axis in AXES:
            for name, each in runs.items():
                if measure is None:
                    seeds = {run.seed: _by_evaluation(run.held_out(), axis) for run in each}
                else:
                    seeds = {run.seed: _by_bin(run.curve(measure), axis, width) for run in each}
                curves.append(_curve(name, HELD_OUT if measure is None else measure.key, axis, seeds))
    return curves


Placed = Mapping[int, tuple[float, float]]
"""Points by step, which identifies the same point on another seed's curve whatever the axis."""
LAST = -1


def _by_evaluation(points: Sequence[Point], axis: Axis) -> Placed:
    """Points by evaluation; the last one is shared by all seeds, which may reach their budget at different steps."""
    last = len(points) - 1
    return {
        LAST if index == last else point.steps: (float(getattr(point, axis)), point.value)
        for index, point in enumerate(points)
    }


def _by_bin(points: Sequence[Point], axis: Axis, width: int) -> Placed:
    bins: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        bins.setdefault((point.steps - 1) // width, []).append((float(getattr(point, axis)), point.value))
    return {number: (known_mean(x for x, _ in each), known_mean(y for _, y in each)) for number, each in bins.items()}


def _curve(contender: str, measure: str, axis: Axis, seeds: Mapping[int, Placed]) -> ComparisonCurve:
    """The mean where all seeds have a point; a mean of fewer would jump where one ends."""
    placed = list(seeds.values())
    shared = [key for key in (placed[0] if placed else {}) if all(key in each for each in placed)]
    mean, band = [], []
    for key in shared:
        x = known_mean(each[key][0] for each in placed)
        values = [each[key][1] for each in placed]
        mean.append((x, known_mean(values)))
        if len(values) >= FEWEST:
            half = half_width(values)
            low = mean[-1][1] - half
            band.append((x, max(low, 0.0) if min(values) >= 0 else low, mean[-1][1] + half))
    return ComparisonCurve(
        contender,
        measure,
        axis,
        sorted(mean),
        sorted(band),
        {seed: sorted(each.values()) for seed, each in seeds.items()},
    )
