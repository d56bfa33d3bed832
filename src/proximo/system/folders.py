"""Atomic folders: complete or absent.

A folder is written under a temporary name, every file is hashed and synced to disk, and only then is it renamed. A
writer that dies leaves a temporary folder, which is never read and which the next writer removes.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from proximo.system.opening import (
    FILE,
    UnsafeFile,
    make_folder,
    names,
    open_file,
    open_to_write,
    read_json,
    remove,
    rename,
    without_links,
)

MANIFEST = "manifest.json"
"""File in each folder with the size and SHA-256 of every other file."""
PARTIAL, REMOVED, ASIDE = ".partial", ".removed", ".passed-over"
"""Suffixes of a folder that is being written, of one that is being removed, and of one that was set aside: it is not
read any more, but kept for inspection."""
PIECE = 1 << 20
HOLLOW = 64 << 30
"""Bytes from which on a file is refused if nearly all of it is a hole."""


def write_folder(path: Path, fill: Callable[[Path], None], more: Mapping[str, object] | None = None) -> None:
    """Let `fill` write into a new folder, which becomes `path` when complete; after an error nothing has changed.
    `more` is added to the manifest.

    Example: write_folder(Path("runs/a/checkpoints/step-000010"), model.save_pretrained)
    """
    partial = path.with_name(path.name + PARTIAL)
    if not path.parent.is_dir():
        make_folder(path.parent)
        sync(path.parent.parent)
    remove(partial)
    try:
        make_folder(partial)
        fill(partial)
        _seal(partial, more)
        if path.exists():
            remove_folder(path)
        rename(partial, path)
        sync(path.parent)
    except BaseException:
        _remove_quietly(partial)
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when complete; after an error nothing has changed. `path` must be new or
    empty. Other than those of `write_folder` it has no manifest: it is a user's to change.

    Example: with new_folder(Path("page")) as folder: (folder / "index.html").write_text("...")
    """
    path = without_links(path).absolute()
    partial = path.with_name(f".{path.name}{PARTIAL}")  # a name that nobody gives to a folder of theirs
    remove(partial)  # of a writer that was killed
    try:
        make_folder(partial)
        yield partial
        if path.is_dir():
            path.rmdir()
        rename(partial, path)
    except BaseException:
        _remove_quietly(partial)
        raise


def complaints(path: Path) -> list[str]:
    """Faults of a folder that `write_folder` wrote; empty if it is complete and intact."""
    try:
        known = _known_files(path)
    except (OSError, ValueError) as error:
        return [f"{MANIFEST}: {_reason(error)}"]
    try:
        files = {str(file.relative_to(path)): file for file in _files(path)}
    except OSError as error:
        return [f"{path.name}: {_reason(error)}"]
    wrong = [f"{name}: missing" for name in known if name not in files]
    wrong += [f"{name}: not in {MANIFEST}" for name in files if name not in known and name != MANIFEST]
    for name in known.keys() & files.keys():
        wrong += _differs(files[name], name, *known[name])
    return sorted(wrong)


def read_manifest(folder: Path) -> dict[str, Any]:
    """All that the manifest of a folder says; ValueError if it is not as it was written."""
    data = read_json(folder / MANIFEST)
    if not isinstance(data, dict):
        raise ValueError("not as it was written")
    return data


def remove_folder(path: Path) -> None:
    """Remove a folder atomically: it is renamed first."""
    removed = path.with_name(path.name + REMOVED)
    remove(removed)
    rename(path, removed)
    remove(removed)


def set_aside(path: Path) -> None:
    """Rename a folder so that it is not read any more; one set aside earlier under that name is removed."""
    aside = path.with_name(path.name + ASIDE)
    remove(aside)
    rename(path, aside)
    sync(path.parent)


def tidy(parent: Path) -> None:
    """Remove what a killed writer or remover left; no other process may be writing there."""
    for name in names(parent):
        if name.endswith((PARTIAL, REMOVED)):
            remove(parent / name)


def write_file(path: Path, data: bytes) -> None:
    """Replace a file's content atomically: readers see the old or the new, also after a crash."""
    with whole_file(path) as partial:
        _write(partial, data)
    sync(path.parent)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary name to write a file under, which becomes `path` at the end; after an error nothing has changed.
    To survive a crash of the machine, sync it as well."""
    partial = path.with_name(path.name + PARTIAL)
    remove(partial)
    os.close(open_to_write(partial, new=True))
    try:
        yield partial
        rename(partial, path)
    except BaseException:
        _remove_quietly(partial)
        raise


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    file = os.open(path, os.O_RDONLY | FILE)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal. UnsafeFile if nearly all of it is missing: a hole has any size, and would be
    read for hours."""
    with open_file(path) as file:
        status = os.fstat(file.fileno())
        if status.st_size > HOLLOW and status.st_blocks * 512 * 100 < status.st_size:
            raise UnsafeFile(f"{path} claims {status.st_size >> 30:,} GiB, and nearly all of it is a hole: restore it")
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(folder: Path, more: Mapping[str, object] | None = None) -> None:
    """Sync every file and write the manifest last."""
    manifest = {}
    for file in sorted(_files(folder)):
        sync(file)
        manifest[str(file.relative_to(folder))] = {"size": file.stat().st_size, "sha256": file_hash(file)}
    _write(folder / MANIFEST, (json.dumps({"files": manifest, **(more or {})}, indent=1) + "\n").encode())
    for directory in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(directory)


def _write(path: Path, data: bytes) -> None:
    file = open_to_write(path)
    try:
        written = 0
        while written < len(data):
            written += os.write(file, data[written : written + PIECE])
        os.fsync(file)
    finally:
        os.close(file)


def _files(folder: Path) -> Iterator[Path]:
    """Files, and links of any kind: all that is not a folder."""
    return (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def _known_files(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each file in the manifest."""
    try:
        entries = read_manifest(folder)["files"].items()
        return {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in entries}
    except UnsafeFile:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError("not as it was written") from error


def _differs(file: Path, name: str, size: int, known: str) -> list[str]:
    try:
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode):
            return [f"{name}: not a file"]
        if status.st_size != size:
            return [f"{name}: {status.st_size} bytes, written were {size}"]
        return [] if file_hash(file) == known else [f"{name}: other bytes than were written"]
    except OSError as error:
        return [f"{name}: {_reason(error)}"]


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _remove_quietly(path: Path) -> None:
    """Remove what is left after an error, which matters more than one from here."""
    with suppress(OSError):
        remove(path)
