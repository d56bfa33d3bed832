"""Curves of several seeds as one: the mean, a band around it, and each seed's own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from proximo.insight.compare.measured import MEASURES, Point, Run
from proximo.maths.intervals import half_width
from proximo.training.rl.evaluate import known_mean

BINS = 30
"""Points of a curve at most: steps in between are averaged, since a step alone is mostly noise."""
FEWEST = 3
"""Seeds from which on there is a band; from two it would say no more than that nothing is known."""
HELD_OUT = "held_out"

Axis = Literal["steps", "tokens"]
AXES: tuple[Axis, ...] = ("steps", "tokens")


@dataclass(frozen=True)
class Curve:
    contender: str
    measure: str
    axis: Axis
    mean: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]]
    """The mean's 95 % interval over seeds; not below zero, where nothing is."""
    seeds: Mapping[int, Sequence[tuple[float, float]]]


def all_curves(runs: Mapping[str, Sequence[Run]]) -> list[Curve]:
    """Of every contender, in every measure and along both axes."""
    most = max((run.facts.steps_done for each in runs.values() for run in each), default=1)
    width = math.ceil(max(most, 1) / BINS)
    found = []
    for measure in (None, *MEASURES):
        for axis in AXES:
            for name, each in runs.items():
                if measure is None:
                    seeds = {run.seed: _by_evaluation(run.held_out(), axis) for run in each}
                else:
                    seeds = {run.seed: _by_bin(run.curve(measure), axis, width) for run in each}
                found.append(_curve(name, HELD_OUT if measure is None else measure.key, axis, seeds))
    return found


Placed = Mapping[int, tuple[float, float]]
"""Points by what makes them the same point of another seed's curve: steps, whichever the axis."""
LAST = -1


def _by_evaluation(points: Sequence[Point], axis: Axis) -> Placed:
    """The last is the same for all seeds, which may reach their tokens at different steps."""
    last = len(points) - 1
    return {
        LAST if place == last else point.steps: (float(getattr(point, axis)), point.value)
        for place, point in enumerate(points)
    }


def _by_bin(points: Sequence[Point], axis: Axis, width: int) -> Placed:
    bins: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        bins.setdefault((point.steps - 1) // width, []).append((float(getattr(point, axis)), point.value))
    return {number: (known_mean(x for x, _ in each), known_mean(y for _, y in each)) for number, each in bins.items()}


def _curve(contender: str, measure: str, axis: Axis, seeds: Mapping[int, Placed]) -> Curve:
    """Where all seeds have a point: a mean of fewer would jump where one of them ends."""
    placed = list(seeds.values())
    shared = [place for place in (placed[0] if placed else {}) if all(place in each for each in placed)]
    mean, band = [], []
    for place in shared:
        x = known_mean(each[place][0] for each in placed)
        values = [each[place][1] for each in placed]
        mean.append((x, known_mean(values)))
        if len(values) >= FEWEST:
            half = half_width(values)
            low = mean[-1][1] - half
            band.append((x, max(low, 0.0) if min(values) >= 0 else low, mean[-1][1] + half))
    return Curve(
        contender,
        measure,
        axis,
        sorted(mean),
        sorted(band),
        {seed: sorted(each.values()) for seed, each in seeds.items()},
    )
