"""Rows of large Parquet files, read one by one from a copy when they are asked for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, overload
from weakref import finalize

from proximo.data.formats import FORMATS, column_values
from proximo.data.locating import data_files
from proximo.data.row_copies import ROWS, TOGETHER, copied
from proximo.data.rows import Row
from proximo.system.opening import open_file, without_links

IN_MEMORY = 200_000
"""Rows of Parquet files that are kept in memory; more are read from a copy."""


def stored_rows(path: str, field: str) -> "StoredRows | None":
    """The rows of Parquet files that together have more than are kept in memory; None for any other data. `field` is
    the config field named in errors.

    Example: stored_rows("train-*.parquet", "data")[7].location == "train-0.parquet, row 8"
    """
    if Path(path).suffix in set(FORMATS) - {".parquet"}:
        return None
    files = data_files(path, field)
    if any(Path(file).suffix != ".parquet" for file in files) or sum(map(_claimed_rows, files)) <= IN_MEMORY:
        return None
    return StoredRows([CopiedFile(file, copied(file, field)) for file in files])


def _claimed_rows(file: str) -> int:
    """Number of rows that a file claims to have; 0 where it cannot be opened, which reading it will say."""
    # Imported late, because only these files need it.
    from proximo.system.parquet import claimed_rows

    try:
        with open_file(without_links(file)) as opened:
            return claimed_rows(opened)
    except OSError:
        return 0


class CopiedFile:
    """A file of rows and its copy, which stays open, so that it may be removed meanwhile."""

    def __init__(self, file: str, copy: Path) -> None:
        from pyarrow import PythonFile, ipc

        self.copy, self._file, self._lock = copy, file, Lock()
        with _naming_damage(copy):
            opened = open_file(copy)
            finalize(self, opened.close)
            self._reader = ipc.open_file(PythonFile(opened, "r"))
            self.rows = int((self._reader.schema.metadata or {})[ROWS])
        self._names: list[str] = self._reader.schema.names
        self._last: tuple[int, Any] = (-1, None)

    def __iter__(self) -> Iterator[Row]:
        for number in range(self._reader.num_record_batches):
            for offset, values in enumerate(self._values(self._batch(number))):
                yield self._row(number * TOGETHER + offset, values)

    def __getitem__(self, index: int) -> Row:
        [values] = self._values(self._batch(index // TOGETHER).slice(index % TOGETHER, 1))
        return self._row(index, values)

    def _row(self, index: int, values: tuple[Any, ...]) -> Row:
        return Row(f"{self._file}, row {index + 1}", dict(zip(self._names, values, strict=True)))

    def _values(self, batch: Any) -> Iterator[tuple[Any, ...]]:
        columns = [column_values(name, column) for name, column in zip(self._names, batch.columns, strict=True)]
        return zip(*columns, strict=True) if columns else iter([()] * batch.num_rows)

    def _batch(self, number: int) -> Any:
        with self._lock, _naming_damage(self.copy):
            if self._last[0] != number:
                self._last = number, self._reader.get_batch(number)
            return self._last[1]


class StoredRows(Sequence[Row]):
    """The rows of several copied files, one after the other."""

    def __init__(self, files: Sequence[CopiedFile]) -> None:
        self._files = files
        self.key = " ".join(file.copy.name for file in files)
        """Name of the content: equal for equal rows."""

    def __len__(self) -> int:
        return sum(file.rows for file in self._files)

    def __iter__(self) -> Iterator[Row]:
        return (row for file in self._files for row in file)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        left = index
        for file in self._files:
            if 0 <= left < file.rows:
                return file[left]
            left -= file.rows
        raise IndexError(f"row {index} of {len(self)}")

    def spread(self, count: int) -> list[Row]:
        """Rows, this many or all, that lie evenly among the others; the first is one of them."""
        number = min(count, len(self))
        return [self[index * len(self) // number] for index in range(number)]


@contextmanager
def _naming_damage(copy: Path) -> Iterator[None]:
    """Say which file to remove where a copy cannot be read."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, KeyError, ValueError) as error:
        why = str(error).partition("\n")[0][:200]
        raise ValueError(f"{copy}, a copy of rows, is damaged ({why}): remove it, and start again") from error
