"""Parquet files of strangers: what reading one would take, known before a value is decoded.

A footer may claim anything, and a page of a few bytes may hold a billion equal values. So the head of every page is
read, which says how many values and bytes it really gives. Only a text that many rows share has a size that no head
says: where that could be too much, its column is counted as numbers of the few texts that there are.
"""

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

MAGIC = b"PAR1"
MAX_FOOTER = 8 << 20
"""Bytes of a footer: those of thousands of columns and row groups are smaller."""
MAX_DEPTH = 32
"""Lists and structs inside each other; deeper ones end the process inside the library."""
MAX_PAGES = 100_000
"""Pages of a file. Writers make pages of about a megabyte; many tiny ones take time, each for itself."""
HEADS = (1 << 10, 1 << 16, 1 << 20)
"""Bytes that are read for the head of a page: nearly all have less than a hundred."""
WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
"""Bytes of a value by the number of its type."""
REPEATED = 2
DICTIONARY, CODED, PREFIXED = 2, (2, 8), 7
"""Numbers of the format: a page with a column's different values; encodings by number of such a value, and by what a
value has in common with the one before."""


@dataclass(frozen=True)
class TableLimits:
    """Limits of a table's contents."""

    rows: int
    values: int
    """Values of all columns together, those inside lists counted one by one."""
    size: int
    """Bytes of all values, as they are in memory."""
    shared: int | None = None
    """Bytes of a page from which many rows take their texts; whoever reads the rows counts such texts once more for
    each. None: any number of bytes, and those texts are counted before."""


@dataclass(frozen=True)
class _Chunk:
    """Contents of one column's pages in one row group."""

    values: int
    size: int
    """Bytes of its pages, unpacked."""
    shared: int
    """Bytes that its texts may have in addition, if all of them are the longest that there may be."""
    pages: int
    largest: int
    """Bytes of the largest page."""
    prefixed: bool = False
    """True where texts are stored by what they have in common with the one before."""
    sharing: int = 0
    """Bytes of the largest page from which many rows take their texts."""


def open_parquet(file: BinaryIO, limits: TableLimits, **options: Any) -> pq.ParquetFile:
    """The file, in which nothing exceeds the limits; ValueError, in one line, for any other. `options` are those of
    pyarrow's ParquetFile.

    Example: with open_file(path) as file: table = open_parquet(file, TableLimits(10**6, 10**8, 1 << 32)).read()
    """
    try:
        footer = _footer(file)
        columns = _columns(footer.get(2))
        _check_sizes(file, footer, columns, limits)
        return pq.ParquetFile(file, **options)
    except (pa.ArrowException, OSError, MemoryError, OverflowError) as error:
        raise ValueError(f"not Parquet: {_first_line(error)}") from error
    except (TypeError, LookupError, AttributeError, NotImplementedError):  # values of another kind than the format has
        raise ValueError("not Parquet: its footer is damaged") from None


def claimed_rows(file: BinaryIO) -> int:
    """Number of rows that the footer claims; 0 where it cannot be read, which `open_parquet` would refuse."""
    try:
        return _count(_footer(file).get(3))
    except (ValueError, OSError, OverflowError, TypeError, LookupError, AttributeError):
        return 0


def refuse_rows(rows: int, limit: int) -> None:
    if rows > limit:
        raise ValueError(f"it has {rows:,} rows, more than the {limit:,} that are read: give a part of them")


def refuse_values(values: int, limit: int) -> None:
    if values > limit:
        raise ValueError(f"it has {values:,} values, more than the {limit:,} that are read: give fewer rows or columns")


def refuse_size(size: int, limit: int) -> None:
    if size > limit:
        raise ValueError(
            f"its values take {size >> 20:,} MiB, more than the {limit >> 20:,} MiB that are read: give fewer rows or "
            "columns"
        )


# The footer


@dataclass(frozen=True)
class _Column:
    """A column as the footer describes it, read here: pyarrow ends the process where a row group lacks one."""

    path: str
    kind: int
    length: int
    """Bytes of a value, where all have the same."""
    is_repeated: bool


