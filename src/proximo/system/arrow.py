"""Arrow files of strangers: batches whose every offset, index and text was checked before a value is read.

A file is read, never mapped: one that is cut meanwhile, or points beyond its end, would end the process. Arrow's file
format is its stream format between two marks, so that both are read alike, message by message.
"""

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import ipc, types

from proximo.system.parquet import MAX_PAGES, TableLimits, refuse_rows, refuse_size, refuse_values

MARK = b"ARROW1\0\0"
"""First bytes of the file format."""
TEXTS = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
REFUSED = (types.is_union, types.is_run_end_encoded, types.is_list_view, types.is_large_list_view)
"""Types in which many values may share the same bytes, or that hold values of several types."""


def arrow_batches(file: BinaryIO, limits: TableLimits) -> Iterator[pa.RecordBatch]:
    """The batches of a file; ValueError, in one line, where it is damaged or exceeds the limits.

    Example: with open_file(path) as file: rows = [row for batch in arrow_batches(file, limits) for row in batch]
    """
    try:
        start = len(MARK) if file.read(len(MARK)) == MARK else 0
        _check_messages(file, start, limits.size)
        file.seek(start)
        reader = ipc.open_stream(file)
        for field in reader.schema:
            _check_type(field.name, field.type)
        rows = values = size = 0
        for batch in reader:
            batch.validate(full=True)
            rows += batch.num_rows
            refuse_rows(rows, limits.rows)
            for column in batch.columns:
                more_values, more = weight(column)
                values, size = values + more_values, size + more
            refuse_values(values, limits.values)
            refuse_size(size, limits.size)
            yield batch
    except (pa.ArrowException, OSError, MemoryError, OverflowError, struct.error) as error:
        raise ValueError(f"not Arrow: {str(error).strip().partition(chr(10))[0][:300]}") from error


def _check_type(name: str, kind: pa.DataType) -> None:
    if any(is_refused(kind) for is_refused in REFUSED):
        raise ValueError(f"its column {name[:100]!r} is of type {str(kind)[:100]}, which is not read: save it as plain")
    if isinstance(kind, pa.BaseExtensionType):
        _check_type(name, kind.storage_type)
    elif types.is_dictionary(kind):
        if kind.value_type.num_fields:
            raise ValueError(f"its column {name[:100]!r} has numbers of lists or structs: save it as plain")
    else:
        for number in range(kind.num_fields):
            _check_type(name, kind.field(number).type)


def weight(array: Any) -> tuple[int, int]:
    """Number of an array's values, those in lists counted one by one, and their bytes: a text that many rows share
    counts for each."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return weight(array.storage)
    if types.is_dictionary(kind):
        return len(array), _shared_size(array)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return len(array), _viewed_size(array)
    inner: list[Any] = []
    if types.is_struct(kind):
        inner = [array.field(number) for number in range(kind.num_fields)]
    elif types.is_map(kind):
        inner = [array.keys, array.items]
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = [array.values]
    else:
        return len(array), array.nbytes
    weights = [weight(array_inside) for array_inside in inner]
    return len(array) + sum(count for count, _ in weights), sum(size for _, size in weights)


def _shared_size(array: Any) -> int:
    numbers, values = array.indices.drop_null().to_numpy(), array.dictionary
    if types.is_string_view(values.type) or types.is_binary_view(values.type):
        lengths = _viewed_lengths(values)
    elif any(is_text(values.type) for is_text in TEXTS):
        lengths = pc.binary_length(values).fill_null(0).to_numpy(zero_copy_only=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        return len(array) * 16
    return int(lengths[numbers].sum(dtype=np.int64)) if len(numbers) else 0


def _viewed_size(array: Any) -> int:
    return int(_viewed_lengths(array).sum(dtype=np.int64))


def _viewed_lengths(array: Any) -> np.ndarray:
    """Lengths of texts that are views: the first of the four numbers of each."""
    views = array.buffers()[1]
    if views is None:
        return np.zeros(len(array), dtype=np.int32)
    return np.frombuffer(views, dtype=np.int32).reshape(-1, 4)[array.offset : array.offset + len(array), 0]


# Messages


def _check_messages(file: BinaryIO, start: int, limit: int) -> None:
    """Refuse batches that unpack to more than the limit: each packed part begins with its size."""
    file.seek(start)
    size = count = 0
    reader = ipc.MessageReader.open_stream(file)
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return
        count += 1
        if count > MAX_PAGES:
            raise ValueError(f"it has more than {MAX_PAGES:,} batches: write it anew")
        if message.type in ("dictionary", "record batch") and message.body is not None:
            size += _unpacked(memoryview(message.metadata), memoryview(message.body), message.type == "dictionary")
            refuse_size(size, limit)


def _unpacked(metadata: memoryview, body: memoryview, is_dictionary: bool) -> int:
    """Bytes of a batch in memory. Its description is a FlatBuffers table, which Arrow has checked."""
    batch = _follow(metadata, _field(metadata, _follow(metadata, 0), 2))
    if is_dictionary:
        batch = _follow(metadata, _field(metadata, batch, 1))
    buffers = _field(metadata, batch, 2)
    if not _field(metadata, batch, 3) or not buffers:
        return len(body)
    vector, size = _follow(metadata, buffers), 0
    for number in range(struct.unpack_from("<I", metadata, vector)[0]):
        offset, length = struct.unpack_from("<qq", metadata, vector + 4 + 16 * number)
        unpacked = struct.unpack_from("<q", body, offset)[0] if length >= 8 and 0 <= offset <= len(body) - 8 else 0
        size += max(unpacked, length, 0)
    return size


def _field(data: memoryview, table: int, number: int) -> int:
    """Offset of a field of a table; 0 if it is absent."""
    slots = table - struct.unpack_from("<i", data, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", data, slots)[0]:
        return 0
    offset = struct.unpack_from("<H", data, slots + 4 + 2 * number)[0]
    return table + offset if offset else 0


def _follow(data: memoryview, offset: int) -> int:
    return offset + struct.unpack_from("<I", data, offset)[0]
