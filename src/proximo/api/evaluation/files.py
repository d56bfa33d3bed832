"""A file with every completion of an evaluation: JSON Lines, JSON or Parquet, all readable as a table."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from proximo.system.folders import whole_file
from proximo.system.lines import to_line
from proximo.system.opening import replacing, without_links

SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("model", "problem", "prompt", "reference", "kind")),
        ("sample", pa.int64()),
        *((name, pa.string()) for name in ("completion", "answer")),
        *((name, pa.float64()) for name in ("outcome", "reward")),
        ("finish", pa.string()),
        ("tokens", pa.int64()),
    ]
)
"""Columns, with types that do not depend on the rows."""

Rows = Sequence[Mapping[str, Any]]


def check_file(path: Path) -> None:
    """Refuse a file that could not be written, before any model is loaded."""
    if path.suffix not in WRITERS:
        raise ValueError(f"out is {str(path)!r}: give a file that ends in {', '.join(WRITERS)}")
    if not path.parent.is_dir():
        raise ValueError(f"out is {str(path)!r}: there is no folder {path.parent}, make it first")


def write_rows(path: Path, rows: Rows) -> None:
    """Write all rows; the file is complete or as it was before."""
    with whole_file(without_links(path)) as unfinished, replacing(unfinished) as file:
        WRITERS[path.suffix](file, rows)


def _write_lines(file: BinaryIO, rows: Rows) -> None:
    file.writelines(map(to_line, rows))


def _write_json(file: BinaryIO, rows: Rows) -> None:
    file.write(json.dumps(list(rows), indent=1).encode())


def _write_parquet(file: BinaryIO, rows: Rows) -> None:
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], SCHEMA), file)


WRITERS: dict[str, Callable[[BinaryIO, Rows], None]] = {
    ".jsonl": _write_lines,
    ".json": _write_json,
    ".parquet": _write_parquet,
}
