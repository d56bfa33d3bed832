"""Progress for Python: silence, a notebook's display, and a function that is called after each step."""

import html
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from proximo.rl.progress import Progress, ProgressLines, best_sample, sparkline, speed, summary
from proximo.runs.records import Collected, Evaluation
from proximo.system.safe_text import visible

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


BAR = 40
"""Characters of a notebook's bar."""


def progress_here() -> Progress:
    """Progress that suits where this process runs: a display that is updated in a notebook, else lines on stderr."""
    display = _notebook_display()
    return ProgressLines() if display is None else NotebookProgress(display)


def _notebook_display() -> Callable[..., Any] | None:
    """IPython's `display` where a notebook shows it; None in a terminal, or without IPython."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    return import_module("IPython.display").display


class NotebookProgress(ProgressLines):
    """One display, which each step updates: a bar, the task score as a sparkline, the step's numbers, a completion.
    Evaluations and warnings are lines."""

    def __init__(self, display: Callable[..., Any]) -> None:
        super().__init__()
        self._display, self._handle, self._outcomes = display, None, list[float]()

    def stepped(
        self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float], collected: Collected
    ) -> None:
        self._outcomes.append(metrics["outcome"])
        done = BAR * step // max(1, self.steps)
        took, left, best = speed(seconds, collected), self._pace.left(step), best_sample(collected)
        lines = [
            "  ".join(filter(None, [f"step {step}/{self.steps}", "█" * done + "░" * (BAR - done), took, left])),
            f"task score {sparkline(self._outcomes)}",
            summary(metrics),
            *([] if best is None else [f"{best[0]}   task score {best[1]:g}"]),
        ]
        self._show(visible("\n".join(lines)))

    def _show(self, text: str) -> None:
        bundle = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


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
