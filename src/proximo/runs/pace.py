"""The pace of a run: seconds of a step, and what the rest will take."""

import time
from collections.abc import Callable


class Pace:
    """Pace of the steps of this process. Evaluations and checkpoints between steps count; the first step does not as
    soon as there is another, since it compiles and warms up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.start(0)

    def start(self, steps: int) -> None:
        """Begin before the first step of this process, of a run that ends after `steps`."""
        self._steps, self._since, self._counted = steps, self._clock(), 0
        self._is_first = True

    def left(self, step: int) -> str:
        """Time that the rest of the run takes, after this step; nothing after the last one."""
        now, self._counted = self._clock(), self._counted + 1
        seconds = (now - self._since) / self._counted
        if self._is_first:
            self._since, self._counted, self._is_first = now, 0, False
        rest = self._steps - step
        return f"{duration(rest * seconds)} left" if rest > 0 else ""


def duration(seconds: float) -> str:
    """Example: 4.2 s, 12 min, 3.5 h."""
    return (
        f"{seconds:.2g} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )
