"""The processes next to a run: one for each tracker, which sends the run, and one that reads the machine (readings.py).

A run starts them and closes a pipe at its end. They get the processor only when the run leaves it, and end soon after
the run. `python -m proximo.runs.tracking.processes RUN TRACKER` is the process of a tracker.
"""

import faulthandler
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from proximo.runs.files import TRACKING
from proximo.runs.tracking.sending import Sender
from proximo.runs.tracking.source import RunSource
from proximo.runs.tracking.trackers import folder_name, tracker_class
from proximo.system.locks import FolderLock, Locked
from proximo.system.opening import make_folder, open_to_write

PATIENCE = 5.0
"""Seconds that a run waits at its end, for all trackers together."""
LOG = "log.txt"
"""File for what a tracker prints, in its folder."""
DRAIN = 60.0
"""Seconds after the end of the run in which the rest is sent; then the process ends, whatever it is doing."""
STUCK = 900.0
"""Seconds after which a call that neither returns nor lets other threads run ends the process."""
POLL, MAX_WAIT = 2.0, 60.0
"""Seconds between two looks at the folder, and at most between two tries of a tracker that fails."""
Process = subprocess.Popen[bytes]


# The run's side


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
        started = list(_process("proximo.runs.tracking.processes", str(run), name))
        yield from ((name, process) for process in started)
        if not started:
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
    """Wait until the process or the time ends; says what is left to do."""
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


# How the processes live and end


def yield_processor() -> None:
    """Run only on processor time that no other process wants, and never more than one thread of it."""
    with suppress(AttributeError, OSError):  # not on this system: be as nice as possible
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        os.nice(19)


def end_of_run() -> threading.Event:
    """Set when the run has ended, in whatever way: the kernel then closes the pipe that is this process's stdin."""
    over = threading.Event()

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1024):
                pass
        over.set()
        threading.Event().wait(DRAIN)
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()
    return over


def arm() -> None:
    """Begin the time after which a stuck process is ended; from C, so that it also ends code that holds Python's
    lock."""
    faulthandler.dump_traceback_later(STUCK, exit=True, file=2)


# The process of a tracker


def main(run: Path, name: str) -> int:
    """Exit status: 0 when everything was sent, or the run wrote no folder."""
    yield_processor()
    arm()
    over = end_of_run()
    while not RunSource(run).is_run:  # a run that is refused leaves no folder, and none is made here
        if over.is_set():
            return 0
        over.wait(POLL)
    folder = run / TRACKING / folder_name(name)
    make_folder(folder)
    _write_to(folder / LOG)
    with _locked(folder):
        return _follow(Sender(run, folder, tracker_class(name)), over)


def _follow(sender: Sender, over: threading.Event) -> int:
    wait = POLL
    while True:
        arm()
        is_over = over.is_set()  # asked before the folder is read: what was written by then is sent
        try:
            sender.send(is_over=is_over)
        except Exception:
            with suppress(OSError):  # the log's disk may be full
                traceback.print_exc()
            time.sleep(wait)  # not until the end of the run: that would be no wait at all after it
            wait = min(2 * wait, MAX_WAIT)
        else:
            wait = POLL
            if is_over:
                return 0
            over.wait(POLL)


def _locked(folder: Path) -> FolderLock:
    """Waits for the process of an earlier attempt at the run, which ends soon."""
    while True:
        try:
            return FolderLock(folder)
        except Locked:
            time.sleep(POLL)


def _write_to(log: Path) -> None:
    """Send what trackers print to a file."""
    file = open_to_write(log, append=True)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
