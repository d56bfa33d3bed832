"""Measures the durations of phases."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds by phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def split(self, name: str, part: str, seconds: float) -> None:
        """Count some seconds of a phase as a separate phase."""
        self.seconds[name] -= seconds
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
