"""Rows given in Python: a list of dictionaries, a dictionary of columns, a Hugging Face Dataset, an Arrow table or a
DataFrame, kept as a file."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

KEPT = Path("runs") / "data"
"""Folder for rows that were given in Python."""
MARK = "\ufeff"
"""Character before the first column of a CSV file that was read without `encoding="utf-8-sig"`; nobody sees it."""


def rows_of(given: Any) -> list[Mapping[str, Any]]:
    """The rows; ValueError, in a line, for anything else."""
    if isinstance(given, Mapping) and given and _has_columns(given):
        given = _of_columns(given)
    if isinstance(given, Mapping):
        splits = " or ".join(f"data[{name!r}]" for name in given)
        raise ValueError(f"data is a {type(given).__name__} with {', '.join(map(str, given))}: give one, {splits}")
    for method in ("to_list", "to_pylist", "to_dicts"):  # a Dataset's, an Arrow table's, a DataFrame's of polars
        if callable(getattr(given, method, None)):
            given = getattr(given, method)()
    if callable(getattr(given, "to_dict", None)) and hasattr(given, "columns"):  # a DataFrame's of pandas
        given = _of_columns(given.to_dict(orient="list"))
    elif hasattr(given, "__arrow_c_stream__"):
        given = pa.table(given).to_pylist()
    if not isinstance(given, Sequence) or not all(isinstance(row, Mapping) for row in given):
        raise ValueError(
            f"data is a {type(given).__name__}: give a path, a hub id, a list of dictionaries, a DataFrame or a Dataset"
        )
    if not given:
        raise ValueError("data has no rows")
    has_mark = any(isinstance(name, str) and name.startswith(MARK) for name in given[0])
    return [_unmarked(row) for row in given] if has_mark else list(given)


def _unmarked(row: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """A row whose columns are without the mark that some programs put before UTF-8."""
    return {name.removeprefix(MARK) if isinstance(name, str) else name: value for name, value in row.items()}


def _has_columns(given: Mapping[Any, Any]) -> bool:
    """Tell whether the values are columns: not single texts, and not splits, which are Datasets or lists of rows."""
    lists = all(hasattr(column, "tolist") or isinstance(column, list | tuple) for column in given.values())
    return lists and not all(not len(column) or isinstance(column[0], Mapping) for column in given.values())


def _of_columns(columns: Mapping[Any, Any]) -> list[Mapping[str, Any]]:
    """Rows of columns by name, all of one length; NaN, as DataFrames write where nothing is, is None."""
    lists = {str(name): column.tolist() if hasattr(column, "tolist") else column for name, column in columns.items()}
    lengths = {name: len(column) for name, column in lists.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"data has columns of different lengths: {counts}")
    return [
        {name: _plain(value) for name, value in zip(lists, row, strict=True)}
        for row in zip(*lists.values(), strict=True)
    ]


def _plain(value: Any) -> Any:
    """A cell of a DataFrame as JSON has it: a list in the place of an array, None where nothing is."""
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    is_none = (isinstance(value, float) and math.isnan(value)) or type(value).__name__ in ("NAType", "NaTType")
    return None if is_none else value


def keep_rows(rows: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Write the rows into a file that is named after them, so that a resume and later commands read the same; returns
    its path. What JSON has no word for becomes text."""
    text = "".join(json.dumps(row, default=str) + "\n" for row in rows)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(path)
    return str(path)


def paths_of(given: Any, keep_in: Path) -> list[str]:
    """Data as paths: rows that are given in Python are written to a file in `keep_in`."""
    if isinstance(given, str | Path):
        return [str(given)]
    if isinstance(given, list | tuple) and all(isinstance(path, str | Path) for path in given):
        return [str(path) for path in given]
    return [keep_rows(rows_of(given), keep_in)]
