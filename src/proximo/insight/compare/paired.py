"""Differences between two contenders, paired by what they share: the seed, and the held-out problem.

A difference is a mean over seeds and problems, both of which are samples. Over seeds its interval is Student's t; over
problems it is that of the paired differences, with one win and one loss added to their spread, each as large as the
largest observed, so that few problems do not look certain. Both half widths are added in quadrature. So an interval
covers other seeds and other problems; with one seed it covers only other problems.

Steps of a fork are paired with those of its parent, which had the same prompts. Differences of neighbouring steps are
alike, so with one seed the interval is that of the means of blocks of steps, as many as each has steps.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from proximo.losses.intervals import half_width, t_quantile_95
from proximo.rl.evaluate import known_mean

Verdict = Literal["the same", "within noise", "higher", "lower"]


@dataclass(frozen=True)
class Difference:
    """Difference between a contender and the first, in one measure."""

    contender: str
    measure: str
    mean: float
    """Mean of the contender itself, over the seeds that both have."""
    difference: float
    by_seed: Mapping[int, float]
    interval: tuple[float, float] | None
    """95 % interval; None if unknown, as with one seed."""
    wins: int | None = None
    losses: int | None = None
    """Numbers of held-out answers that are better and worse than the first's to the same problem with the same seed."""

    @property
    def verdict(self) -> Verdict | None:
        """The verdict; None without an interval."""
        if not any(self.by_seed.values()) and not self.wins and not self.losses:
            return "the same"
        if self.interval is None:
            return None
        low, high = self.interval
        return "higher" if low > 0 else "lower" if high < 0 else "within noise"


def seed_difference(contender: str, measure: str, ours: Mapping[int, float], first: Mapping[int, float]) -> Difference:
    """Difference of a number that each run has, paired by seed."""
    seeds = [seed for seed in ours if seed in first]
    by_seed = {seed: ours[seed] - first[seed] for seed in seeds}
    mean = known_mean(by_seed.values())
    half = half_width(list(by_seed.values())) if len(by_seed) > 1 else None
    interval = None if half is None else (mean - half, mean + half)
    return Difference(contender, measure, known_mean(ours[seed] for seed in seeds), mean, by_seed, interval)


def step_difference(
    contender: str, measure: str, ours: Mapping[int, Mapping[int, float]], first: Mapping[int, Mapping[int, float]]
) -> Difference:
    """Difference of a number that each step has, paired by seed and step. With one seed, fewer than four steps have no
    interval."""
    pairs = {
        seed: [value - first[seed][step] for step, value in sorted(steps.items()) if step in first[seed]]
        for seed, steps in ours.items()
        if seed in first
    }
    pairs = {seed: differences for seed, differences in pairs.items() if differences}
    by_seed = {seed: known_mean(differences) for seed, differences in pairs.items()}
    mean = known_mean(by_seed.values())
    level = known_mean(
        known_mean(value for step, value in ours[seed].items() if step in first[seed]) for seed in by_seed
    )
    values = _blocks(*pairs.values()) if len(pairs) == 1 else list(by_seed.values())
    half = half_width(values) if len(values) > 1 else None
    return Difference(contender, measure, level, mean, by_seed, None if half is None else (mean - half, mean + half))


def _blocks(differences: Sequence[float]) -> list[float]:
    """Means of blocks of neighbours, about as many blocks as each has members."""
    count = math.isqrt(len(differences))
    edges = [round(index * len(differences) / count) for index in range(count + 1)]
    return [known_mean(differences[start:end]) for start, end in pairwise(edges)]


Answers = Mapping[str, float]
"""Task scores by the held-out problem's id, without unscored ones."""


def answer_difference(
    contender: str, measure: str, ours: Mapping[int, Answers], first: Mapping[int, Answers]
) -> Difference:
    """Difference of held-out task scores, paired by seed and problem."""
    pairs = {
        seed: {
            problem: outcome - first[seed][problem] for problem, outcome in answers.items() if problem in first[seed]
        }
        for seed, answers in ours.items()
        if seed in first
    }
    pairs = {seed: differences for seed, differences in pairs.items() if differences}
    by_seed = {seed: known_mean(differences.values()) for seed, differences in pairs.items()}
    every = [each for differences in pairs.values() for each in differences.values()]
    mean, half = known_mean(by_seed.values()), _half(pairs, by_seed) if any(every) else 0.0
    return Difference(
        contender,
        measure,
        known_mean(known_mean(ours[seed][problem] for problem in differences) for seed, differences in pairs.items()),
        mean,
        by_seed,
        (mean - half, mean + half) if every else None,
        wins=sum(each > 0 for each in every),
        losses=sum(each < 0 for each in every),
    )


def _half(pairs: Mapping[int, Answers], by_seed: Mapping[int, float]) -> float:
    by_problem: dict[str, list[float]] = {}
    for differences in pairs.values():
        for problem, difference in differences.items():
            by_problem.setdefault(problem, []).append(difference)
    means = [known_mean(each) for each in by_problem.values()]
    largest = max(abs(each) for differences in by_problem.values() for each in differences)
    spread = statistics.stdev([*means, largest, -largest])
    over_problems = t_quantile_95(max(len(means) - 1, 1)) * spread / math.sqrt(len(means))
    over_seeds = half_width(list(by_seed.values())) if len(by_seed) > 1 else 0.0
    return math.hypot(over_problems, over_seeds)
