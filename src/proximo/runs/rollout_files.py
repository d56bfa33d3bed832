"""Reading a step's rollouts: a file that may come from a stranger, bounded by what its pages really hold.

What is honest takes room on disk, since no two log-probs are equal; a small file that holds very much was made to.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from proximo.system.opening import open_file
from proximo.system.parquet import TableLimits, open_parquet

MAX_FILE = 4 << 30
"""Maximum size of a rollout file."""
FREE = TableLimits(rows=1 << 14, values=1 << 26, size=1 << 30)
"""Limits of a file of any size: 512 completions of 4,096 tokens have a tenth of a billion bytes, and fewer values than
this."""
BYTES_PER_ROW, VALUES_PER_BYTE, UNPACKED = 32, 16, 64
"""Limits of a larger file: a row for each 32 of its bytes, 16 values and 64 bytes of values for each. Real ones
have a tenth of that."""


def opened(file: BinaryIO, **options: Any) -> pq.ParquetFile:
    """The file as pyarrow reads it; ValueError, in one line, if it holds more than a step does. `options` are those of
    pyarrow's ParquetFile."""
    size = os.fstat(file.fileno()).st_size
    if size > MAX_FILE:
        raise ValueError(f"it has {size >> 20:,} MiB, more than the {MAX_FILE >> 20:,} MiB that are read at once")
    limits = TableLimits(
        rows=max(FREE.rows, size // BYTES_PER_ROW),
        values=max(FREE.values, size * VALUES_PER_BYTE),
        size=max(FREE.size, size * UNPACKED),
    )
    return open_parquet(file, limits, **options)


@contextmanager
def rollouts(path: Path) -> Iterator[pq.ParquetFile]:
    """A step's file, opened to read some of it."""
    with open_file(path) as file:
        yield opened(file)


def read_columns(path: Path, names: Sequence[str] | None = None) -> pa.Table:
    """The columns of these names that a step's file has, checked whole; None: all. OSError or ValueError, in one line,
    if the file cannot be read.

    Example: read_columns(Path("runs/a/rollouts/step-000010.parquet"), ["text", "reward"]).to_pylist()
    """
    try:
        with rollouts(path) as stored:
            known = stored.schema_arrow.names
            table = stored.read([name for name in known if names is None or name in names], use_threads=False)
            table.validate(full=True)
            return table
    except (pa.ArrowException, MemoryError) as error:
        raise ValueError(f"{path} is damaged: {str(error).partition(chr(10))[0][:200]}") from error
