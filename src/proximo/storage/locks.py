"""One process to a folder: a lock that the kernel lets go of when its owner dies, however it dies."""

import fcntl
import json
import os
import socket
from datetime import datetime
from pathlib import Path
from types import TracebackType

NAME = "lock"


class Locked(ValueError):
    """Somebody else works in this folder."""


class FolderLock:
    """Held from the moment it is made until `release`, or the end of the process.

    Example: with FolderLock(Path("runs/a")): ...
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._file = _locked(self.path)
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now().isoformat(" ", "seconds")}
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, (json.dumps(owner) + "\n").encode(), 0)
        except OSError:  # a full disk: the lock holds without a name on it
            pass

    def release(self) -> None:
        """Its file goes with it; whoever waits with the old one open sees that it is not the file of that name."""
        if self._file >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def _locked(path: Path) -> int:
    """The open file of a lock that is ours."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(file)
            os.close(file)
            raise Locked(f"{path.parent} is in use by {owner}: wait for it, end it, or choose another name") from None
        except OSError:
            os.close(file)
            raise
        if _is_still(path, file):
            return file
        os.close(file)  # its last owner has removed it in between


def _is_still(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _owner(file: int) -> str:
    try:
        known = json.loads(os.pread(file, 4096, 0))
        return f"process {known['pid']} on {known['host']} since {known['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it is just being written
        return "another process"
