"""Measures where the time of a run's steps goes: N steps by marks at the ends of phases, then one more with a trace.

Only the thread of the loop is measured: of several ranks the first.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from proximo.rl.phase_marks import PhaseMarks, PhaseSpan
from proximo.rl.tracing import Tracer, trace_file
from proximo.runs.log import RunLog
from proximo.runs.step_profile import KernelTime, PhasePath, PhaseTime, StepProfile
from proximo.system.phases import watched

WARMUP = 2
"""Steps of this process before the first that is measured: they compile, and capture what is measured in parts."""


class Profiler:
    """Measures some of a run's steps, traces the one after them, and writes both into the run folder. Without steps to
    measure it does nothing."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self._steps, self._device = steps, device
        self._begun = 0
        """Steps of this process."""
        self._measured: dict[int, tuple[list[PhaseSpan], Counter[PhasePath]]] = {}
        self._step, self._passes, self._open = 0, "", ExitStack()
        self._marks: PhaseMarks | None = None
        self._tracer: Tracer | None = None

    def begin(self, step: int) -> None:
        """Begin a step, which is measured if it is its turn."""
        self._begun, self._step = self._begun + 1, step
        if not WARMUP <= self._begun <= self._last:
            return
        if self._begun == self._last:
            self._tracer = self._open.enter_context(Tracer(self._device))
        self._marks = PhaseMarks(self._device)
        self._open.enter_context(watched(self._marks))

    def end(self, log: RunLog, passes: str = "") -> None:
        """End the step that has begun; the last one writes the profile. `passes`: their size, in words."""
        if self._marks is None:
            return
        self._passes = passes
        marks, spans, tracer = self._marks, self._marks.end(), self._tracer
        self._leave()
        if tracer is not None:
            self._write(log, marks, spans, tracer)
            self._measured = {}
        elif self._begun > WARMUP:
            self._measured[self._step] = spans, marks.times

    def close(self, log: RunLog) -> None:
        """Leave a step that did not end, and write what was measured of a run that ended before its trace."""
        self._leave()
        if self._measured:
            profile = profile_of(self._measured, self._device, {}, remark="the run ended before the step to be traced")
            log.profile(replace(profile, passes=self._passes).to_dict(), None)
            self._measured = {}

    @property
    def _last(self) -> int:
        """Number of the step, of this process, that is traced; 0 where nothing is measured."""
        return WARMUP + self._steps + 1 if self._steps else 0

    def _leave(self) -> None:
        self._open.close()
        self._marks = self._tracer = None

    def _write(self, log: RunLog, marks: PhaseMarks, spans: list[PhaseSpan], tracer: Tracer) -> None:
        trace = tracer.read(marks.began, spans)
        busy, kernels = trace.busy, trace.longest()
        step = self._step if tracer.remark == "" else None
        profile = profile_of(self._measured, self._device, busy, traced=step, kernels=kernels, remark=tracer.remark)
        trace_bytes = trace_file(trace, spans, self._device)
        log.profile(replace(profile, passes=self._passes).to_dict(), trace_bytes)


def profile_of(
    measured: Mapping[int, tuple[Sequence[PhaseSpan], Mapping[PhasePath, int]]],
    device: torch.device,
    busy: Mapping[PhasePath, float],
    *,
    traced: int | None = None,
    kernels: Sequence[KernelTime] = (),
    remark: str = "",
) -> StepProfile:
    """The profile of steps by their spans and by how often each phase began."""
    count, paths = len(measured), dict.fromkeys(span.path for spans, _ in measured.values() for span in spans)
    seconds, host = defaultdict[PhasePath, float](float), defaultdict[PhasePath, float](float)
    times = Counter[PhasePath]()
    for spans, began in measured.values():
        times.update(began)
        for span in spans:
            seconds[span.path] += span.seconds
            host[span.path] += span.host_seconds
    phases = tuple(
        PhaseTime(path, seconds[path] / count, host[path] / count, times[path] / count, busy.get(path))
        for path in sorted(paths, key=lambda path: path == ())
    )
    return StepProfile(tuple(measured), device.type, phases, traced, tuple(kernels), remark)
