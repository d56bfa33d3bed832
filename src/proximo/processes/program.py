"""Script of a worker, started in a process of its own with pipes to it: by the trainer, or by a listener on a node."""

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


class Program:
    """A worker's script in a process of its own, with the pipes to it. Closing `life` ends it, as the end of this
    process does."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """The command gets the numbers of its pipes and of this process behind it. OSError if it cannot be started."""
        requests, self.requests = _pipe()
        self.answers, answers = _pipe()
        life, self.life = _pipe()
        self.printed, printed = _pipe()
        self._lock = threading.Lock()
        self._open = {self.requests, self.answers, self.life, self.printed}
        arguments = [str(number) for number in (requests, answers, life, os.getpid())]
        try:
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=(requests, answers, life),
                start_new_session=True,
                # So that the order of a set is no chance either.
                env={"PYTHONHASHSEED": "0", **environment},
            )
        except OSError:
            self.close()
            raise
        finally:
            for descriptor in (requests, answers, life, printed):
                os.close(descriptor)

    def let_go(self) -> None:
        """Let it end, with all that it started."""
        self._close(self.life)

    def close(self) -> None:
        """Close this side of the pipes."""
        self._close(*self._open)

    def _close(self, *descriptors: int) -> None:
        with self._lock:
            for descriptor in self._open.intersection(descriptors):
                self._open.remove(descriptor)
                os.close(descriptor)


def _pipe() -> tuple[int, int]:
    """Make a pipe clear of the standard streams, whose numbers are free where a program closed them."""
    ends = os.pipe()
    clear = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends)
    for end in ends:
        os.close(end)
    return clear[0], clear[1]


def local_command(script: Path) -> list[str]:
    """Command that starts a worker's script on this machine."""
    return [sys.executable, "-P", "-X", "faulthandler", str(script)]
