"""A worker seen from the trainer: started here or on a node of a cluster, asked under a time limit, and killed with all
that it started."""

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from proximo.processes import channel, remote, tree
from proximo.processes.failures import Failure, plain
from proximo.processes.program import Program, local_command

START_SECONDS = 120.0
"""Seconds for Python to start and the function's module to be imported."""
QUIET_SECONDS = 1.0
"""Seconds without a word from a worker, after which the trainer sees to it that it was not stopped."""
KILL_SECONDS = 10.0
"""Seconds for a killed worker to be gone."""
MAX_OUTPUT = 16 * 2**20
"""Bytes that one call may print; most functions print none."""
KEPT_OUTPUT = 2048
"""Bytes of what was printed that are kept, half from its beginning and half from its end."""
MAX_ANSWER = 2**20
"""Maximum bytes of an answer, in addition to 64 for each completion."""
TRIES = 3
"""Nodes that may be lost in a row before something has failed."""
NODE_LOST = "node lost"
"""Kind of the failure of a worker whose node is gone: what was asked can be asked again elsewhere."""


class Loads(Protocol):
    """Code that a worker loads, and the memory that it may take."""

    @property
    def memory_mb(self) -> int: ...

    def message(self) -> dict[str, Any]:
        """First message to the worker: what to load."""
        ...


def located(path: str) -> tuple[str, str]:
    """The module or file of a path like file.py:name, as another process finds it, and the name in it."""
    module, _, name = path.rpartition(":")
    return str(Path(module).expanduser().absolute()) if module.endswith(".py") else module, name


@dataclass(frozen=True)
class NodePlace:
    """A core of a node, where a listener waits for relays."""

    address: str
    """host:port of the listener."""
    token: str
    """Token that a relay sends to be let in."""
    cores: float = 1.0


class NodePlaces(Protocol):
    """The places of a cluster."""

    @property
    def size(self) -> int:
        """Number of places: so many workers may compute at the same time."""
        ...

    def take(self) -> NodePlace:
        """The next one in turn, on a node that answers. NoPlace if there is none."""
        ...

    def close(self) -> None: ...


class NotLoaded(Exception):
    """The code of a worker cannot be imported."""


class NodeLost(NotLoaded):
    """The node was lost before it was imported: another one may do."""


def command_of(script: Path, node_place: NodePlace | None) -> tuple[list[str], Mapping[str, str]]:
    """Command to start on this machine, and its environment: the script, or a relay to it."""
    if node_place is None:
        return local_command(script), os.environ
    # Not an argument: those of a process are for everybody on this machine to read.
    wanted = {remote.NODE_PLACE: f"{node_place.address} {node_place.token} {remote.WORKERS.index(script.parent.name)}"}
    return [sys.executable, "-I", "-S", remote.__file__], os.environ | wanted


