"""Files of rows: JSONL, JSON, Parquet, CSV, TSV and Arrow, each as (place, values) pairs."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

Placed = tuple[str, Any]
"""File and row, for messages, and the row's values."""


class Noting(Protocol):
    def add(self, place: str, what: str) -> None:
        """Note a row that cannot be read."""
        ...


def read_file(path: str, mistakes: Noting) -> list[Placed]:
    """All rows of a file, whatever they hold; OSError says why a file cannot be read, `mistakes` which rows."""
    match Path(path).suffix:
        case ".jsonl":
            return list(_lines(path, _text(path), mistakes))
        case ".json":
            return _json(path, mistakes)
        case ".csv" | ".tsv":
            return _csv(path, mistakes)
        case ".parquet":
            return _numbered(path, _parquet(path))
        case ".arrow":
            return _numbered(path, _arrow(path))
        case suffix:
            raise OSError(f"{suffix or 'no suffix'} is not a known format, use {', '.join(FORMATS)}")


FORMATS = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow")
SEPARATORS = (",", ";", "\t")
"""What may separate the values of a table that is text."""


def _text(path: str) -> bytes:
    data = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise OSError("it is UTF-16: save it as UTF-8")
    return data


def _lines(path: str, data: bytes, mistakes: Noting) -> Iterator[Placed]:
    # Split at line feeds only: a JSON string may contain other line separators unescaped.
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line.decode())
            except UnicodeDecodeError as error:
                mistakes.add(f"{path}:{number}", f"not UTF-8, {error.reason} at byte {error.start}")
            except json.JSONDecodeError as error:
                mistakes.add(f"{path}:{number}", f"not JSON, {error.msg} at column {error.colno}")
            except (ValueError, RecursionError) as error:
                mistakes.add(f"{path}:{number}", f"not JSON, {error}")


def _json(path: str, mistakes: Noting) -> list[Placed]:
    """A list of objects; many files of this name are JSONL, and are read as such."""
    data = _text(path)
    try:
        found = json.loads(data.decode())
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # a second document follows the first
            return list(_lines(path, data, mistakes))
        raise OSError(f"not JSON, {error.msg} in line {error.lineno}, column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise OSError(f"not JSON, {error}") from error
    return _numbered(path, found if isinstance(found, list) else [found])


def _csv(path: str, mistakes: Noting) -> list[Placed]:
    """The first line names the columns and shows what separates them; all values are text, and an empty one is
    None."""
    try:
        text = _text(path).decode()
        # Without translated line ends, which a quoted text may hold.
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=_separator(path, text), strict=True)
        columns = next(lines, [])
        if len(set(columns)) < len(columns):
            raise OSError(f"it has two columns with one name, of {', '.join(columns)}: rename one")
        rows = []
        for number, values in enumerate(lines, start=1):
            if len(values) == len(columns):
                rows.append((f"{path}, row {number}", {n: v or None for n, v in zip(columns, values, strict=True)}))
            elif values:
                mistakes.add(f"{path}, row {number}", f"{len(values)} values for {len(columns)} columns")
    except (UnicodeDecodeError, csv.Error) as error:
        raise OSError(f"not CSV in UTF-8, {error}") from error
    return rows


def _separator(path: str, text: str) -> str:
    """A tab in a .tsv file; else the first separator that gives the header line more than one column."""
    if Path(path).suffix == ".tsv":
        return "\t"
    header = text.partition("\n")[0].removesuffix("\r")
    return next((each for each in SEPARATORS if len(next(csv.reader([header], delimiter=each), [])) > 1), ",")


def _parquet(path: str) -> list[Any]:
    # Imported late, because only these formats need it.
    from pyarrow import ArrowException, parquet

    try:
        return parquet.ParquetFile(path).read().to_pylist()
    except ArrowException as error:
        raise OSError(f"not Parquet: {error}") from error


def _arrow(path: str) -> list[Any]:
    """Arrow's file format, or its stream format, which Hugging Face's `save_to_disk` writes."""
    from pyarrow import ArrowException, ArrowInvalid, ipc, memory_map

    try:
        with memory_map(path) as source:
            try:
                return ipc.open_file(source).read_all().to_pylist()
            except ArrowInvalid:
                source.seek(0)
                return ipc.open_stream(source).read_all().to_pylist()
    except ArrowException as error:
        raise OSError(f"not Arrow: {error}") from error


def _numbered(path: str, rows: list[Any]) -> list[Placed]:
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]
