"""A worker's script in a process of its own, with the pipes to it. Imports nothing of Proximo, since a script that runs
on a node uses it too."""

import fcntl
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence


class Program:
    """A script that was started. Closing `life` ends it, and so does the end of this process."""

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
            for theirs in (requests, answers, life, printed):
                os.close(theirs)

    def let_go(self) -> None:
        """Let it end, with all that it started."""
        self._close(self.life)

    def close(self) -> None:
        """This side of the pipes."""
        self._close(*self._open)

    def _close(self, *descriptors: int) -> None:
        with self._lock:
            for descriptor in self._open.intersection(descriptors):
                self._open.remove(descriptor)
                os.close(descriptor)


def _pipe() -> tuple[int, int]:
    """Clear of the standard streams, whose numbers are free where a program closed them."""
    ends = os.pipe()
    clear = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends)
    for end in ends:
        os.close(end)
    return clear[0], clear[1]
