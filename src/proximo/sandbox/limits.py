"""What a program may use, what it is asked, and how it ended."""

from dataclasses import dataclass
from typing import Literal

NOBODY = 65534
"""The user whom programs run as, and the group, where root starts them."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
"""That they may open."""
LONGEST = 86_400.0
"""Seconds of a run; a day."""


class NoSandbox(ValueError):
    """This machine cannot hold a program in; nothing is run without."""


class SandboxFailed(RuntimeError):
    """A program was not run, through no fault of its own: it is unscored."""


@dataclass(frozen=True)
class Limits:
    """Of one run of one program."""

    seconds: float = 10.0
    """By the clock on the wall; then it is killed."""
    cpu_seconds: int = 5
    """Of computing, over all its threads."""
    memory_mb: int = 512
    """Address space: more, and Python raises a MemoryError."""
    scratch_mb: int = 16
    """Files it may write into a folder of its own, which is gone afterwards; these lie in memory."""
    output_kb: int = 1024
    """On stdout, on stderr and of results, each; one that says more is killed."""
    threads: int = 32
    """With the main one. Counted where a program has namespaces of its own; elsewhere memory alone bounds them."""

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
    """`solve`, or `Solution.solve` for a method of a class that is made without arguments."""
    arguments: tuple[str, ...]
    """JSON, one text a call: an array, or an object of keyword arguments."""


@dataclass(frozen=True)
class Job:
    """A program and its inputs. What is expected of it is not here, and so cannot be found by it."""

    program: str
    stdin: str = ""
    calls: Calls | None = None
    """None: it is run as a script."""


@dataclass(frozen=True)
class Result:
    ended: Literal["exit", "signal", "time", "output"]
    """By itself, by a signal (its own fault or the limit of computing time), or killed for going on or saying too
    much."""
    code: int
    """The exit code, or the signal's number."""
    stdout: bytes
    stderr: bytes
    answers: bytes
    """What came back from calls, one JSON text a line."""
    seconds: float

    @property
    def finished(self) -> bool:
        return self.ended == "exit" and self.code == 0
