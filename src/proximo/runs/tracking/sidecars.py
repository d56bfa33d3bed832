"""Starts the processes that send a run while it runs. The run itself only starts them and closes a pipe at its end."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from proximo.runs.files import TRACKING
from proximo.runs.tracking.lifetime import LOG
from proximo.runs.tracking.named import folder_name

PATIENCE = 5.0
"""Seconds that a run waits at its end, for all trackers together."""
Process = subprocess.Popen[bytes]


@contextmanager
def tracked(run: Path, names: Sequence[str], say: Callable[[str], None]) -> Iterator[None]:
    """Send the run in this folder to trackers until the end of the block, however that ends."""
    processes = dict(_started(run, names, say)) if names else {}
    readings = list(_process("proximo.runs.tracking.readings", str(run), str(os.getpid()))) if processes else []
    try:
        yield
    finally:
        for process in (*processes.values(), *readings):
            assert process.stdin is not None
            process.stdin.close()
        end = time.monotonic() + PATIENCE
        for name, process in processes.items():
            _wait(run, name, process, end, say)
        for process in readings:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0))


def _started(run: Path, names: Sequence[str], say: Callable[[str], None]) -> Iterator[tuple[str, Process]]:
    for name in names:
        found = list(_process("proximo.runs.tracking", str(run), name))
        yield from ((name, process) for process in found)
        if not found:
            say(f"warning: tracker {name} could not be started; {_remedy(run, name)}")


def _process(module: str, *arguments: str) -> Iterator[Process]:
    """The process; none where the system has no room for one. It has a process group of its own: Ctrl-C is for the
    run, and the end of the run reaches it through its stdin. Not a session of its own: Linux may share the processor
    among sessions before it looks at priorities, and an idle process would then get as much as the run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with suppress(OSError):
        yield subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            process_group=0,
        )


def _wait(run: Path, name: str, process: Process, end: float, say: Callable[[str], None]) -> None:
    """Until the process or the time ends; says what is left to do."""
    try:
        status = process.wait(max(end - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        say(f"tracker {name} is still sending, for a minute at most; if it does not finish, {_remedy(run, name)}")
        return
    if status:
        where = run / TRACKING / folder_name(name) / LOG
        say(f"warning: tracker {name} did not send everything (see {where}); {_remedy(run, name)}")


def _remedy(run: Path, name: str) -> str:
    return f"this sends the rest: proximo track {run} --to {name}"
