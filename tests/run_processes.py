"""Python in processes of their own, forked from a server that has imported everything: imports take seconds, a small
run does not. The server is forked from the process that runs the tests, before its first one: what is large is imported
there already. Shapes are not checked in them.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

import torch

SERVER = multiprocessing.get_context("forkserver")
SOON = 300.0
OURS = ("proximo", "proximo_lab", "tests")
"""What the server imports anew, without checks of shapes."""
PRELOADED = ("proximo.cli.commands.train", "proximo.cli.commands.pipelines", "tests.run_processes")


def start_server() -> None:
    """Before the first test: a process that only waits has no threads, no fixtures and nothing of a test in it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    resource_tracker.ensure_running()  # started as the server is, but to be another interpreter
    spawn, util.spawnv_passfds = util.spawnv_passfds, _fork_server
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def _fork_server(path: bytes, arguments: list[str], descriptors: list[int]) -> int:
    """In the place of multiprocessing's own start of its server, which is another interpreter."""
    if pid := os.fork():
        return pid
    low = 3
    for high in [*sorted(descriptors), os.sysconf("SC_OPEN_MAX")]:  # what is kept open would keep others waiting
        os.closerange(low, high)
        low = high + 1
    sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != "tests.shape_checks"]
    for name in [each for each in sys.modules if each.partition(".")[0] in OURS]:
        del sys.modules[name]
    torch.set_default_dtype(torch.float32)
    warnings.resetwarnings()  # in tests they are errors; Python itself hides these
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    try:
        for name in PRELOADED:
            importlib.import_module(name)
        exec(arguments[-1], {})  # the server's loop, which raises SystemExit at its end
    finally:
        os._exit(0)


class Script:
    """`python -c CODE ARGUMENTS`, running; what it prints is in two files, or in one. Has what Popen has."""

    def __init__(self, code: str, *arguments: str, stdout: str | Path = os.devnull, stderr: Path) -> None:
        stderr.touch()
        self._process = SERVER.Process(target=_run, args=(code, arguments, str(stdout), str(stderr)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        """Its exit status; minus the signal that ended it."""
        self._process.join(SOON)
        assert self._process.exitcode is not None, "the process does not end"
        return self._process.exitcode


class Command(Script):
    """`proximo ARGUMENTS`, running; what it prints on stderr is in a file."""

    def __init__(self, *arguments: str, stderr: Path) -> None:
        self._stderr, self._read = stderr, 0
        super().__init__("from proximo.cli import main; sys.exit(main(sys.argv[1:]))", *arguments, stderr=stderr)

    def lines(self) -> Iterator[str]:
        """Each line that it prints and that was not read before, until it ends."""
        deadline = time.monotonic() + SOON
        while time.monotonic() < deadline:
            is_over = self.poll() is not None
            text = self._stderr.read_text()[self._read :]
            whole = text[: text.rfind("\n") + 1]
            for line in whole.splitlines(keepends=True):
                self._read += len(line)
                yield line
            if is_over:
                return
            time.sleep(0.01)


RUN_OF_A_COMPARISON = """
import importlib
os.setsid()
worker, *arguments = sys.argv[1:]
sys.exit(importlib.import_module(worker).main([*arguments, str(os.getppid())]))
"""


class RunStarter:
    """Stands in for what starts the runs of a comparison."""

    def __init__(self, worker: str, *modules: str, on_cpu: bool) -> None:
        self._worker = worker

    def start(self, arguments: Sequence[object], log: Path) -> Script:
        return Script(RUN_OF_A_COMPARISON, self._worker, *map(str, arguments), stdout=log, stderr=log)

    def close(self) -> None:
        pass


def _run(code: str, arguments: tuple[str, ...], stdout: str, stderr: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.fsync = os.fstat  # as in all tests: what a killed process has written is there without waiting for the disk
    sys.argv[1:] = arguments
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    status = 0
    try:
        exec(code, {"__name__": "__main__", "os": os, "sys": sys})
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    util._run_finalizers()  # pyright: ignore[reportAttributeAccessIssue] -- semaphores, such as a progress bar's
    os._exit(status)
