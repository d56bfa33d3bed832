"""Starts processes that run a module: forked from one that has imported everything, since importing takes ten seconds
of a processor, more than a short run; or each for itself where a fork is not safe.

python -m proximo.processes.forkserver PARENT WORKER [MODULE …] is the process that is forked from. Each line of its
input is a list, each answer a line: ["start", LOG, ARGUMENT, …] is answered with the number of a process that does what
`python -m WORKER ARGUMENT … PARENT` does, ["status", NUMBER] with its exit status, null as long as it runs.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from proximo.processes import tree
from proximo.system.opening import appending

WAIT_SECONDS = 0.05
"""Seconds between two looks at a process that is waited for."""


class StartedProcess(Protocol):
    """Part of `subprocess.Popen` that is used here."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> Any: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def terminate(self) -> None: ...


class Starter(Protocol):
    def start(self, arguments: Sequence[object], log: Path) -> StartedProcess:
        """A process in a separate session that runs the worker with these arguments and the number of its parent."""
        ...

    def close(self) -> None: ...


def starter(worker: str, *modules: str, on_cpu: bool) -> Starter:
    """Starter of processes that run a module and may import others. A process forked on a Mac, or from one that has
    asked for a GPU, may not work."""
    return ForkServer(worker, *modules) if on_cpu and sys.platform == "linux" else Fresh(worker)


class Fresh:
    """Starts each process anew."""

    def __init__(self, worker: str) -> None:
        self._worker = worker

    def start(self, arguments: Sequence[object], log: Path) -> StartedProcess:
        command = [sys.executable, "-P", "-m", self._worker, *map(str, arguments), str(os.getpid())]
        with appending(log) as file:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)

    def close(self) -> None:
        pass


class ForkServer:
    """Starts processes by asking a server, which imports the modules and is started with the first of them."""

    def __init__(self, worker: str, *modules: str) -> None:
        self._modules = (worker, *modules)
        self._server: subprocess.Popen[str] | None = None

    def start(self, arguments: Sequence[object], log: Path) -> StartedProcess:
        if self._server is None or self._server.poll() is not None:
            self.close()
            self._server = self._started(log)
        process = _ask(self._server, "start", str(log.absolute()), *map(str, arguments))
        return self._server if process is None else Forked(self._server, process)

    def _started(self, log: Path) -> "subprocess.Popen[str]":
        with appending(log) as file:  # tells why, if it cannot start
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "proximo.processes.forkserver", str(os.getpid()), *self._modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()


class Forked:
    """A process of a fork server."""

    def __init__(self, server: "subprocess.Popen[str]", pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self._server.poll() is None:
            self.returncode = _ask(self._server, "status", self.pid)
        if self.returncode is None and self._server.poll() is not None:  # its processes die with it
            self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(WAIT_SECONDS)
        return status

    def terminate(self) -> None:
        if self.poll() is None:  # not waited for yet, so that its number is still its own
            os.kill(self.pid, signal.SIGTERM)


def _ask(server: "subprocess.Popen[str]", *question: object) -> int | None:
    """The server's answer; None too if it has ended, which is waited for."""
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        print(json.dumps(question), file=server.stdin, flush=True)
    except BrokenPipeError:
        answer = ""
    else:
        answer = server.stdout.readline()
    if not answer:
        server.wait()
    return json.loads(answer) if answer else None


# The process that is forked from


def main(arguments: list[str]) -> int:
    parent, *modules = arguments
    if not tree.end_with(int(parent)):
        return 1
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what modules print when they are imported is no answer
    worker, *_ = [import_module(name) for name in modules]
    sys.stdout.flush()
    parent_pid = str(os.getpid())
    for line in sys.stdin:
        kind, *rest = json.loads(line)
        if kind == "status":
            answer = _status(*rest)
        elif (answer := os.fork()) == 0:
            answers.close()
            log, *arguments_given = rest
            _write_to(log)
            return worker.main([*arguments_given, parent_pid])
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def _status(process: int) -> int | None:
    ended, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _write_to(log: str) -> None:
    """Become a process of its own session, without input, whose output goes to the log."""
    os.setsid()
    with open(os.devnull, "rb") as nothing, appending(Path(log)) as file:
        for source, descriptor in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(source.fileno(), descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
