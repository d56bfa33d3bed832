"""Parquet files of strangers: what reading one would take, known before a value is decoded.

A footer may claim anything, and a page of a few bytes may hold a billion equal values. So the head of every page is
read, which says how many values and bytes it really gives. Only a text that many rows share has a size that no head
says: where that could be too much, its column is counted as numbers of the few texts that there are.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

MAGIC = b"PAR1"
MAX_FOOTER = 32 << 20
"""Bytes of a footer: those of thousands of columns and row groups are smaller."""
MAX_DEPTH = 32
"""Lists and structs inside each other; deeper ones end the process inside the library."""
MAX_PAGES = 100_000
"""Pages of a file. Writers make pages of about a megabyte; many tiny ones take time, each for itself."""
HEADS = (1 << 10, 1 << 16, 1 << 20)
"""Bytes that are read for the head of a page: nearly all have less than a hundred."""
WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
DICTIONARY, CODED, PREFIXED = 2, (2, 8), 7
"""Numbers of the format: a page with a column's different values; encodings by number of such a value, and by what a
value has in common with the one before."""


@dataclass(frozen=True)
class Limits:
    """How much a table may hold."""

    rows: int
    values: int
    """Of all columns together, those inside lists counted one by one."""
    size: int
    """Bytes of all values, as they are in memory."""


@dataclass(frozen=True)
class _Chunk:
    """What the pages of one column give in one row group."""

    values: int
    size: int
    """Bytes of its pages, unpacked."""
    shared: int
    """Bytes that its texts may have in addition, if all of them are the longest that there may be."""
    pages: int
    largest: int
    """Bytes of the largest page."""
    prefixed: bool = False
    """Whether texts are stored by what they have in common with the one before."""


def open_parquet(file: BinaryIO, limits: Limits, **options: Any) -> pq.ParquetFile:
    """The file, in which nothing exceeds the limits; ValueError, in one line, for any other. `options` are those of
    pyarrow's ParquetFile.

    Example: with open_file(path) as file: table = open_parquet(file, Limits(10**6, 10**8, 1 << 32)).read()
    """
    try:
        _check_footer(file)
        opened = pq.ParquetFile(_rewound(file))
        _check_sizes(file, opened.metadata, limits)
        return pq.ParquetFile(_rewound(file), metadata=opened.metadata, **options)
    except (pa.ArrowException, OSError, MemoryError, IndexError, OverflowError, NotImplementedError) as error:
        raise ValueError(f"not Parquet: {_first_line(error)}") from error


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


def _check_footer(file: BinaryIO) -> None:
    """Refuse a footer that is too large, and one whose columns are nested too deeply."""
    about = os.fstat(file.fileno())
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("not Parquet: it is not a file")
    file.seek(max(about.st_size - 8, 0))
    tail = file.read(8)
    length = int.from_bytes(tail[:4], "little")
    if about.st_size < 12 or tail[4:] != MAGIC or length > about.st_size - 12:
        raise ValueError("not Parquet: its end is not that of a Parquet file")
    if length > MAX_FOOTER:
        raise ValueError(f"its footer has {length:,} bytes, more than the {MAX_FOOTER:,} that are read")
    file.seek(about.st_size - 8 - length)
    left: list[int] = []  # children still to come, of each group that the element is in
    for element in _Thrift(file.read(length)).elements():
        while left and left[-1] == 0:
            left.pop()
        if left:
            left[-1] -= 1
        left.append(element.get(5) or 0)
        if len(left) > MAX_DEPTH:
            raise ValueError(f"its columns are nested more than {MAX_DEPTH} deep: flatten them")


def _check_sizes(file: BinaryIO, about: pq.FileMetaData, limits: Limits) -> None:
    refuse_rows(about.num_rows, limits.rows)
    pages = about.num_row_groups * about.num_columns
    _refuse_pages(pages)
    values = size = shared = 0
    chunks: list[tuple[int, int, _Chunk]] = []
    for group in range(about.num_row_groups):
        for place in range(about.num_columns):
            chunk = _chunk(file, about.row_group(group).column(place), about.schema.column(place).length, pages)
            pages, values = pages + chunk.pages, values + chunk.values
            size, shared = size + chunk.size, shared + chunk.shared
            refuse_values(values, limits.values)
            refuse_size(size, limits.size)
            chunks.append((group, place, chunk))
    if size + shared > limits.size:
        for group, place, chunk in chunks:
            for more in _shared_sizes(file, about, group, place, chunk):
                size += more
                refuse_size(size, limits.size)


def _refuse_pages(count: int) -> None:
    if count > MAX_PAGES:
        raise ValueError(f"it has more than {MAX_PAGES:,} pages, each of a few bytes: write it anew")


# Texts that rows share


def _shared_sizes(file: BinaryIO, about: pq.FileMetaData, group: int, place: int, chunk: _Chunk) -> Iterator[int]:
    """Bytes of a column's texts, counted piece by piece, where the heads of its pages do not say them."""
    column = about.schema.column(place)
    if chunk.prefixed:
        if column.max_repetition_level:
            raise ValueError(f"its column {column.path!r} has lists of texts by their prefixes: write it anew")
        reader = pq.ParquetFile(_rewound(file), metadata=about)
        rows = max((64 << 20) // max(chunk.largest, 1), 1)
        for batch in reader.iter_batches(rows, [group], [column.path], use_threads=False):
            yield batch.nbytes
    elif chunk.shared:
        reader = pq.ParquetFile(_rewound(file), metadata=about, read_dictionary=[column.path])
        table = reader.read_row_group(group, columns=[column.path], use_threads=False)
        yield from (_text_size(each) for each in table.column(0).chunks)


def _text_size(array: Any) -> int:
    """Bytes of the texts in lists and structs, with those that occur several times counted as often."""
    if isinstance(array, pa.DictionaryArray):
        lengths = pc.binary_length(array.dictionary).fill_null(0).to_numpy(zero_copy_only=False)
        numbers = array.indices.drop_null().to_numpy()
        return int(lengths[numbers].sum(dtype=np.int64)) if len(numbers) else 0
    if isinstance(array, pa.StructArray):
        return sum(_text_size(array.field(number)) for number in range(array.type.num_fields))
    if isinstance(array, pa.MapArray):
        return _text_size(array.keys) + _text_size(array.items)
    return _text_size(array.values) if hasattr(array, "values") else array.nbytes


# Pages


def _chunk(file: BinaryIO, column: pq.ColumnChunkMetaData, length: int, before: int) -> _Chunk:
    """What a column's pages give; `length` of a value, where all have the same, and `before` how many pages the file
    has before it."""
    starts = [
        each for each in (column.dictionary_page_offset, column.data_page_offset) if each is not None and each > 0
    ]
    start, end = min(starts), min(starts) + column.total_compressed_size
    width = WIDTHS.get(column.physical_type, length if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else 0)
    values = size = dictionary = coded = prefixed = largest = pages = 0
    while start < end:
        pages += 1
        _refuse_pages(before + pages)
        head, where = _head(file, start)
        unpacked, packed = _count(head.get(2)), _count(head.get(3))
        count, encoding = _held(head)
        start, size, largest = where + packed, size + unpacked, max(largest, unpacked)
        if head.get(1) == DICTIONARY:
            dictionary = max(dictionary, unpacked)
            continue
        values += count
        coded += count * (encoding in CODED)
        prefixed += count * unpacked * (encoding == PREFIXED)
    if width:
        return _Chunk(values, max(size, values * width), 0, pages, largest)
    return _Chunk(values, size, coded * dictionary + prefixed, pages, largest, prefixed=prefixed > 0)


def _held(head: dict[int, Any]) -> tuple[int, int]:
    """Number of values of a page, and their encoding."""
    for kind, encoding in ((5, 2), (8, 4), (7, 2)):
        if isinstance(about := head.get(kind), dict):
            return _count(about.get(1)), _count(about.get(encoding))
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
        """Numbers and structs by field; other values are passed over."""
        fields, field = {}, 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._number()
            fields[field] = self._value(head & 15, depth)
        return fields

    def elements(self) -> Iterator[dict[int, Any]]:
        """The structs in the first list of a struct: of a footer, the elements of its schema."""
        while head := self._byte():
            if not head >> 4:
                self._number()
            if head & 15 == 9:
                kind, count = self._list()
                yield from (self._value(kind, 0) for _ in range(count) if kind == 12)
                return
            self._value(head & 15, 0)

    def _value(self, kind: int, depth: int) -> Any:
        match kind:
            case 1 | 2:
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._number()
            case 7:
                self._skip(8)
            case 8:
                self._skip(self._unsigned())
            case 9 | 10 if depth < MAX_DEPTH:
                inner, count = self._list()
                for _ in range(count):
                    self._value(3 if inner in (1, 2) else inner, depth + 1)
            case 12 if depth < MAX_DEPTH:
                return self.struct(depth + 1)
            case _:
                raise ValueError("it is damaged: its bytes are not of the format")
        return None

    def _list(self) -> tuple[int, int]:
        head = self._byte()
        return head & 15, head >> 4 if head >> 4 < 15 else self._unsigned()

    def _byte(self) -> int:
        self.position += 1
        return self._data[self.position - 1]

    def _skip(self, count: int) -> None:
        self.position += count
        if self.position > len(self._data):
            raise IndexError

    def _unsigned(self) -> int:
        value = shift = 0
        while (part := self._byte()) & 128 and shift < 70:
            value |= (part & 127) << shift
            shift += 7
        return value | part << shift

    def _number(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)


def _rewound(file: BinaryIO) -> BinaryIO:
    file.seek(0)
    return file


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
