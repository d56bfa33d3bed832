"""Starts the processes of runs: forked from one that has imported everything, or each for itself where a fork is not
safe."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from proximo.system.opening import appending

FORKSERVER = "proximo.insight.compare.forkserver"
USED_LATER = ("transformers.models.qwen3.modeling_qwen3", "transformers.models.qwen3_moe.modeling_qwen3_moe")
"""What a run imports when it loads a model; most of it is the same for other architectures."""
WAIT_SECONDS = 0.05
"""Seconds between two looks at a process that is waited for."""


class Process(Protocol):
    """What is used of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> Any: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def terminate(self) -> None: ...


class Starter(Protocol):
    def start(self, arguments: Sequence[object], log: Path) -> Process:
        """A process in a separate session that runs the worker with these arguments and the number of its parent."""
        ...

    def close(self) -> None: ...


def starter(worker: str, on_cpu: bool) -> Starter:
    """What starts processes that run a module. A process forked on a Mac, or from one that has asked for a GPU, may not
    work."""
    return ForkServer(worker, *USED_LATER) if on_cpu and sys.platform == "linux" else Fresh(worker)


class Fresh:
    """Starts each process anew."""

    def __init__(self, worker: str) -> None:
        self._worker = worker

    def start(self, arguments: Sequence[object], log: Path) -> Process:
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

    def start(self, arguments: Sequence[object], log: Path) -> Process:
        if self._server is None or self._server.poll() is not None:
            self.close()
            self._server = self._started(log)
        process = _ask(self._server, "start", str(log.absolute()), *map(str, arguments))
        return self._server if process is None else Forked(self._server, process)

    def _started(self, log: Path) -> "subprocess.Popen[str]":
        with appending(log) as file:  # tells why, if it cannot start
            return subprocess.Popen(
                [sys.executable, "-P", "-m", FORKSERVER, str(os.getpid()), *self._modules],
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
