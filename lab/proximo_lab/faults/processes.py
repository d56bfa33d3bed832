"""Attempts at a run in processes of their own: forked from one that has imported everything, so that each is quick."""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRACEBACK = 70
"""The exit code of a child that ended in an error that nobody expected."""
PATIENCE = 300.0
"""Seconds; whatever takes longer hangs."""
SUBREAPER = 36
"""prctl's; orphans come to us, and so can be counted."""


@dataclass(frozen=True)
class Ended:
    code: int
    """Negative: the signal that ended it."""
    printed: str
    """Text on stdout and stderr."""
    seconds: float

    @property
    def complaint(self) -> str | None:
        """Complaint about any ending: an error in full, or one that took too long."""
        if self.code == TRACEBACK or "Traceback (most recent call last)" in self.printed:
            return f"a traceback: {self.printed[-300:]}"
        return None


class Child:
    """A forked process that does one thing. Where it may not be the last of its kind, `kill` is safe at any time."""

    def __init__(self, work: Callable[[], int | None], output: Path) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        self.output, self.began, self._ended = output, time.monotonic(), None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run(work, output)

    @property
    def printed(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; True if the process was still there to get it."""
        if self.poll() is not None:
            return False
        os.kill(self.pid, number)
        return True

    def poll(self) -> Ended | None:
        if self._ended is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._ended = self._end(status)
        return self._ended

    def wait(self, seconds: float = PATIENCE) -> Ended:
        """Wait for its end; one that is late is killed, and has hung."""
        until = time.monotonic() + seconds
        while (ended := self.poll()) is None:
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"no end after {seconds:.0f} s: {self.printed[-300:]}")
            time.sleep(0.002)
        return ended

    def wait_for(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Wait for a condition; True if it came true while the process ran."""
        until = time.monotonic() + seconds
        while not condition():
            if self.poll() is not None or time.monotonic() > until:
                return condition()
            time.sleep(0.002)
        return True

    def _end(self, status: int) -> Ended:
        return Ended(os.waitstatus_to_exitcode(status), self.printed, time.monotonic() - self.began)


def _run(work: Callable[[], int | None], output: Path) -> None:
    """Run the work in the child; never returns."""
    code = TRACEBACK
    try:
        # A shell starts what it runs in the background with SIGINT ignored, and children would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(file, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        code = work() or 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def command(*arguments: str) -> Callable[[], int]:
    """A command line, as the work of a child."""

    def work() -> int:
        from proximo.cli import main

        return main(list(arguments))

    return work


def side_by_side(works: Mapping[str, Callable[[], Any]], folder: Path, max_running: int = 2) -> dict[str, Any]:
    """Run each in a process of its own, `max_running` at a time; returns what they return, as JSON has it."""
    waiting, running, returned = dict(works), dict[str, Child](), dict[str, Any]()
    while waiting or running:
        while waiting and len(running) < max_running:
            name = next(iter(waiting))
            running[name] = Child(_noting(waiting.pop(name), folder / f"{name}.json"), folder / f"{name}.txt")
        for name, child in list(running.items()):
            if (ended := child.poll()) is not None:
                del running[name]
                if ended.code != 0:
                    raise AssertionError(f"{name} ended with {ended.code}: {ended.printed[-2000:]}")
                print(ended.printed, end="", flush=True)
                returned[name] = json.loads((folder / f"{name}.json").read_text())
        time.sleep(0.05)
    return returned


def _noting(work: Callable[[], Any], file: Path) -> Callable[[], None]:
    def noted() -> None:
        file.write_text(json.dumps(work()))

    return noted


def adopt_orphans() -> bool:
    """Adopt processes that lose their parents from now on; True if the system does that."""
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def orphans(patience: float = 5.0) -> list[str]:
    """Processes below this one that still run after a while, by command line; they are killed then."""
    until = time.monotonic() + patience
    while (left := descendants(os.getpid())) and time.monotonic() < until:
        _reap()
        time.sleep(0.05)
    names = []
    for pid in left:
        try:
            names.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100])
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    gone = time.monotonic() + 5.0
    while set(left) & set(descendants(os.getpid())) and time.monotonic() < gone:  # a signal takes its time
        _reap()
        time.sleep(0.01)
    _reap()
    return names


def descendants(of: int) -> list[int]:
    """Processes below one, without those that are dead and only not buried."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == of and fields[0] != "Z":
            pid = int(entry.parent.name)
            pids += [pid, *descendants(pid)]
    return pids


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