def _footer(file: BinaryIO) -> dict[int, Any]:
    """The fields of the footer, by their numbers in the format."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not Parquet: it is not a file")
    file.seek(max(status.st_size - 8, 0))
    tail = file.read(8)
    length = int.from_bytes(tail[:4], "little")
    if status.st_size < 12 or tail[4:] != MAGIC or length > status.st_size - 12:
        raise ValueError("not Parquet: its end is not that of a Parquet file")
    if length > MAX_FOOTER:
        raise ValueError(f"its footer has {length:,} bytes, more than the {MAX_FOOTER:,} that are read")
    file.seek(status.st_size - 8 - length)
    return _Thrift(file.read(length)).struct()


def _columns(elements: Any) -> list[_Column]:
    """The columns with values, in the order of the schema, which lists each group before what is in it."""
    columns: list[_Column] = []
    groups: list[tuple[int, str, bool]] = []  # children still to come, path and whether it repeats
    for number, element in enumerate(elements):
        while groups and groups[-1][0] == 0:
            groups.pop()
        path, is_repeated = "", False
        if groups:
            left, path, is_repeated = groups.pop()
            groups.append((left - 1, path, is_repeated))
        if number:  # the first is the whole schema
            path = f"{path}.{element[4].decode()}".removeprefix(".")
            is_repeated = is_repeated or element.get(3) == REPEATED
        if children := element.get(5):
            groups.append((children, path, is_repeated))
        elif number:
            columns.append(_Column(path, element[1], element.get(2) or 0, is_repeated))
        if len(groups) > MAX_DEPTH:
            raise ValueError(f"its columns are nested more than {MAX_DEPTH} deep: flatten them")
    return columns


def _check_sizes(file: BinaryIO, footer: Mapping[int, Any], columns: Sequence[_Column], limits: TableLimits) -> None:
    groups = footer.get(4) or []
    refuse_rows(max(_count(footer.get(3)), sum(_count(group.get(3)) for group in groups)), limits.rows)
    if any(len(group[1]) != len(columns) for group in groups):
        raise ValueError("not Parquet: a row group has other columns than the schema")
    pages = len(groups) * len(columns)
    _refuse_pages(pages)
    values = size = shared = 0
    chunks: list[tuple[int, _Column, _Chunk]] = []
    for number, group in enumerate(groups):
        for column, stored in zip(columns, group[1], strict=True):
            chunk = _chunk(file, stored[3], column, pages)
            pages, values = pages + chunk.pages, values + chunk.values
            size, shared = size + chunk.size, shared + chunk.shared
            refuse_values(values, limits.values)
            refuse_size(size, limits.size)
            _refuse_shared(column, chunk, limits.shared)
            chunks.append((number, column, chunk))
    if limits.shared is None and size + shared > limits.size:
        for number, column, chunk in chunks:
            for more in _shared_sizes(file, number, column, chunk):
                size += more
                refuse_size(size, limits.size)


def _refuse_shared(column: _Column, chunk: _Chunk, limit: int | None) -> None:
    if limit is not None and chunk.sharing > limit:
        raise ValueError(
            f"its column {column.path[:100]!r} has a page of {chunk.sharing >> 20:,} MiB from which rows take their "
            f"texts, more than the {limit >> 20:,} MiB that are read: write it anew, with smaller pages"
        )


def _refuse_pages(count: int) -> None:
    if count > MAX_PAGES:
        raise ValueError(f"it has more than {MAX_PAGES:,} pages, each of a few bytes: write it anew")


# Texts that rows share


def _shared_sizes(file: BinaryIO, group: int, column: _Column, chunk: _Chunk) -> Iterator[int]:
    """Bytes of a column's texts, counted piece by piece, where the heads of its pages do not say them."""
    if chunk.prefixed:
        if column.is_repeated:
            raise ValueError(f"its column {column.path[:100]!r} has lists of texts by their prefixes: write it anew")
        reader = pq.ParquetFile(file)
        rows = max((64 << 20) // max(chunk.largest, 1), 1)
        for batch in reader.iter_batches(rows, [group], [column.path], use_threads=False):
            yield batch.nbytes
    elif chunk.shared:
        reader = pq.ParquetFile(file, read_dictionary=[column.path])
        table = reader.read_row_group(group, columns=[column.path], use_threads=False)
        yield from (_text_size(part) for part in table.column(0).chunks)


def _text_size(array: Any) -> int:
    """Bytes of the texts in lists and structs, with those that occur several times counted as often."""
    if isinstance(array, pa.DictionaryArray):
        lengths = pc.binary_length(array.dictionary).fill_null(0).to_numpy(zero_copy_only=False)  # pyright: ignore[reportAttributeAccessIssue]
        numbers = array.indices.drop_null().to_numpy()
        return int(lengths[numbers].sum(dtype=np.int64)) if len(numbers) else 0
    if isinstance(array, pa.StructArray):
        return sum(_text_size(array.field(number)) for number in range(array.type.num_fields))
    if isinstance(array, pa.MapArray):
        return _text_size(array.keys) + _text_size(array.items)
    return _text_size(array.values) if hasattr(array, "values") else array.nbytes


# Pages


def _chunk(file: BinaryIO, metadata: Mapping[int, Any], column: _Column, before: int) -> _Chunk:
    """Contents of a column's pages in one row group; `before`: number of pages that the file has before it."""
    if metadata.get(1) != column.kind:
        raise ValueError("not Parquet: a column has another type than in the schema")
    starts = [offset for offset in (metadata.get(11), metadata.get(9)) if offset is not None and offset > 0]
    start = min(starts)
    end = start + _count(metadata.get(7))
    width = WIDTHS.get(column.kind, column.length)
    values = size = dictionary = coded = prefixed = largest = sharing = pages = 0
    while start < end:
        pages += 1
        _refuse_pages(before + pages)
        head, where = _head(file, start)
        unpacked, packed = _count(head.get(2)), _count(head.get(3))
        count, encoding = _held(head)
        start, size, largest = where + packed, size + unpacked, max(largest, unpacked)
        if head.get(1) == DICTIONARY:
            dictionary = max(dictionary, unpacked)
            sharing = max(sharing, unpacked)
            continue
        sharing = max(sharing, unpacked * (encoding == PREFIXED))
        values += count
        coded += count * (encoding in CODED)
        prefixed += count * unpacked * (encoding == PREFIXED)
    if width:
        return _Chunk(values, max(size, values * width), 0, pages, largest)
    return _Chunk(values, size, coded * dictionary + prefixed, pages, largest, prefixed > 0, sharing)


def _held(head: dict[int, Any]) -> tuple[int, int]:
    """Number of values of a page, and their encoding."""
    for kind, encoding in ((5, 2), (8, 4), (7, 2)):
        if isinstance(header := head.get(kind), dict):
            return _count(header.get(1)), _count(header.get(encoding))
    return 0, 0


def _head(file: BinaryIO, start: int) -> tuple[dict[int, Any], int]:
    """The head of the page that begins there, and where it ends."""
    for size in HEADS:
        file.seek(start)
        data = file.read(size)
        thrift = _Thrift(data)
        try:
            return thrift.struct(), start + thrift.position
        except IndexError:  # it is longer
            if len(data) < size:
                break
    raise ValueError("it is damaged: a page has no head")


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("it is damaged: a page does not say how much it holds")
    return value


class _Thrift:
    """Thrift's compact protocol, as far as Parquet uses it; IndexError where the bytes end too early."""

    def __init__(self, data: bytes) -> None:
        self._data, self.position = data, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Values by field: numbers, bytes, structs and lists of those."""
        fields, field = {}, 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._number()
            fields[field] = self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        match kind:
            case 1 | 2:
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._number()
            case 7:
                return self._bytes(8)
            case 8:
                return self._bytes(self._unsigned())
            case 9 | 10 if depth < MAX_DEPTH:
                inner, count = self._list()
                return [self._value(3 if inner in (1, 2) else inner, depth + 1) for _ in range(count)]
            case 12 if depth < MAX_DEPTH:
                return self.struct(depth + 1)
            case _:
                raise ValueError("not Parquet: its bytes are not of the format")

    def _list(self) -> tuple[int, int]:
        head = self._byte()
        return head & 15, head >> 4 if head >> 4 < 15 else self._unsigned()

    def _byte(self) -> int:
        self.position += 1
        return self._data[self.position - 1]

    def _bytes(self, count: int) -> bytes:
        self.position += count
        if self.position > len(self._data):
            raise IndexError
        return self._data[self.position - count : self.position]

    def _unsigned(self) -> int:
        value = shift = 0
        while (part := self._byte()) & 128 and shift < 70:
            value |= (part & 127) << shift
            shift += 7
        return value | part << shift

    def _number(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