class WorkerProcess:
    """Worker as its trainer sees it. After any failure that is fatal it has been killed."""

    def __init__(self, script: Path, job: Loads, node_place: NodePlace | None = None) -> None:
        """Start it, on this machine or at a place, and load what it is for; raises NotLoaded where that cannot be
        done."""
        self.is_alive = True
        self.form = ""
        """How a user's function is called, in words."""
        self._output = Output()
        self._runner: int | None = None
        self.node_place = node_place
        try:
            self._program = Program(*command_of(script, node_place))
        except OSError as error:
            self.is_alive = False
            raise NotLoaded(f"no process can be started, {error}") from error
        self._process, self._requests = self._program.process, self._program.requests
        self._answers, self._printed = self._program.answers, self._program.printed
        for descriptor in (self._requests, self._answers, self._printed):
            os.set_blocking(descriptor, False)
        self._load(job)

    @classmethod
    def started(cls, script: Path, job: Loads, places: NodePlaces | None) -> Self:
        """Start it on this machine, or at the next place; at another one where its node is lost."""
        if places is None:
            return cls(script, job)
        for _ in range(TRIES - 1):
            with contextlib.suppress(NodeLost):
                return cls(script, job, places.take())
        return cls(script, job, places.take())

    def _load(self, job: Loads) -> None:
        message = {
            "path": [entry or os.getcwd() for entry in sys.path],
            "memory": job.memory_mb * 2**20,
            **job.message(),
        }
        hello = self._exchange(None, START_SECONDS, MAX_ANSWER)
        runner = hello.get("runner") if isinstance(hello, dict) else None
        self._runner = runner if type(runner) is int and 1 < runner < 1 << 31 else None
        answer = (
            self._exchange(json.dumps(message).encode(), START_SECONDS, MAX_ANSWER)
            if self._runner is not None
            else hello
        )
        if isinstance(answer, dict) and answer.get("ready") is True:
            self.form = str(answer.get("form", ""))
            return
        self.kill()
        if isinstance(answer, Failure) and answer.kind == NODE_LOST:
            raise NodeLost(answer.message)
        why = answer.message if isinstance(answer, Failure) else plain(str(answer.get("refused", answer)))
        raise NotLoaded(why)

    def ask(self, arguments: str, count: int, seed: int, seconds: float) -> dict[str, Any] | Failure:
        """Call the worker with arguments in JSON; its answer is checked only for being an answer to this call."""
        assert self.is_alive, "a worker that was killed is asked"
        name = secrets.token_hex(16)  # not a number: a child that a call left behind would know the next one's
        head = f'{{"id": "{name}", "count": {count}, "seed": {seed}, "arguments": '
        answer = self._exchange(f"{head}{arguments}}}".encode(), seconds, MAX_ANSWER + 64 * count)
        if isinstance(answer, Mapping) and answer.get("id") != name:
            answer = Failure("junk", "its process answered something that was not asked", fatal=True)
        if isinstance(answer, Failure):
            self.kill()
        return answer

    @property
    def printed(self) -> str:
        """Output of the last call."""
        return plain(self._output.text)

    def kill(self) -> None:
        """Kill it and all that it started, and wait until they are gone."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._program.close()  # the keeper sees that `life` is closed, kills what is below it and goes
        self.strike()

    def strike(self) -> None:
        """Kill the runner and all below the keeper, also while another thread waits for an answer.

        The keeper does the same, unless the function has stopped it. It is killed last, when nothing is left below it:
        what it has not adopted by then would get away.
        """
        if self._runner is not None:
            tree.send_group(self._runner, signal.SIGKILL)
        deadline, empty = time.monotonic() + KILL_SECONDS, 0
        while self._process.poll() is None:
            killed = tree.kill_below(self._process.pid)
            empty = 0 if killed is None or killed else empty + 1
            # Twice: a process may fork behind a list that is being read.
            if empty > 1 or time.monotonic() > deadline:
                self._process.kill()
            time.sleep(0.01)

    def _exchange(self, message: bytes | None, seconds: float, max_bytes: int) -> dict[str, Any] | Failure:
        try:
            return self._talk(message, seconds, max_bytes)
        except BaseException:  # a stop request in the middle of a call: a late answer would belong to no call
            self.kill()
            raise

    def _talk(self, message: bytes | None, seconds: float, max_bytes: int) -> dict[str, Any] | Failure:
        """Send a message and wait for the next one, reading along what is printed."""
        deadline = time.monotonic() + seconds
        self._output = Output()
        unsent = memoryview(b"" if message is None else channel.framed(message))
        answer = channel.Incoming(max_bytes)
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        poll.register(self._printed, select.POLLIN)
        if unsent:
            poll.register(self._requests, select.POLLOUT)
        while (left := deadline - time.monotonic()) > 0:
            ready = dict(poll.poll(min(left, QUIET_SECONDS) * 1000))
            if not ready:
                self._process.send_signal(signal.SIGCONT)  # a keeper that was stopped goes on, and so does its runner
            if self._printed in ready and not self._output.read(self._printed):
                poll.unregister(self._printed)
            if self._output.size > MAX_OUTPUT:
                return Failure("output", f"it printed more than {MAX_OUTPUT // 2**20} MiB in one call", fatal=True)
            if self._requests in ready:
                unsent = self._sent(unsent)
                if not unsent:
                    poll.unregister(self._requests)
            if self._answers in ready:
                part = os.read(self._answers, 1 << 16)
                if not part:
                    return self._death(left)
                answer.add(part)
                if answer.is_too_large:
                    why = f"its process answered {answer.size} bytes, at most {max_bytes} are read"
                    return Failure("junk", why, fatal=True)
                if answer.is_whole:
                    self._output.read(self._printed)
                    parsed = answer.parsed()
                    not_json = Failure("junk", "its process answered no JSON object", fatal=True)
                    return not_json if parsed is None else parsed
        return Failure("time", f"no answer within {seconds:g} s, so it was killed", fatal=True)

    def _sent(self, unsent: memoryview) -> memoryview:
        try:
            return unsent[os.write(self._requests, unsent) :]
        except BlockingIOError:
            return unsent
        except BrokenPipeError:  # its end is closed: that it died is read from its answers
            return unsent[:0]

    def _death(self, left: float) -> Failure:
        """Reason why the answers ended, as far as the keeper says so within the call's time, or a second."""
        self._output.read(self._printed)
        self._process.send_signal(signal.SIGCONT)  # the function may have stopped it
        try:
            code = self._process.wait(max(left, 1.0))
        except subprocess.TimeoutExpired:
            return Failure("died", "its process closed its answers", fatal=True)
        if code == remote.LOST and self.node_place is not None:
            return Failure(NODE_LOST, f"its node was lost; {self.printed}".rstrip("; "), fatal=True)
        # As a shell says it; the keeper's own death by a signal is negative.
        number = code - 128 if code > 128 else -code
        if code < 0 or code > 128:
            name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
            return Failure("died", f"its process was killed by signal {name}", fatal=True)
        return Failure("died", f"its process exited with code {code}", fatal=True)


class Output:
    """Text that was printed: its beginning and its end, however long it was."""

    def __init__(self) -> None:
        self.size = 0
        self._first = b""
        self._last: deque[int] = deque(maxlen=KEPT_OUTPUT // 2)

    def read(self, descriptor: int) -> bool:
        """Read what was printed since; False once all writers have closed it."""
        try:
            part = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        self.size += len(part)
        free_bytes = KEPT_OUTPUT // 2 - len(self._first)
        self._first += part[:free_bytes]
        self._last.extend(part[free_bytes:][-KEPT_OUTPUT // 2 :])
        return bool(part)

    @property
    def text(self) -> str:
        kept = len(self._first) + len(self._last)
        gap = b" ... " if self.size > kept else b""
        return (self._first + gap + bytes(self._last)).decode(errors="replace")
