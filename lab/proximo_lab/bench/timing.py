"""Timing: sides take turns, after warm-ups; medians and their spread."""

import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from proximo_lab.bench.memory import peak_bytes, reset_peak

Clock = Callable[[], float]
"""Seconds since an arbitrary start."""
Say = Callable[[str], None]

VERSIONS = ("torch", "transformers", "trl", "accelerate", "triton", "peft")
TOTAL = "step"
"""The phase that is the sum of all others."""


@runtime_checkable
class Side(Protocol):
    """One of the sides that are compared."""

    @property
    def name(self) -> str: ...

    def turn(self) -> Mapping[str, float]:
        """Do the work once; returns the seconds of each phase."""
        ...


def clock_of(device: str) -> Clock:
    """Clock of a device: on a GPU wall time after synchronisation; on a CPU the process's CPU time, with several
    threads wall time: those that wait for each other use processor time too."""
    if torch.device(device).type == "cuda":

        def on_the_wall() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return on_the_wall
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


@dataclass
class Watch:
    """Seconds of the phases of one turn, and the peak memory of each phase."""

    device: str
    clock: Clock
    seconds: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        reset_peak(self.device)
        start = self.clock()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - start
        self.peaks[name] = max(self.peaks.get(name, 0), peak_bytes(self.device))

    def taken(self) -> dict[str, float]:
        """Return and reset the turn's seconds."""
        seconds, self.seconds = self.seconds, {}
        return seconds


@dataclass(frozen=True)
class Times:
    """Seconds of one phase, by turn, without warm-ups."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of the difference between slowest and fastest, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / 2 / self.median if self.median else 0.0

    def __truediv__(self, other: "Times") -> "Ratio":
        """Ratio by turn, because adjacent turns ran under the same conditions."""
        return Ratio(tuple(ours / theirs for ours, theirs in zip(self.seconds, other.seconds, strict=True)))


@dataclass(frozen=True)
class Ratio:
    turns: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.turns)

    @property
    def lowest(self) -> float:
        return min(self.turns)

    @property
    def highest(self) -> float:
        return max(self.turns)


Phases = dict[str, Times]


def interleaved(sides: Sequence[Side], *, steps: int, warmup: int, say: Say) -> list[Phases]:
    """Let the sides take turns, A B A B, so that changes of the machine affect all of them."""
    phases: list[list[Mapping[str, float]]] = [[] for _ in sides]
    for number in range(warmup + steps):
        for side, turns in zip(sides, phases, strict=True):
            seconds = side.turn()
            kind = "warm-up" if number < warmup else f"turn {number - warmup + 1}"
            say(f"  {side.name:<24} {kind:<8} " + "  ".join(f"{name} {value:.3f} s" for name, value in seconds.items()))
            if number >= warmup:
                turns.append(seconds)
    return [_phases(turns) for turns in phases]


def _phases(turns: Sequence[Mapping[str, float]]) -> Phases:
    return {name: Times(tuple(turn[name] for turn in turns)) for name in turns[0]}


def _cpu_clock() -> str:
    return "CPU seconds of the process" if torch.get_num_threads() == 1 else "seconds on the wall"


def surroundings(device: str) -> dict[str, Any]:
    """Facts about the machine that times depend on."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "clock": "seconds on the wall, synchronised" if on_gpu else _cpu_clock(),
        "threads": torch.get_num_threads(),
        "onednn": bool(torch.backends.mkldnn.enabled),
        "cores": os.cpu_count(),
        "load": list(os.getloadavg()),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in VERSIONS},
    }


def _commit() -> str | None:
    """The commit of the code that is measured, marked if files differ from it; None outside a git checkout."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    printed = subprocess.run(command, capture_output=True, text=True, check=False)
    return printed.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
