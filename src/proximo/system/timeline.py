"""Intervals in which parts of a run did something, on lanes, for the time line of a step."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from proximo.system.phases import phase

MAX_INTERVALS = 10_000
"""Intervals that are kept until they are taken; the oldest are dropped."""


@dataclass(frozen=True)
class Interval:
    """Time in which a part of a run did something."""

    lane: str
    """Name of the part: `learner`, `sampler`, an engine by its name, or a rank such as `rank 1`."""
    kind: str
    """Name of what it did, such as `sample` or `push`."""
    start: float
    end: float
    """Seconds of `time.perf_counter`."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Counts of what was done, such as tokens."""


class Lanes:
    """Records intervals from several threads. What several threads do at once on one lane is one interval, from the
    first beginning to the last end. An interval that is open when they are taken is cut there, and continues."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], int] = {}
        """Number of threads inside, by lane and kind."""
        self._since: dict[tuple[str, str], float] = {}
        self._about: dict[tuple[str, str], dict[str, float]] = {}
        self._counts: dict[tuple[str, str], dict[str, float]] = {}
        self._done: deque[Interval] = deque(maxlen=MAX_INTERVALS)

    @contextmanager
    def during(self, lane: str, kind: str, **numbers: float) -> Iterator[None]:
        """Record the time spent inside, which is a phase of a profile, too. `numbers` describe the interval; those of a
        later thread replace them."""
        key = lane, kind
        with self._lock:
            if not self._open.get(key):
                self._since[key] = time.perf_counter()
            self._open[key] = self._open.get(key, 0) + 1
            self._about.setdefault(key, {}).update(numbers)
        try:
            with phase(kind):
                yield
        finally:
            with self._lock:
                self._open[key] -= 1
                if not self._open[key]:
                    self._close(key, time.perf_counter())
                    del self._open[key], self._since[key], self._about[key]

    def count(self, lane: str, kind: str, **numbers: float) -> None:
        """Add to the numbers of an interval that is open."""
        with self._lock:
            counts = self._counts.setdefault((lane, kind), {})
            for name, value in numbers.items():
                counts[name] = counts.get(name, 0.0) + value

    def add(self, interval: Interval) -> None:
        with self._lock:
            self._done.append(interval)

    def take(self) -> list[Interval]:
        """Intervals since the last call, in the order of their ends."""
        now = time.perf_counter()
        with self._lock:
            for key in self._since:
                self._close(key, now)
                self._since[key] = now
            taken = list(self._done)
            self._done.clear()
        return taken

    def _close(self, key: tuple[str, str], end: float) -> None:
        lane, kind = key
        numbers = self._about[key] | self._counts.pop(key, {})
        self._done.append(Interval(lane, kind, self._since[key], end, numbers))
