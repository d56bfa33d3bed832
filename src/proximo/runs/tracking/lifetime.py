"""The processes next to a run: they get the processor only when the run leaves it, and end soon after the run."""

import faulthandler
import os
import threading
from contextlib import suppress

LOG = "log.txt"
"""What a tracker prints, in its folder."""
DRAIN = 60.0
"""Seconds after the end of the run in which the rest is sent; then the process ends, whatever it is doing."""
STUCK = 900.0
"""Seconds after which a call that neither returns nor lets other threads run ends the process."""


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
