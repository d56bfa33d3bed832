"""Locks of folders, one process for each: the kernel releases a lock when its owner dies, however it dies."""

import fcntl
import json
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType

from proximo.system.opening import FILE, make_folder, open_to_write, read_json, remove
from proximo.system.safe_text import visible

NAME = "lock"
MAX_OWNER, MAX_SHOWN = 1 << 16, 200
"""Maximum bytes of the file that names the owner, and characters of that shown."""
ENDED = ("Z", "X", "x")
"""States in /proc/PID/stat of a process that has ended: a zombie, or dead."""


class Locked(ValueError):
    """Error where another process is working in this folder."""


class FolderLock:
    """Held from its creation until `release` or the end of the process.

    Both the folder and a file in it are locked: the file names the owner and may be removed by hand, and some network
    file systems cannot lock a folder.

    Example: with FolderLock(Path("runs/a")): ...
    """

    def __init__(self, folder: Path) -> None:
        """Lock the folder, which is created if it does not exist."""
        self.path = folder / NAME
        self._held = _both_locked(self.path)
        file = self._held[0]
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now().isoformat(" ", "seconds"),
            "boot": _boot(),
            "started": _started(os.getpid()),
            "inode": os.fstat(file).st_ino,
        }
        with suppress(OSError):  # a full disk: the lock is held without naming its owner
            os.ftruncate(file, 0)
            os.pwrite(file, (json.dumps(owner) + "\n").encode(), 0)

    def release(self, *, remove_empty: bool = False) -> None:
        """Release the lock and remove its file, and with `remove_empty` an empty folder. A process that waits with the
        old file open notices that it was replaced."""
        if not self._held:
            return
        if _is_still(self.path, self._held[0]):
            remove(self.path)
        if remove_empty:
            with suppress(OSError):  # it is not empty, or another process removed it
                self.path.parent.rmdir()
        for file in self._held:
            os.close(file)
        self._held = []

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def is_held(path: Path) -> bool:
    """Tell whether the process that a lock's file names is alive: it must be that very process, and that very file, not
    a copy. Nothing is locked for this, so that looking never blocks a starting run.

    A file without an owner, or with an owner on another machine, counts as held.
    """
    if not path.is_file():
        return False
    try:
        owner, inode = read_json(path, MAX_OWNER), path.stat().st_ino
    except (OSError, ValueError):
        return path.is_file()
    if not isinstance(owner, dict) or not isinstance(pid := owner.get("pid"), int):
        return path.is_file()
    if owner.get("inode", inode) != inode:
        return False
    if owner.get("host") != socket.gethostname():
        return path.is_file()
    return owner.get("boot") in (None, _boot()) and _is_alive(pid, owner.get("started"))


def _is_alive(pid: int, started: object) -> bool:
    """Tell whether the process exists and started at that time, if known. A zombie keeps its process id but counts as
    dead."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it exists, and belongs to another user
        pass
    if (fields := _stat(pid)) and fields[0] in ENDED:
        return False
    return started is None or started == _started(pid)


def _boot() -> str | None:
    """Id of this machine's current boot; None if not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """Start time of a process, in ticks since boot; None if not known."""
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 else None  # the 22nd field of the file


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third, the state, on; empty if not known."""
    try:
        # The name, the second field, is in parentheses and may contain anything.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _both_locked(path: Path) -> list[int]:
    """The lock's open file, and its folder if that can be locked."""
    folder = _locked_folder(path)
    try:
        return [_locked_file(path), *folder]
    except BaseException:
        for file in folder:
            os.close(file)
        raise


def _locked_folder(path: Path) -> list[int]:
    while True:
        make_folder(path.parent)
        try:
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | FILE)
        except FileNotFoundError:  # its last owner removed it in between
            continue
        try:
            _lock(folder, path)
        except Locked:
            os.close(folder)
            raise
        except OSError:  # a file system that can lock only files
            os.close(folder)
            return []
        if _is_still(path.parent, folder):
            return [folder]
        os.close(folder)


def _locked_file(path: Path) -> int:
    while True:
        file = open_to_write(path)
        try:
            _lock(file, path)
        except BaseException:
            os.close(file)
            raise
        if _is_still(path, file):
            return file
        os.close(file)  # its last owner removed it in between


def _lock(file: int, path: Path) -> None:
    """`path` is the file that names the owner."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Locked(
            f"{path.parent} is in use by {_owner(path)}: wait for it, end it, or choose another name"
        ) from None


def _is_still(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _owner(path: Path) -> str:
    try:
        known = read_json(path, MAX_OWNER)
        owner = f"process {known['pid']} on {known['host']} since {known['since']}"
        return visible(" ".join(owner.split()), MAX_SHOWN)
    except (OSError, ValueError, KeyError, TypeError):  # it is being written, or was removed by hand
        return "another process"
