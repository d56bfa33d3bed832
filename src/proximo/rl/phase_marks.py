"""Marks at the ends of phases of a step: the host's clock and, on a GPU, an event in the stream.

Nothing waits for a GPU inside of a step, only where a measured one begins and ends. In a stream the time between two
marks is that of what was launched between them, with the device's waiting for it.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from proximo.runs.step_profile import PhasePath


@dataclass(frozen=True)
class PhaseSpan:
    """Time between two marks, in which nothing but one phase was open."""

    path: PhasePath
    start: float
    """Seconds since the step's beginning."""
    seconds: float
    host_start: float
    host_seconds: float


class OpenPhase:
    """A phase as a context; a class, since a step of decoding opens thousands."""

    __slots__ = ("_marks", "_name")

    def __init__(self, marks: "PhaseMarks", name: str) -> None:
        self._marks, self._name = marks, name

    def __enter__(self) -> None:
        self._marks.enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._marks.leave()


class PhaseMarks:
    """Marks the ends of phases of one step, as a `PhaseWatch` of the thread that made it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._open: list[str] = []
        self._marks: list[tuple[PhasePath, float, torch.cuda.Event | None]] = []
        self.times = Counter[PhasePath]()
        """Number of times that each phase began."""
        self._wait()
        self.began = time.time_ns()
        """Nanoseconds of the wall clock, as those of a trace."""
        self._mark()

    def phase(self, name: str) -> "OpenPhase":
        return OpenPhase(self, name)

    def enter(self, name: str) -> None:
        self._open.append(name)
        self._mark()
        self.times[self._marks[-1][0]] += 1

    def leave(self) -> None:
        self._open.pop()
        self._mark()

    def end(self) -> list[PhaseSpan]:
        """End the step, and return its spans, whose seconds add up to its wall time."""
        self._mark()
        self._wait()
        wall = time.perf_counter() - self._marks[0][1]
        spans = list(self._spans())
        seconds, host = sum(span.seconds for span in spans), sum(span.host_seconds for span in spans)
        return [*spans, PhaseSpan((), seconds, wall - seconds, host, wall - host)]

    def _spans(self) -> Iterator[PhaseSpan]:
        at, begin = 0.0, self._marks[0][1]
        for (path, start, event), (_, end, later) in zip(self._marks, self._marks[1:], strict=False):
            seconds = end - start if event is None or later is None else event.elapsed_time(later) / 1000
            yield PhaseSpan(path, at, seconds, start - begin, end - start)
            at += seconds

    def _mark(self) -> None:
        event = None
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._marks.append((tuple(self._open), time.perf_counter(), event))

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
