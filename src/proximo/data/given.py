"""Rows given in Python: a list of dictionaries, a Hugging Face Dataset or an Arrow table, kept as a file."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def rows_of(given: Any) -> list[Mapping[str, Any]]:
    """The rows; ValueError, in a line, for anything else."""
    if isinstance(given, Mapping):
        splits = " or ".join(f"data[{name!r}]" for name in given)
        raise ValueError(f"data is a {type(given).__name__} with {', '.join(map(str, given))}: give one, {splits}")
    for method in ("to_list", "to_pylist"):  # a Dataset's, and an Arrow table's
        if callable(getattr(given, method, None)):
            given = getattr(given, method)()
    if not isinstance(given, Sequence) or not all(isinstance(row, Mapping) for row in given):
        raise ValueError(
            f"data is a {type(given).__name__}: give a path, a hub id, a list of dictionaries or a Dataset"
        )
    if not given:
        raise ValueError("data has no rows")
    return list(given)


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
    if isinstance(given, list | tuple) and all(isinstance(each, str | Path) for each in given):
        return [str(each) for each in given]
    return [keep_rows(rows_of(given), keep_in)]
