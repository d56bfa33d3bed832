"""The only way into a folder that may come from a stranger: a run, a model, data.

Four rules: a name that is read from a file stays inside its folder (`inside`); nothing is read, written, created,
renamed or removed through a symbolic link, in no part of a path; only regular files are opened, so that a pipe or a
device is refused at once; and `read_file` stops at a bound, whatever size a file claims to have.

Links in a path that the user typed are his own: `without_links` follows them, once, where the path comes in.
"""

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom, BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

TEXT = 64 << 20
"""Maximum bytes of a file of text that is read at once: configs, records and manifests are far smaller."""
PIECE = 1 << 20
MAX_DIGITS = 18
"""Digits of an integer that is surely one of 64 bits."""
FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class UnsafeFile(OSError, ValueError):
    """Error where there is no file that a program may open: a link, a pipe, a device, a folder, or one too large. A
    ValueError too, since the message tells the user what to do."""


class LinkedFile(UnsafeFile):
    """A symbolic link in place of a file or a folder: it may point at anything, such as a secret."""


def without_links(path: str | Path) -> Path:
    """A path as the user typed it, with the links in it followed; unchanged if there are none. Only for what was typed:
    of a path inside a folder it would follow the links of a stranger.

    Example: run = without_links("runs/mine")
    """
    try:
        real = os.path.realpath(path)
    except ValueError as error:  # a NUL, or half a surrogate
        raise ValueError(f"{os.fspath(path)!r} cannot be a path: {error}") from None
    return Path(path) if real == os.path.abspath(path) else Path(real)


def inside(folder: Path, name: object, *, nested: bool = False) -> Path:
    """The file of a name that was read from a file; ValueError if the name leads out of the folder. `nested`: whether
    it may be in a subfolder.

    Example: inside(Path("runs/a"), "metrics.jsonl") == Path("runs/a/metrics.jsonl")
    """
    parts = name.split("/") if isinstance(name, str) and nested else [name]
    if not all(map(_is_plain, parts)):
        raise ValueError(f"{folder}: {ascii(name)[:100]} is no name of a file in this folder")
    return folder.joinpath(*map(str, parts))


def _is_plain(part: object) -> bool:
    if not isinstance(part, str) or part in ("", ".", "..") or "/" in part or "\0" in part:
        return False
    try:
        return bool(os.fsencode(part))
    except ValueError:  # half a surrogate
        return False


def run_around(path: Path) -> Path | None:
    """The run folder that a path lies in, by its name or with its links followed: anything may be in it, from anyone.

    Example: run_around(Path("runs/a/config.toml")) == Path("runs/a").absolute()
    """
    for start in (Path(os.path.abspath(path)), Path(os.path.realpath(path))):
        for folder in start.parents:
            if os.path.lexists(folder / "run.json"):
                return folder
    return None


def check_utf8(path: Path) -> None:
    """ValueError for a path that is not UTF-8: libraries that write models cannot open it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{str(path)!a} is not UTF-8, and no model can be saved there: give another name") from None


# Reading


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading. OSError if it does not exist; UnsafeFile if it is anything but a regular file, or
    reached through a link.

    Example: with open_file(Path("runs/a/config.toml")) as file: text = file.read(1 << 20)
    """
    return os.fdopen(_opened(path, os.O_RDONLY), "rb")


def read_file(path: Path, limit: int = TEXT) -> bytes:
    """A file's bytes; UnsafeFile, before more memory is taken, if there are more than `limit`."""
    pieces, size = [], 0
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size <= limit:
            while piece := file.read(min(PIECE, limit + 1 - size)):
                pieces.append(piece)
                size += len(piece)
            if size <= limit:
                return b"".join(pieces)
    raise UnsafeFile(f"{path} has more than {limit:,} bytes, more than is ever written there")


def read_text(path: Path, limit: int = TEXT) -> str:
    """A file's text; ValueError if it is not UTF-8."""
    return read_file(path, limit).decode("utf-8")


def read_json(path: Path, limit: int = TEXT) -> Any:
    """A file's value as JSON; ValueError if it is none."""
    return json_value(read_file(path, limit))


