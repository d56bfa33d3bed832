"""Commands in processes of their own, forked from a server that has imported everything: imports take seconds, a small
run does not."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["proximo.cli.commands.train", "proximo.cli.pipelines"])
SOON = 300.0


class Command:
    """`proximo ARGUMENTS`, running; what it prints on stderr is in a file."""

    def __init__(self, *arguments: str, stderr: Path) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the server: forked processes have no threads of it
        stderr.touch()
        self._stderr, self._read = stderr, 0
        self._process = SERVER.Process(target=_run, args=(arguments, str(stderr)))
        self._process.start()

    def lines(self) -> Iterator[str]:
        """Each line that it prints and that was not read before, until it ends."""
        deadline = time.monotonic() + SOON
        while time.monotonic() < deadline:
            is_over = not self._process.is_alive()
            text = self._stderr.read_text()[self._read :]
            whole = text[: text.rfind("\n") + 1]
            for line in whole.splitlines(keepends=True):
                self._read += len(line)
                yield line
            if is_over:
                return
            time.sleep(0.01)

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        """Its exit status; minus the signal that ended it."""
        self._process.join(SOON)
        assert self._process.exitcode is not None, "the command does not end"
        return self._process.exitcode


def _run(arguments: tuple[str, ...], stderr: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    from proximo.cli import main

    code = main(arguments)
    sys.stderr.flush()
    os._exit(code)
