"""Folders for files that only a running process needs."""

import os
import shutil
import tempfile
from contextlib import suppress

from proximo.system.locks import NAME, FolderLock, Locked, is_held
from proximo.system.opening import without_links


class Scratch:
    """A folder among the temporary ones, until `remove`. That of a process that was killed is removed when the next
    one with the same prefix is made: it may hold a whole model.

    Example: scratch = Scratch("proximo-fleet-"); (scratch.path / "model").mkdir()
    """

    def __init__(self, prefix: str) -> None:
        _remove_abandoned(prefix)
        self.path = without_links(tempfile.mkdtemp(prefix=prefix))
        self._lock = FolderLock(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def _remove_abandoned(prefix: str) -> None:
    """Remove folders of this user whose lock no process holds. One without the lock's file is being made, and one of
    another machine stays: not every shared disk knows the locks of others."""
    for folder in without_links(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(Locked, OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not (folder / NAME).is_file():
                continue
            if is_held(folder / NAME):
                continue
            with FolderLock(folder):
                shutil.rmtree(folder, ignore_errors=True)
