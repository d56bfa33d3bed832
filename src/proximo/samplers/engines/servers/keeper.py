"""Runs a command in a process group of its own, and ends the whole group when the process that asked for it is gone.

Run as a script, with the standard library alone: `python keeper.py command …`, with a pipe as its standard input. The
end of that pipe, which also comes when the other side is killed, ends the group and removes the folder that the
environment names. A command that ends by itself leaves the folder: it has a log that the other side reads. Ray, too,
ends the children of a process that is gone, by SIGKILL, and only them: so a child of the script keeps the command, and
the script waits.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

SECONDS = 5.0
"""Time for a group to end by itself; a server that hangs while it starts ignores SIGTERM."""
FOLDER = "PROXIMO_KEEPER_FOLDER"
"""Environment variable with the folder to remove."""


def main(command: list[str]) -> int:
    if os.fork():
        return os.waitstatus_to_exitcode(os.wait()[1])
    folder = os.environ.pop(FOLDER, None)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    ended = os.pidfd_open(child.pid)
    is_let_go = sys.stdin in select.select([sys.stdin, ended], [], [])[0]
    for number in (signal.SIGTERM, signal.SIGKILL):  # the child may be gone, and its own children not
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(SECONDS)
    if is_let_go and folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
