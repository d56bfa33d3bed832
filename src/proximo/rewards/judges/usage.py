"""Cost of judges and episodes: numbers and seconds since they were last taken, for a run's timings."""

import threading
from collections import Counter


class Usage:
    """Counts of any thread; names begin with what is counted, as `judge_seconds` does."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._counts: Counter[str] = Counter()
        self._slowest = 0.0
        self._lock = threading.Lock()

    def add(self, **counts: float) -> None:
        with self._lock:
            for name, number in counts.items():
                self._counts[f"{self._what}_{name}"] += number  # pyright: ignore[reportArgumentType]
            self._slowest = max(self._slowest, counts.get("seconds", 0.0))

    def take(self) -> dict[str, float]:
        """Take the counts by name; empty where nothing was counted."""
        with self._lock:
            counts = dict(self._counts) | ({f"{self._what}_slowest": self._slowest} if self._slowest else {})
            self._counts.clear()
            self._slowest = 0.0
        return counts
