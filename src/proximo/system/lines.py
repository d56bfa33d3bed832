"""Append-only rows of JSON, each written by one unbuffered system call."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from proximo.system.folders import sync, write_file
from proximo.system.opening import UnsafeFile, json_value, open_file, open_to_write

PIECE = 1 << 16
MAX_ROW = 4 << 20
"""Maximum bytes of a row; a longer line was not written here."""
MAX_LINE = 256 << 20
"""Bytes after which no end of a line is looked for."""


class JsonLines:
    """A .jsonl file. An appended row survives the death of the process; a failed append leaves no trace.

    Example: rows = JsonLines(Path("runs/a/metrics.jsonl")); rows.append({"step": 0, "loss": 0.5})
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def size(self) -> int:
        """Size in bytes; 0 if there is no file."""
        try:
            return self.path.lstat().st_size
        except FileNotFoundError:
            return 0

    def append(self, *rows: Mapping[str, object]) -> None:
        """Append all rows in one call. Raises OSError if the disk is full; the file is then unchanged."""
        data = b"".join(map(to_line, rows))
        file = open_to_write(self.path, append=True)
        try:
            before = os.fstat(file).st_size
            try:
                written = os.write(file, data)
                if written < len(data):
                    raise OSError(f"{self.path}: only {written} of {len(data)} bytes could be written")
            except OSError:
                os.ftruncate(file, before)
                raise
        finally:
            os.close(file)

    def repair(self) -> int:
        """Remove an incomplete last row, as a crash leaves it; returns the number of bytes removed."""
        size = self.size
        whole = _end_of_rows(self.path, size) if size else 0
        if whole < size:
            self.cut(whole)
        return size - whole

    def cut(self, size: int) -> None:
        """Truncate the file to `size` bytes."""
        if self.size < size:
            raise ValueError(f"{self.path} has {self.size} bytes, not the {size} that it is to be cut to")
        if self.size > size:
            file = open_to_write(self.path)
            try:
                os.ftruncate(file, size)
            finally:
                os.close(file)

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Keep only complete rows that are wanted; the file is replaced atomically."""
        if not self.path.exists():
            return
        with open_file(self.path) as file:
            lines = [line for line in whole_lines(file) if (row := to_row(line)) is not None and wanted(row)]
        write_file(self.path, b"".join(line for line in lines if line is not None))

    def sync(self) -> None:
        """Wait until all rows are on disk."""
        if self.path.exists():
            sync(self.path)

    def readable(self) -> Iterator[dict[str, Any]]:
        """The complete rows, without damaged ones; none if there is no file."""
        if self.path.exists():
            with open_file(self.path) as file:
                yield from (row for line in whole_lines(file) if (row := to_row(line)) is not None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All complete rows; ValueError for a line that is none."""
        if not self.path.exists():
            return
        with open_file(self.path) as file:
            for number, line in enumerate(whole_lines(file), 1):
                if (row := to_row(line)) is None:
                    raise ValueError(f"{self.path}: line {number} is not as it was written: restore the file")
                yield row


class PrefixHash:
    """The SHA-256 of a file's first bytes, for a file that grows: each byte is read once.

    Example: prefix = PrefixHash(Path("runs/a/metrics.jsonl")); prefix.up_to(100); prefix.up_to(200)
    """

    def __init__(self, path: Path) -> None:
        self.path, self._size, self._digest = path, 0, hashlib.sha256()

    def up_to(self, size: int) -> str:
        """SHA-256 of the first `size` bytes in hexadecimal; ValueError if the file has fewer."""
        if size < self._size:
            self._size, self._digest = 0, hashlib.sha256()
        if size > self._size:
            with open_file(self.path) as file:
                file.seek(self._size)
                while self._size < size and (piece := file.read(min(PIECE, size - self._size))):
                    self._digest.update(piece)
                    self._size += len(piece)
        if self._size < size:
            raise ValueError(f"{self.path} has {self._size} bytes, fewer than {size}")
        return self._digest.hexdigest()


class EndlessLine(UnsafeFile):
    """A line that does not end."""

    def __init__(self) -> None:
        super().__init__(f"a line of a log has more than {MAX_LINE >> 20} MiB: restore the file, or remove it")
        self.strerror = str(self)


def whole_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Complete lines, one at a time; None for each that is too long to be a row. Text after the last newline may still
    be growing and is left out. EndlessLine for one that does not
    end, as in a file of a size that it only claims."""
    while line := file.readline(MAX_ROW):
        is_long, size = not line.endswith(b"\n"), len(line)
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_ROW)
            if (size := size + len(line)) > MAX_LINE:
                raise EndlessLine
        if line:
            yield None if is_long else line


def to_row(line: bytes | None) -> dict[str, Any] | None:
    """The row in a line; None if it is not one, as after a disk error."""
    try:
        row = None if line is None else json_value(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def plain(value: Any) -> Any:
    """The value as JSON can represent it: no tuples, no NaN and no infinity."""
    match value:
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case float() if not math.isfinite(value):
            return None
    return value


def to_line(row: Mapping[str, object]) -> bytes:
    return (json.dumps(row) + "\n").encode()


def _end_of_rows(path: Path, size: int) -> int:
    """Offset of the end of the last complete row."""
    with open_file(path) as file:
        for start in range((size - 1) // PIECE * PIECE, -1, -PIECE):
            file.seek(start)
            position = file.read(PIECE).rfind(b"\n")
            if position >= 0:
                return start + position + 1
    return 0
