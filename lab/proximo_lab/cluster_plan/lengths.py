"""Lengths of completions, group by group: from a distribution, or as a run sampled them."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from proximo.insight.folder import RunFolder

LATEST = 20
"""Steps of a run whose lengths are used: the last ones, since completions grow and shrink while a run learns."""


class Lengths(Protocol):
    """Source of lengths."""

    def draw(self, groups: int, group_size: int, seed: int) -> np.ndarray:
        """Tokens of each completion [groups, group_size]; the first groups are the same whatever their number."""
        ...


MAX_SIGMA = 5.0
"""Maximum sigma: at 5 one completion in six is 150 times as long as the median: no run samples such lengths."""


@dataclass(frozen=True)
class Tailed:
    """Log-normal lengths, cut at `max_tokens`."""

    mean: float
    """Tokens of an average completion, those that are cut included."""
    max_tokens: int
    sigma: float = 1.0
    """Standard deviation of the logarithm: how long the tail is. 0: all have the mean length."""

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.max_tokens:
            raise ValueError(f"mean_tokens is {self.mean:g}: give 1 to sampling.max_tokens, which is {self.max_tokens}")
        if not 0 <= self.sigma <= MAX_SIGMA:
            raise ValueError(f"sigma is {self.sigma:g}: give 0 to {MAX_SIGMA:g}")

    def draw(self, groups: int, group_size: int, seed: int) -> np.ndarray:
        normal = np.random.default_rng(seed).standard_normal((groups, group_size))
        return np.clip(np.rint(np.exp(self._location + self.sigma * normal)), 1, self.max_tokens)

    @property
    def _location(self) -> float:
        """Mean of the logarithm with which the lengths have their mean after the cut."""
        low, high = 0.0, 2 * math.log(self.max_tokens) + 40 * self.sigma
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._cut_mean(middle) < self.mean else (low, middle)
        return low

    def _cut_mean(self, location: float) -> float:
        if not self.sigma:
            return min(math.exp(location), self.max_tokens)
        end = (math.log(self.max_tokens) - location) / self.sigma
        below = math.exp(location + self.sigma**2 / 2) * _normal(end - self.sigma)
        return below + self.max_tokens * (1 - _normal(end))

    def __str__(self) -> str:
        return f"log-normal lengths with mean {self.mean:,.0f} and sigma {self.sigma:g}, cut at {self.max_tokens:,}"


def _normal(value: float) -> float:
    """The share of a normal distribution below this value."""
    return (1 + math.erf(value / math.sqrt(2))) / 2


@dataclass(frozen=True)
class Recorded:
    """Lengths that a run sampled: whole groups are drawn, so that hard prompts stay long in all their completions."""

    name: str
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, run: RunFolder) -> "Recorded":
        """Lengths of a run's latest steps. ValueError if no rollouts were stored."""
        groups: list[tuple[int, ...]] = []
        for number in run.steps()[-LATEST:]:
            batch = run.step(number).batch
            lengths, prompts = batch.sampled_lengths.tolist(), batch.group.tolist()
            by_prompt: dict[int, list[int]] = {}
            for prompt, length in zip(prompts, lengths, strict=True):
                by_prompt.setdefault(prompt, []).append(max(1, length))
            groups += [tuple(group) for group in by_prompt.values()]
        if not groups:
            raise ValueError(f"{run.path} has no stored rollouts: give --mean-tokens and --sigma in its place")
        return cls(run.name, tuple(groups))

    def draw(self, groups: int, group_size: int, seed: int) -> np.ndarray:
        """Draw lengths; of a group with fewer completions than asked for, some occur more than once."""
        random = np.random.default_rng(seed)
        which, places = random.integers(len(self.groups), size=groups), random.random((groups, group_size))
        drawn = [
            [group[int(share * len(group))] for share in row]
            for group, row in zip((self.groups[number] for number in which.tolist()), places.tolist(), strict=True)
        ]
        return np.array(drawn, float).reshape(groups, group_size)

    def __str__(self) -> str:
        flat = [length for group in self.groups for length in group]
        return f"lengths of {self.name}: {len(flat):,} completions of {np.mean(flat):,.0f} tokens, up to {max(flat):,}"


TAILS = (0.5, 1.0, 1.5)
"""Sigmas that a plan is compared with."""


def other_tails(lengths: Lengths) -> list[Lengths]:
    """The same mean with shorter and longer tails, the own one included; none for recorded lengths."""
    match lengths:
        case Tailed(mean, most, sigma):
            return [Tailed(mean, most, each) for each in sorted({*TAILS, sigma})]
        case _:
            return []