def json_value(data: bytes | str) -> Any:
    """The value of a JSON text; ValueError if it is none, or nested too deeply. Integers of more than 64 bits, which
    nothing here writes and which no float can hold, are read as floats, as elsewhere.

    Example: json_value(b'{"step": 1}') == {"step": 1}
    """
    try:
        return json.loads(data, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _integer(text: str) -> int | float:
    return int(text) if len(text) <= MAX_DIGITS else float(text)


@contextmanager
def as_written(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a file's values, which may be anything, into a ValueError that names the file."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, OverflowError, RecursionError) as error:
        reason = " ".join(ascii(str(error))[1:100].split())
        raise ValueError(f"{path} is not as it was written ({reason}): restore it, or remove it") from error


def check_file(path: Path) -> Path:
    """The same path, for a library that opens it by itself; OSError as of `open_file`."""
    open_file(path).close()
    return path


def names(folder: Path) -> list[str]:
    """Names in a folder, in order; none if it does not exist. LinkedFile if it is a link."""
    return [name for name, _ in _listed(folder)]


def _listed(folder: Path) -> list[tuple[str, bool]]:
    """Names in a folder, and whether each is a regular file."""
    try:
        with _folder(folder) as descriptor:
            opened = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=descriptor)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        with os.scandir(opened) as entries:
            return sorted((entry.name, entry.is_file(follow_symlinks=False)) for entry in entries)
    finally:
        os.close(opened)


def refuse_foreign(path: Path, *, own_links: bool = False) -> None:
    """UnsafeFile if a path, or anything below it, is neither file nor folder. `own_links`: links that lead to something
    in the same folder are accepted, as other programs make them."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(kind):
        for name, is_file in _listed(path):
            if not is_file and not (own_links and _leads_into(path / name, path)):
                refuse_foreign(path / name, own_links=own_links)
    elif not stat.S_ISREG(kind):
        raise _refusal(path, kind)


def _leads_into(link: Path, folder: Path) -> bool:
    return link.is_symlink() and Path(os.path.realpath(link)).is_relative_to(os.path.realpath(folder))


def blob_of(path: Path) -> Path:
    """Path of a file of a model's folder: the path itself, or in a snapshot of a Hugging Face cache that of the regular
    file among the same repository's blobs that a link there leads to. Any other link is refused.

    Example: with open_file(blob_of(folder / "config.json")) as file: ...
    """
    if not path.is_symlink():
        return path
    target = Path(os.path.normpath(path.parent / os.readlink(path)))
    snapshots = next((parent for parent in path.parents if parent.parts[-1:] == ("snapshots",)), None)
    if snapshots is None or target.parent != snapshots.parent / "blobs":
        raise _linked(path)
    return target


# Writing


def open_to_write(path: Path, *, append: bool = False, new: bool = False) -> int:
    """Descriptor of a file to write, which is created if it does not exist; with `new` it must not. What a file
    contains stays: to replace it, write another and rename it."""
    return _opened(path, os.O_RDWR | os.O_CREAT | (os.O_APPEND if append else 0) | (os.O_EXCL if new else 0))


def writing(path: Path) -> BufferedRandom:
    """A file to write from its beginning, which is created if it does not exist."""
    return os.fdopen(open_to_write(path), "r+b")


def replacing(path: Path) -> BufferedRandom:
    """A file to write anew, which is created if it does not exist: nothing that it contained is left."""
    file = writing(path)
    file.truncate(0)
    return file


def appending(path: Path) -> BufferedWriter:
    """A file to append to, which is created if it does not exist."""
    return os.fdopen(open_to_write(path, append=True), "ab")


def write_new(path: Path, data: bytes) -> None:
    """Write a file whose name is not taken."""
    with os.fdopen(open_to_write(path, new=True), "wb") as file:
        file.write(data)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder, and those above it, unless they exist; `mode` says who may use it."""
    try:
        with _folder(path):
            return
    except FileNotFoundError:
        pass
    make_folder(path.parent)
    with _folder(path.parent) as parent, suppress(FileExistsError):  # another process was faster
        os.mkdir(path.name, mode, dir_fd=parent)
    with _folder(path):
        return


def rename(path: Path, target: Path) -> None:
    """Rename a file or folder, in place of a file of that name."""
    with _folder(path.parent) as parent, _folder(target.parent) as other:
        os.rename(path.name, target.name, src_dir_fd=parent, dst_dir_fd=other)


def remove(path: Path) -> None:
    """Remove a file, a link itself, or a folder with all that is in it; nothing happens if there is none."""
    try:
        with _folder(path.parent) as parent:
            if stat.S_ISDIR(os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode):
                shutil.rmtree(path.name, dir_fd=parent)
            else:
                os.unlink(path.name, dir_fd=parent)
    except FileNotFoundError:
        return


def copy_file(source: Path, target: Path, size: int | None = None) -> None:
    """Copy a file, or its first `size` bytes, to a name that is not taken."""
    with open_file(source) as file, os.fdopen(open_to_write(target, new=True), "wb") as copy:
        left = os.fstat(file.fileno()).st_size if size is None else size
        while left > 0 and (piece := file.read(min(PIECE, left))):
            left -= copy.write(piece)


def copy_folder(source: Path, target: Path, *, without: str = "") -> None:
    """Copy a folder of files and folders, except files of one name. UnsafeFile if anything else is in it."""
    make_folder(target)
    for name in names(source):
        if stat.S_ISDIR((source / name).lstat().st_mode):
            copy_folder(source / name, target / name, without=without)
        elif name != without:
            copy_file(source / name, target / name)


# Paths without links


@contextmanager
def _folder(path: Path) -> Iterator[int]:
    """Descriptor of a folder, opened part by part, so that no link is followed."""
    start, *parts = path.parts if path.is_absolute() else (".", *path.parts)
    folder = os.open(start, FOLDER)
    try:
        for number, part in enumerate(parts):
            try:
                inner = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            except OSError as error:
                raise _better(error, Path(start, *parts[: number + 1])) from None
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _opened(path: Path, flags: int) -> int:
    with _folder(path.parent) as parent:
        try:
            file = os.open(path.name, flags | FILE, 0o644, dir_fd=parent)
        except OSError as error:
            raise _better(error, path) from None
    kind = os.fstat(file).st_mode
    if not stat.S_ISREG(kind):
        os.close(file)
        raise _refusal(path, kind)
    return file


def _better(error: OSError, path: Path) -> OSError:
    """The error with the whole path in it, and of a link, pipe or device with what it is."""
    try:
        kind = path.lstat().st_mode
    except OSError:
        kind = stat.S_IFREG
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR) and not stat.S_ISREG(kind):
        return _refusal(path, kind)
    return OSError(error.errno, os.strerror(error.errno or 0), str(path))


def _refusal(path: Path, kind: int) -> UnsafeFile:
    if stat.S_ISLNK(kind):
        return _linked(path)
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
    return UnsafeFile(
        f"{path} is {kinds.get(stat.S_IFMT(kind), 'a device')}, not a file: put a file there, or remove it"
    )


def _linked(path: Path) -> LinkedFile:
    return LinkedFile(f"{path} is a symbolic link and is not followed: put the file itself there")
