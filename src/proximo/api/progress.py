"""Progress for Python: silence, and a function that is called after each step."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from proximo.rl.progress import Progress
from proximo.runs.records import Collected, Evaluation

OnStep = Callable[[int, dict[str, float]], object]
"""Called with the number of steps done and the step's metrics; True ends the run after that step."""

Log = Callable[[dict[str, float]], object]
"""Called with each step's metrics, and the step among them."""


class Silent:
    """Tells nothing."""

    def start(self, steps: int, before: Evaluation) -> None: ...
    def stepped(
        self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float], collected: Collected
    ) -> None: ...
    def evaluated(self, step: int, evaluation: Evaluation) -> None: ...
    def warned(self, step: int, message: str) -> None: ...
    def stop(self) -> None: ...


class ObservedProgress:
    """Another progress, with a function that sees each step's metrics and may end the run."""

    def __init__(self, inner: Progress, on_step: OnStep) -> None:
        self._inner, self._on_step = inner, on_step
        self._warned = False
        self.ended = False
        """True once the function has asked for the end."""

    def start(self, steps: int, before: Evaluation) -> None:
        self._inner.start(steps, before)

    def stepped(
        self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float], collected: Collected
    ) -> None:
        self._inner.stepped(step, metrics, seconds, collected)
        seen = dict(metrics)
        answer = self._on_step(step, seen)
        self._warn_of(step, answer, [name for name in seen if name not in metrics])
        # Not whatever is true: a logger's own return value ends no run.
        self.ended = isinstance(answer, bool | np.bool_) and bool(answer)

    def _warn_of(self, step: int, answer: object, added: Sequence[str]) -> None:
        """Say once that numbers which the function gives back are logged nowhere."""
        names = [*added, *map(str, answer if isinstance(answer, Mapping) else ())]
        if names and not self._warned:
            self._warned = True
            self._inner.warned(
                step,
                f"on_step gave {', '.join(names)}, which is logged nowhere: metrics=f logs what f gives for a step",
            )

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self._inner.evaluated(step, evaluation)

    def warned(self, step: int, message: str) -> None:
        self._inner.warned(step, message)

    def stop(self) -> None:
        self._inner.stop()
