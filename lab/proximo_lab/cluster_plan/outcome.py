"""Outcome of a simulation."""

from dataclasses import dataclass, field

import numpy as np

UPDATE, PUSH = "update", "push"


@dataclass(frozen=True)
class Span:
    """Work of the learner from `start` to `end`, for the step `step`."""

    kind: str
    step: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Outcome:
    """Measured from the step `first` on: before it everything starts at the same time."""

    engines: int
    first: int
    ends: list[float] = field(default_factory=list)
    """Time when the update of each step ended; the push of its weights belongs to the next step."""
    spans: list[Span] = field(default_factory=list)
    live: list[tuple[float, int]] = field(default_factory=list)
    """Requests in flight over time."""
    staleness: list[int] = field(default_factory=list)
    """Staleness of each trained group in the order of training: by how many versions the learner was ahead of the
    weights with which the group began."""
    tokens: dict[int, float] = field(default_factory=dict)
    """Trained tokens by age: by how many versions the learner was ahead of the weights that sampled the token."""
    per_step: int = 1
    """Groups of a step."""
    occupied: float = 0.0
    """Seconds times engines with at least one request."""
    decoded: float = 0.0
    """Seconds times requests in flight."""

    @property
    def start(self) -> float:
        return self.ends[self.first - 1] if self.first else 0.0

    @property
    def wall(self) -> float:
        return self.ends[-1] - self.start

    @property
    def counted(self) -> int:
        """Steps that are measured."""
        return len(self.ends) - self.first

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.wall / self.counted

    @property
    def updating(self) -> float:
        """Seconds of a step in which the learner trains."""
        return self._of(UPDATE) / self.counted

    @property
    def pushing(self) -> float:
        """Seconds of a step in which weights are pushed."""
        return self._of(PUSH) / self.counted

    @property
    def waiting(self) -> float:
        """Seconds of a step in which the learner waits for groups."""
        return self.seconds - self.updating - self.pushing

    @property
    def learner_busy(self) -> float:
        """Share of the time in which the learner trains."""
        return self.updating / self.seconds

    @property
    def engines_busy(self) -> float:
        """Share of the engines' time in which they hold at least one request."""
        return self.occupied / (self.wall * self.engines)

    @property
    def live_per_engine(self) -> float:
        """Requests in flight on an engine, on average."""
        return self.decoded / (self.wall * self.engines)

    @property
    def ages(self) -> dict[int, float]:
        """Share of the groups by staleness."""
        ages, counts = np.unique(self.staleness[self.first * self.per_step :], return_counts=True)
        return {int(age): float(count / counts.sum()) for age, count in zip(ages, counts, strict=True)}

    @property
    def mean_age(self) -> float:
        return sum(age * share for age, share in self.ages.items())

    @property
    def oldest(self) -> int:
        """The largest staleness of any group, also before `first`."""
        return max(self.staleness)

    @property
    def token_ages(self) -> dict[int, float]:
        """Share of the trained tokens by age."""
        total = sum(self.tokens.values())
        return {age: self.tokens[age] / total for age in sorted(self.tokens)}

    def _of(self, kind: str) -> float:
        return sum(each.seconds for each in self.spans if each.kind == kind and each.step >= self.first)
