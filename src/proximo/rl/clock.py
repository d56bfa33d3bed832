"""Measures the durations of phases, and writes down when everything happened."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from proximo.system.timeline import Interval, Lanes

LEARNER = "learner"
"""Lane of the process that runs the loop."""
DIGITS = 4
"""Digits of seconds that are stored."""
SHORTEST = 1e-3
"""Seconds of an interval; a shorter one is left out."""


@dataclass
class Clock:
    """Seconds by phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)
    lanes: Lanes = field(default_factory=Lanes)
    """Records when each phase was."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.lanes.during(LEARNER, name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def split(self, name: str, part: str, seconds: float) -> None:
        """Count the last seconds of a phase, which has just ended, as a separate phase."""
        self.seconds[name] -= seconds
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        now = time.perf_counter()
        self.lanes.add(Interval(LEARNER, part, now - seconds, now))


class Timeline:
    """Rows of timeline.jsonl: what learner, ranks, engines and sampler did from the end of one step to the end of the
    next."""

    def __init__(self) -> None:
        self.lanes = Lanes()
        """What this process does itself."""
        self._wall = time.time() - time.perf_counter()
        self._since = time.perf_counter()

    def row(self, others: Sequence[Interval], **queue: object) -> dict[str, object]:
        """Row of what happened since the last. `others`: intervals of engines and ranks; `queue`: which groups are
        sampled, and how old those are that were trained."""
        begin, self._since = self._since, time.perf_counter()
        taken = sorted([*self.lanes.take(), *others], key=lambda span: (span.lane, span.start))
        intervals = [
            [span.lane, span.kind, round(span.start - begin, DIGITS), round(span.end - begin, DIGITS), span.numbers]
            for span in taken
            if span.end - span.start >= SHORTEST
        ]
        return {
            "began": round(self._wall + begin, DIGITS),
            "seconds": round(self._since - begin, DIGITS),
            "intervals": intervals,
            **queue,
        }
