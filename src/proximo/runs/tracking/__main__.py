"""`python -m proximo.runs.tracking RUN TRACKER`: the process that sends a run to one tracker while it runs."""

import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from threading import Event

from proximo.runs.files import TRACKING
from proximo.runs.tracking.lifetime import LOG, arm, end_of_run, yield_processor
from proximo.runs.tracking.named import folder_name, tracker_class
from proximo.runs.tracking.sending import Sender
from proximo.runs.tracking.source import Source
from proximo.system.locks import FolderLock, Locked
from proximo.system.opening import make_folder, open_to_write

POLL, MAX_WAIT = 2.0, 60.0
"""Seconds between two looks at the folder, and at most between two tries of a tracker that fails."""


def main(run: Path, name: str) -> int:
    """Exit status: 0 when everything was sent, or the run wrote no folder."""
    yield_processor()
    arm()
    over = end_of_run()
    while not Source(run).is_run:  # a run that is refused leaves no folder, and none is made here
        if over.is_set():
            return 0
        over.wait(POLL)
    place = run / TRACKING / folder_name(name)
    make_folder(place)
    _write_to(place / LOG)
    with _locked(place):
        return _follow(Sender(run, place, tracker_class(name)), over)


def _follow(sender: Sender, over: Event) -> int:
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


def _locked(place: Path) -> FolderLock:
    """Waits for the process of an earlier attempt at the run, which ends soon."""
    while True:
        try:
            return FolderLock(place)
        except Locked:
            time.sleep(POLL)


def _write_to(log: Path) -> None:
    """Everything that trackers print goes to a file."""
    file = open_to_write(log, append=True)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
