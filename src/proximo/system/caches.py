"""Results that took long, in the user's cache folder: a file for each key, read only if this user alone could have
written it and it is whole. Nothing depends on it: what cannot be read or written is computed again."""

import hashlib
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from proximo.system.folders import write_file
from proximo.system.opening import make_folder, names, open_file, read_file, remove, without_links

DIGEST = hashlib.sha256().digest_size


def cache_folder(name: str) -> Path | None:
    """A folder of the user's cache; None where there is none to be. `XDG_CACHE_HOME` moves it."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    cache = given if os.path.isabs(given) else os.path.expanduser("~/.cache")
    return without_links(cache) / "proximo" / name if os.path.isabs(cache) else None


def is_own(status: os.stat_result) -> bool:
    """Tell whether a file or folder is this user's, and nobody else may write there."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@dataclass(frozen=True)
class Cache:
    """A folder of files by key, the newest of them.

    Example: Cache("tokens", max_bytes=4 << 30).write("0" * 64, b"...")
    """

    name: str
    max_bytes: int
    """Bytes of all its files; one of more than half of that is not kept."""

    def read(self, key: str) -> bytes | None:
        """Bytes kept under a key; None if there are none. A damaged file is removed."""
        try:
            folder = cache_folder(self.name)
            if folder is None or not is_own(folder.lstat()):
                return None
            with open_file(folder / key) as file:
                if not is_own(os.fstat(file.fileno())):
                    return None
            content = read_file(folder / key, self.max_bytes)
        except (OSError, ValueError):
            return None
        data = content[DIGEST:]
        if content[:DIGEST] == _digest(key, data):
            return data
        self.remove(key)
        return None

    def write(self, key: str, data: bytes) -> None:
        """Keep it, in the place of the oldest; nothing happens where that is not possible."""
        with suppress(OSError, ValueError):
            folder = cache_folder(self.name)
            if folder is None or len(data) > self.max_bytes // 2:
                return
            make_folder(folder, mode=0o700)
            if is_own(folder.lstat()):
                write_file(folder / key, _digest(key, data) + data)
                _make_room(folder, self.max_bytes)

    def remove(self, key: str) -> None:
        """Remove what is kept under a key, if anything is."""
        with suppress(OSError, ValueError):
            if (folder := cache_folder(self.name)) is not None:
                remove(folder / key)


def _digest(key: str, data: bytes) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(data)
    return digest.digest()


def _make_room(folder: Path, max_bytes: int) -> None:
    """Remove the oldest files until the others fit."""
    newest_first = sorted(((folder / name).lstat().st_mtime_ns, name) for name in names(folder))[::-1]
    total = 0
    for _, name in newest_first:
        total += (folder / name).lstat().st_size
        if total > max_bytes:
            remove(folder / name)
