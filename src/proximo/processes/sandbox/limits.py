"""Limits of a program, its inputs, and its result."""

from dataclasses import dataclass
from typing import Literal

NOBODY = 65534
"""User and group id that programs run as when started by root."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
"""Maximum open files."""
LONGEST = 86_400.0
"""Maximum seconds of a run: a day."""


class NoSandbox(ValueError):
    """Error where this machine cannot provide a sandbox; nothing is run without one."""


class SandboxFailed(RuntimeError):
    """A program could not be run, through no fault of its own: it is unscored."""


@dataclass(frozen=True)
class Limits:
    """Limits of one run of a program."""

    seconds: float = 10.0
    """Wall time after which the program is killed."""
    cpu_seconds: int = 5
    """CPU time, over all threads."""
    memory_mb: int = 512
    """Address space; beyond it Python raises a MemoryError."""
    scratch_mb: int = 16
    """Size of the scratch folder, which is in memory and removed afterwards."""
    output_kb: int = 1024
    """Output on stdout, on stderr and in results, each; a program that writes more is killed."""
    threads: int = 32
    """Number of threads, including the main one. Enforced only with namespaces; otherwise memory limits them."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= LONGEST:
            raise ValueError(f"limits.seconds is {self.seconds}: give a time above 0, at most {LONGEST:g} (a day)")
        for field in ("cpu_seconds", "memory_mb", "scratch_mb", "output_kb"):
            if getattr(self, field) < 1:
                raise ValueError(f"limits.{field} is {getattr(self, field)}: give at least 1")
        if self.threads < 2:
            raise ValueError(f"limits.threads is {self.threads}: give at least 2, as a program and one thread need")
        if self.memory_mb < 64:
            raise ValueError(f"limits.memory_mb is {self.memory_mb}: Python itself needs 64")


@dataclass(frozen=True)
class Calls:
    """Calls of one function, in order and in one process."""

    function: str
    """Name of the function: `solve`, or `Solution.solve` for a class that is constructed without arguments."""
    arguments: tuple[str, ...]
    """Arguments of each call as JSON: an array, or an object of keyword arguments."""


@dataclass(frozen=True)
class SandboxJob:
    """A program and its inputs. Expected results are not part of it, so the program cannot find them."""

    program: str
    stdin: str = ""
    calls: Calls | None = None
    """Calls to make. None: run the program as a script."""


@dataclass(frozen=True)
class ProgramResult:
    ended: Literal["exit", "signal", "time", "output"]
    """End of the program: by itself, by a signal (a crash, or the CPU limit), or killed for its time or its output."""
    code: int
    """Exit code, or signal number."""
    stdout: bytes
    stderr: bytes
    answers: bytes
    """Results of the calls, one JSON text per line."""
    seconds: float

    @property
    def finished(self) -> bool:
        return self.ended == "exit" and self.code == 0
