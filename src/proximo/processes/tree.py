"""Trees of processes: what is below one, and the one way in which all of it is ended.

A keeper stands above whatever a run starts. It runs no foreign code: it waits until what it keeps has ended, or until
it is let go, by will or by the death of whoever asked for it, and then kills everything below it, also what has left
its process group or lost its parent. psutil lists the processes, so that no /proc is needed.

As a script it keeps a command, `python tree.py command …`, with a pipe as its standard input. The end of that pipe,
which also comes when the other side is killed, ends the command and removes the folder that the environment names. A
command that ends by itself leaves the folder: it has a log that the other side reads. Ray, too, ends the children of a
process that is gone, by SIGKILL, and only them: so a child of the script is the keeper, and the script waits.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil

GRACE = 5.0
"""Seconds for a command to end by itself; a server that hangs while it starts ignores SIGTERM."""
FOLDER = "PROXIMO_KEEPER_FOLDER"
"""Environment variable with the folder to remove."""
ROUNDS = 200
"""Times that a keeper kills what is left, a hundredth of a second apart; a process stuck in the kernel outlasts it."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at whether a parent is still there."""

# From Linux's prctl.h.
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


def cores() -> int:
    """Number of cores that this process and its children may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def below(ancestor: int) -> list[int] | None:
    """Ids of the processes below one, without zombies; None if the system does not list them."""
    try:
        descendants = psutil.Process(ancestor).children(recursive=True)
    except (psutil.Error, OSError):
        return None
    return [process.pid for process in descendants if _is_running(process)]


def _is_running(process: psutil.Process) -> bool:
    with suppress(psutil.Error, OSError):
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def kill_below(ancestor: int) -> list[int] | None:
    """Kill the processes below one; their ids, or None if the system does not list them."""
    descendants = below(ancestor)
    for pid in descendants or ():
        send(pid, signal.SIGKILL)
    return descendants


def send(process: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def send_group(leader: int, number: int) -> None:
    """Send a signal to a process group that may have ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def signal_at_parents_death(number: int) -> None:
    """Let the kernel send this process a signal when its parent ends; nothing happens elsewhere than on Linux."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, number)


def end_with(parent: int) -> bool:
    """Let this process be killed when its parent ends; False if that has ended already."""
    signal_at_parents_death(signal.SIGKILL)
    if sys.platform != "linux":
        threading.Thread(target=_end_without, args=(parent,), daemon=True).start()
    return os.getppid() == parent


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


# A keeper


class Keeper:
    """Keeper that this process becomes; to be made before what it keeps is started."""

    def __init__(self) -> None:
        _prctl(_SET_CHILD_SUBREAPER, 1)  # orphans below become ours, so that we can kill them
        self._wake, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def forget(self) -> None:
        """Stop being a keeper, in a child that was forked off."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._wake)
        os.close(self._wake_write)

    def keep(self, child: int, life: int, *, trainer: int | None = None, grace: float = 0.0) -> int | None:
        """Wait until the child ends, until `life` is closed, or until the trainer is no longer our parent; then end all
        that is below. The child's status, negative for a signal; None if it had not ended by itself.

        `trainer`: a process that it forked may hold its end of `life` open. A child of a trainer goes on when it is
        stopped: what it started must not make the trainer wait. `grace`: seconds for the child to end by itself.
        """
        goes_on = trainer is not None
        status = _reap(child, goes_on=goes_on)
        while status is None and (trainer is None or os.getppid() == trainer):
            if life in self._ready(LOOK_SECONDS, life):
                break
            status = _reap(child, goes_on=goes_on)
        if grace:
            self._ask_to_end(child, grace, has_ended=status is not None)
        _end(child)
        return status

    def _ready(self, seconds: float, *descriptors: int) -> list[int]:
        ready, _, _ = select.select([self._wake, *descriptors], [], [], seconds)
        if self._wake in ready:
            os.read(self._wake, 4096)
        return ready

    def _ask_to_end(self, child: int, seconds: float, *, has_ended: bool) -> None:
        """Ask the child's group to end; its own children may be there when the child is not."""
        send_group(child, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while not has_ended and (left := deadline - time.monotonic()) > 0:
            self._ready(left)
            has_ended = _reap(child) is not None


def _end(child: int) -> None:
    """Kill the child's group and all that is below this process, and bury them."""
    for _ in range(ROUNDS):
        send_group(child, signal.SIGKILL)
        kill_below(os.getpid())
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _reap(child: int, *, goes_on: bool = False) -> int | None:
    """Bury the dead; the child's status where it is among them. `goes_on`: whether a child that was stopped does."""
    status = None
    with suppress(ChildProcessError):
        while (changed := os.waitpid(-1, os.WNOHANG | (os.WUNTRACED if goes_on else 0))) != (0, 0):
            if changed[0] != child:
                continue
            if os.WIFSTOPPED(changed[1]):
                os.kill(child, signal.SIGCONT)
            else:
                status = os.waitstatus_to_exitcode(changed[1])
    return status


def main(command: list[str]) -> int:
    """Keep a command; its status, or 0 if it was let go."""
    if os.fork():
        return os.waitstatus_to_exitcode(os.wait()[1])
    folder = os.environ.pop(FOLDER, None)
    keeper = Keeper()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    status = keeper.keep(child.pid, sys.stdin.fileno(), grace=GRACE)
    child.returncode = status  # known here, and so not asked for again
    if status is None and folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return status or 0


def signal_kept(script: int, number: int) -> None:
    """Send a signal to the command that a script keeps, which is the only child of the script's only child."""
    [keeper] = psutil.Process(script).children()
    [kept] = keeper.children()
    send(kept.pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
