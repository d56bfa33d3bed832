"""Trace of one step by torch's profiler: kernels of a GPU, or operations on a CPU, beside the phases of the step.

Of more than `MAX_EVENTS` the longest are kept, so that the file stays small however long a step is.
"""

import gzip
import heapq
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from proximo.rl.phase_marks import PhaseSpan
from proximo.runs.step_profile import MAX_NAME, SEPARATOR, KernelTime, PhasePath
from proximo.system.safe_text import visible

MAX_EVENTS = 200_000
"""Events in a trace file: some 3 MB."""
WHOLE_TRACE = 0.8
"""Share of a step from which on a trace is taken for whole: torch's buffers end, and the last kernel ends before."""
MAX_KERNELS = 40
"""Kernels in the profile."""
HOST, DEVICE = 1, 2
"""Numbers of the two processes of a trace file."""


@dataclass(frozen=True)
class TracedEvent:
    """A kernel, an operation or a call of the driver."""

    name: str
    start: float
    """Seconds since the step's beginning."""
    seconds: float
    lane: int
    """Stream or thread."""
    on_gpu: bool


@dataclass(frozen=True)
class StepTrace:
    """Events of a step."""

    events: Sequence[TracedEvent] = ()
    busy: dict[PhasePath, float] = field(default_factory=dict)
    """Share of each phase in which a GPU computed; empty without one."""
    computed: dict[tuple[str, PhasePath], float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of kernels, or of operations without those that they call, by name and phase."""
    times: Counter[tuple[str, PhasePath]] = field(default_factory=Counter)

    def longest(self) -> list[KernelTime]:
        return [
            KernelTime(name, SEPARATOR.join(path) or "rest", seconds, self.times[name, path])
            for (name, path), seconds in sorted(self.computed.items(), key=lambda each: -each[1])[:MAX_KERNELS]
        ]


class Tracer:
    """Traces what happens inside, as a context. Where torch cannot, a remark says why, and nothing else happens."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._profile: profile | None = None
        self.remark = ""

    def __enter__(self) -> "Tracer":
        activity = ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU
        try:
            self._profile = profile(activities=[activity])
            self._profile.start()
        except (RuntimeError, AssertionError) as error:
            self._refuse(error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._profile is None:
            return
        try:
            self._profile.stop()
        except (RuntimeError, AssertionError) as failure:
            self._refuse(failure)

    def read(self, began: int, spans: Sequence[PhaseSpan]) -> StepTrace:
        """Read what was traced of a step with these spans, once it is left; `began`: its nanoseconds of the wall
        clock."""
        try:  # what holds the events is not part of torch's documented interface
            results = getattr(getattr(self._profile, "profiler", None), "kineto_results", None)
            events = sorted(_events(results, began), key=lambda each: (each.start, -each.seconds))
        except (AttributeError, RuntimeError, TypeError) as error:
            if self._profile is not None:
                self._refuse(error)
            return StepTrace()
        if self._on_gpu and not any(each.on_gpu for each in events):
            self.remark = "torch's profiler saw no kernel on this GPU: the trace has the phases alone"
        return _attributed(events, spans, self._on_gpu)

    def _refuse(self, error: Exception) -> None:
        self._profile, self.remark = None, f"torch's profiler does not work here: {visible(str(error), MAX_NAME)}"


def _events(results: Any, began: int) -> Iterator[TracedEvent]:
    for each in results.events():
        kind = each.activity_type() if hasattr(each, "activity_type") else ""
        if each.is_user_annotation() or "annotation" in str(kind):
            continue
        on_gpu = each.device_type().name.startswith("CUDA")
        lane = each.device_resource_id() if on_gpu else each.start_thread_id()
        start, name = (each.start_ns() - began) / 1e9, each.name()[:MAX_NAME]
        yield TracedEvent(name, start, each.duration_ns() / 1e9, lane, on_gpu)


def _attributed(events: Sequence[TracedEvent], spans: Sequence[PhaseSpan], on_gpu: bool) -> StepTrace:
    """The events with the phases in which they ran."""
    spans = sorted(spans, key=lambda span: span.start)
    starts = [span.start for span in spans]
    trace, busy, until = StepTrace(events), defaultdict[PhasePath, float](float), 0.0
    counted = _without_inner(events) if not on_gpu else ((each, each.seconds) for each in events if each.on_gpu)
    for each, seconds in counted:
        path = spans[max(bisect_right(starts, each.start) - 1, 0)].path
        trace.computed[each.name, path] += seconds
        trace.times[each.name, path] += 1
        busy[path] += max(each.start + each.seconds - max(each.start, until), 0.0)
        until = max(until, each.start + each.seconds)
    if on_gpu and busy:
        trace.busy.update(_shares(busy, spans, until))
    return trace


def _shares(busy: Mapping[PhasePath, float], spans: Sequence[PhaseSpan], until: float) -> dict[PhasePath, float]:
    """Share of each phase in which a GPU computed; of those that had ended when the trace did, at `until`."""
    whole, ends = defaultdict[PhasePath, float](float), dict[PhasePath, float]()
    for span in spans:
        whole[span.path] += span.seconds
        ends[span.path] = span.start + span.seconds
    has_all = until >= WHOLE_TRACE * max(ends.values())
    seen = (path for path in whole if whole[path] > 0 and (has_all or ends[path] <= until))
    return {path: min(busy.get(path, 0.0) / whole[path], 1.0) for path in seen}


def _without_inner(events: Sequence[TracedEvent]) -> Iterator[tuple[TracedEvent, float]]:
    """Operations with their seconds, without those of the operations that they call."""
    left = [each.seconds for each in events]
    open_ones: dict[int, list[int]] = {}
    for number, each in enumerate(events):
        stack = open_ones.setdefault(each.lane, [])
        while stack and events[stack[-1]].start + events[stack[-1]].seconds <= each.start:
            stack.pop()
        if stack:
            left[stack[-1]] -= each.seconds
        stack.append(number)
    return zip(events, left, strict=True)


def trace_file(trace: StepTrace, spans: Sequence[PhaseSpan], device: torch.device) -> bytes:
    """A trace in Chrome's format, which Perfetto shows, compressed."""
    on_gpu = device.type == "cuda"
    rows = [_row(HOST, 0, SEPARATOR.join(span.path), span.host_start, span.host_seconds) for span in spans]
    if on_gpu:
        rows += [_row(DEVICE, 0, SEPARATOR.join(span.path), span.start, span.seconds) for span in spans]
    rows += [
        _row(DEVICE if each.on_gpu else HOST, 1 + each.lane, each.name, each.start, each.seconds)
        for each in trace.events
    ]
    kept = heapq.nlargest(MAX_EVENTS, rows, key=lambda row: row["dur"]) if len(rows) > MAX_EVENTS else rows
    lanes = sorted({(row["pid"], row["tid"]) for row in rows})
    names = [_named("process_name", HOST, 0, "host"), *[_named("process_name", DEVICE, 0, "GPU")] * on_gpu]
    names += [_named("thread_name", process, lane, _lane(process, lane)) for process, lane in lanes]
    content = {
        "traceEvents": [*names, *kept],
        "displayTimeUnit": "ms",
        "otherData": {"left out": len(rows) - len(kept)},
    }
    return gzip.compress(json.dumps(content, separators=(",", ":")).encode(), compresslevel=5, mtime=0)


def _lane(process: int, number: int) -> str:
    return f"{'stream' if process == DEVICE else 'thread'} {number - 1}" if number else "phases"


def _row(process: int, lane: int, name: str, start: float, seconds: float) -> dict[str, Any]:
    times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * seconds, 3)}
    return {"name": name or "rest", "ph": "X", "pid": process, "tid": lane, **times}


def _named(kind: str, process: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": lane, "args": {"name": name}}
