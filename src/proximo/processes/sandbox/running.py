"""The sandbox for the trainer: several servers, tested before the first program."""

import os
import platform
import secrets
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

from proximo.processes.sandbox.capabilities import escapes
from proximo.processes.sandbox.client import SandboxServer, has_bubblewrap
from proximo.processes.sandbox.limits import Limits, NoSandbox, ProgramResult, SandboxFailed, SandboxJob

Item = TypeVar("Item")
Value = TypeVar("Value")

_MACHINES = ("x86_64", "aarch64")
MAX_WAIT = 3600
"""Seconds to wait for a free server. Every program has its own limit; this is for a server that was lost."""


class Sandbox:
    """Runs untrusted programs. If this machine cannot isolate them, NoSandbox is raised and says what is missing.

    Example: Sandbox(Limits(seconds=2)).run(SandboxJob("print(int(input()) + 1)", stdin="41")).stdout -> b"42\\n"
    """

    def __init__(self, limits: Limits | None = None, workers: int | None = None) -> None:
        """`workers` programs run in parallel; None: one per core."""
        limits = limits or Limits()
        way = _way_in(limits)
        self.missing = way.missing
        """Mechanisms that this machine lacks, with the reason; the others suffice."""
        self._workers = workers or len(os.sched_getaffinity(0))
        servers = [SandboxServer(limits, way.through_bubblewrap) for _ in range(self._workers)]
        self._free: SimpleQueue[SandboxServer] = SimpleQueue()
        for server in servers:
            self._free.put(server)
        self.close = weakref.finalize(self, _close, servers)
        """Ends all servers and what they run; also called when the sandbox is garbage-collected."""

    def run(self, job: SandboxJob) -> ProgramResult:
        """Run a program, from any thread. SandboxFailed if it could not be run, which is not the program's fault."""
        return self.run_marked(job)[0]

    def run_marked(self, job: SandboxJob) -> tuple[ProgramResult, str]:
        """Run a program; also returns the random mark that every result of a call must begin with."""
        nonce = secrets.token_hex(16)
        with self._server() as server:
            return server.run(job, nonce), nonce

    def each(self, function: Callable[[Item], Value], items: Iterable[Item]) -> list[Value]:
        """Apply the function to every item, in order, with as many in parallel as there are servers."""
        queue: SimpleQueue[tuple[int, Item]] = SimpleQueue()
        for numbered in enumerate(items):
            queue.put(numbered)
        values: dict[int, Value] = {}
        failures: list[BaseException] = []

        def work() -> None:
            try:
                while not failures:
                    number, item = queue.get_nowait()
                    values[number] = function(item)
            except Empty:
                pass
            except BaseException as failure:  # any exception is passed to the caller
                failures.append(failure)

        # Daemons: a program that takes its time must not keep an interrupted trainer alive.
        threads = [Thread(target=work, name="sandbox", daemon=True) for _ in range(min(self._workers, queue.qsize()))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return [values[number] for number in range(len(values))]

    @contextmanager
    def _server(self) -> Iterator[SandboxServer]:
        try:
            server = self._free.get(timeout=MAX_WAIT)
        except Empty:
            raise SandboxFailed(f"no place in the sandbox became free in {MAX_WAIT} seconds") from None
        try:
            yield server
        finally:
            self._free.put(server)


def missing_mechanisms() -> list[str]:
    """Mechanisms that this machine lacks, each with the reason; a sandbox may still be possible."""
    _refuse_machine()
    server = SandboxServer(Limits())
    try:
        return _listed(server.start())
    except SandboxFailed as error:
        return [str(error)]
    finally:
        server.close()


@dataclass(frozen=True)
class _Way:
    """A way to start a server, and the result of trying it."""

    through_bubblewrap: bool
    missing: Mapping[str, str]
    problems: list[str]


def _way_in(limits: Limits) -> _Way:
    _refuse_machine()
    ways = [_tried(limits, through_bubblewrap=False)]
    # Bubblewrap isolates a server, we isolate each program: so it is used only if our namespaces are not available.
    if {"a root of its own", "namespaces"} & ways[0].missing.keys() and has_bubblewrap():
        ways.insert(0, _tried(limits, through_bubblewrap=True))
    for way in ways:
        if not way.problems:
            return way
    lines = dict.fromkeys(line for way in ways for line in (*_listed(way.missing), *way.problems))
    raise NoSandbox(
        "programs cannot be held in on this machine, so none is run:\n"
        + "\n".join(f"- {line}" for line in lines)
        + "\nUse a Linux (5.13 or later) that allows user namespaces or Landlock, also in a container."
    )


def _tried(limits: Limits, *, through_bubblewrap: bool) -> _Way:
    server = SandboxServer(limits, through_bubblewrap)
    missing: Mapping[str, str] = {}
    try:
        missing = server.start()
        problems = _lacking(missing) or escapes(server)
    except SandboxFailed as error:
        problems = [str(error)]
    finally:
        server.close()
    return _Way(through_bubblewrap, missing, problems)


def _lacking(missing: Mapping[str, str]) -> list[str]:
    """Missing mechanisms without substitute. Without namespaces the filter forbids processes, sockets, signals."""
    lacking = ["no filter of system calls: seccomp is needed"] if "seccomp" in missing else []
    if {"a root of its own", "Landlock"} <= missing.keys():
        lacking.append("no wall around files: a root of its own or Landlock is needed")
    if "an interpreter that everybody can read" in missing:
        lacking.append("started by root, programs run as nobody: install Python outside of a private folder")
    return lacking


def _listed(missing: Mapping[str, str]) -> list[str]:
    return [f"{name} is missing: {reason}" for name, reason in missing.items()]


def _refuse_machine() -> None:
    here = f"{sys.platform} on {platform.machine()}"
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        raise NoSandbox(
            f"programs are run in a sandbox that needs Linux on {' or '.join(_MACHINES)}, and this is {here}"
        )


def _close(servers: list[SandboxServer]) -> None:
    for server in servers:
        server.close()
