"""Pace of a stage: rows in a second, and the time that is left."""

import time
from collections.abc import Callable

from proximo.runs.pace import duration

EVERY = 10
"""Steps between progress lines."""
SECONDS = 30.0
"""Seconds after which a line is printed all the same."""


class RowPace:
    """Measures steps as they are done, evaluations and saving in between included."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun = self._shown = clock()
        self._done, self._rows = 0, 0
        """Steps since the beginning, and rows since the last line."""

    def stepped(self, rows: int) -> None:
        self._done, self._rows = self._done + 1, self._rows + rows

    def is_due(self, step: int, steps: int) -> bool:
        """True if a line is to be printed after this step."""
        return step % EVERY == 0 or step == steps or self._clock() - self._shown >= SECONDS

    def line(self, left: int) -> str:
        """Rows in a second since the last line, and about how long this many steps still take."""
        now = self._clock()
        speed = f"{self._rows / max(now - self._shown, 1e-9):.3g} rows/s"
        rest = f", {duration((now - self._begun) / self._done * left)} left" if left else ""
        self._shown, self._rows = now, 0
        return f"{speed}{rest}"
