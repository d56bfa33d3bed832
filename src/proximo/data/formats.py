"""Files of rows: JSONL, JSON, Parquet, CSV, TSV and Arrow, each as (location, values) pairs.

A file may come from a stranger: its rows, and what they take in memory, are bounded before they are made.
"""

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TextIO

from proximo.system.opening import open_file, without_links

LocatedValue = tuple[str, Any]
"""File and row, for messages, and the row's values."""


class Noting(Protocol):
    def add(self, location: str, what: str) -> None:
        """Note a row that cannot be read."""
        ...


FORMATS = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow")
SEPARATORS = (",", ";", "\t")
"""Separators of values in a table that is text."""
MAX_ROWS = 5_000_000
"""Rows of a file; each is kept in memory, with about a thousand bytes."""
MORE = "give a part of them, or save them as Parquet, of which `train` reads more"
"""Remedy for too many rows of text."""
MAX_VALUES = 1 << 26
"""Values of a file, those in lists counted one by one."""
MAX_BYTES = 4 << 30
"""Bytes of a file's values, or of a file of text."""
MAX_ROW = 64 << 20
"""Bytes of a row of text. The tests of one programming problem have some megabytes."""
MAX_JSON = 1 << 30
"""Bytes of a .json file, which is read at once."""
PIECE = 16 << 20
"""Bytes of JSON in which strings are told from the rest at once."""
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""Pattern of what may be half of a surrogate pair, as JSON can spell it."""


def read_file(path: str, mistakes: Noting) -> list[LocatedValue]:
    """All rows of a file, whatever they hold; OSError says why a file cannot be read, `mistakes` which rows."""
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".arrow": _arrow}
    suffix = Path(path).suffix
    if suffix not in readers:
        raise OSError(f"{suffix or 'no suffix'} is not a known format, use {', '.join(FORMATS)}")
    with open_file(without_links(path)) as file:
        if (size := file.seek(0, io.SEEK_END)) > MAX_BYTES:
            raise OSError(
                f"it has {size >> 20:,} MiB, more than the {MAX_BYTES >> 20:,} MiB that are read: give a part"
            )
        file.seek(0)
        return readers[suffix](path, file, mistakes)


def read_beginning(path: str, size: int) -> list[LocatedValue]:
    """Rows of the first bytes of a larger .jsonl file, without those that cannot be read; none of any other file."""
    if Path(path).suffix != ".jsonl":
        return []
    with open_file(without_links(path)) as file:
        beginning = file.read(size)
        is_whole = not file.read(1)
    return [] if is_whole else _jsonl(path, io.BytesIO(beginning[: beginning.rfind(b"\n") + 1]), Unnoted())


class Unnoted:
    """Mistakes that are noted when the whole file is read."""

    def add(self, location: str, what: str) -> None:
        pass


# Text


def _jsonl(path: str, file: BinaryIO, mistakes: Noting) -> list[LocatedValue]:
    """Read one row to a line. Lines end at line feeds only: a JSON string may contain other separators unescaped."""
    rows: list[LocatedValue] = []
    hints = 0
    for number, line in enumerate(_lines(file), start=1):
        if (hints := hints + _hints(line)) > MAX_VALUES:
            _refuse_values(_held([value for _, value in rows]))
            hints = _hints(line)
        location = f"{path}:{number}"
        if len(line) > MAX_ROW:
            mistakes.add(location, f"more than {MAX_ROW >> 20} MiB in one line: shorten it")
        elif line.strip():
            try:
                rows.append((location, _value(line)))
            except UnicodeDecodeError as error:
                mistakes.add(location, f"not UTF-8, {error.reason} at byte {error.start}: save the file as UTF-8")
            except json.JSONDecodeError as error:
                mistakes.add(location, f"not JSON, {error.msg} at column {error.colno}: write one object to a line")
            except (ValueError, RecursionError) as error:
                mistakes.add(location, f"not JSON, {error}")
        if number > MAX_ROWS:
            raise OSError(f"it has more than {MAX_ROWS:,} lines: {MORE}")
    return rows


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of a file in UTF-8; of one that is too long, its beginning."""
    _check_marks(file)
    while line := file.readline(MAX_ROW + 1):
        yield line
        while not line.endswith(b"\n") and len(line) > MAX_ROW:
            line = file.readline(MAX_ROW + 1)


def _hints(text: bytes) -> int:
    """Maximum values that JSON makes of a text: `[],` takes three bytes, eighty in memory. Those in strings count."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _values_of(text: bytes) -> int:
    """Maximum values likewise, without what is in strings."""
    from numpy import bitwise_xor, count_nonzero, frombuffer, uint8

    count, is_inside = 0, uint8(0)
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
    for start in range(0, len(plain), PIECE):
        piece = frombuffer(plain, uint8, min(PIECE, len(plain) - start), start)
        inside = bitwise_xor.accumulate((piece == ord('"')).view(uint8)) ^ is_inside
        is_inside = inside[-1]
        count += sum(int(count_nonzero((piece == mark) & (inside == 0))) for mark in b",[{")
    return count


def _held(values: list[Any]) -> int:
    """Number of values in lists and objects."""
    count = 0
    while values:
        value = values.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        count += len(inner)
        values.extend(item for item in inner if isinstance(item, dict | list))
    return count


def _refuse_values(count: int) -> None:
    if count > MAX_VALUES:
        raise OSError(f"it has more than the {MAX_VALUES:,} values that are read: give fewer rows or columns")


def _check_marks(file: BinaryIO) -> None:
    """Pass over the mark that some programs put before UTF-8."""
    first = file.read(3)
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise OSError("it is UTF-16: save it as UTF-8")
    if first != b"\xef\xbb\xbf":
        file.seek(0)


def _value(text: bytes) -> Any:
    """A value of JSON in which every text can be encoded: half of a surrogate pair is none, and no tokenizer takes
    it."""
    value = json.loads(text.decode())
    if _HALF.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"a text has half of a surrogate pair, {ascii(half)[1:-1]}: remove it") from None
    return value


def _json(path: str, file: BinaryIO, mistakes: Noting) -> list[LocatedValue]:
    """A list of objects; many files of this name are JSONL, and are read as such."""
    _check_marks(file)
    start = file.tell()
    if file.seek(0, io.SEEK_END) > MAX_JSON:
        file.seek(start)
        if file.read(1) == b"[":
            raise OSError(f"it has more than {MAX_JSON >> 20:,} MiB of JSON: save it as JSONL, an object to a line")
        file.seek(start)
        return _jsonl(path, file, mistakes)
    file.seek(start)
    text = file.read(MAX_JSON)
    if _hints(text) > MAX_VALUES:
        _refuse_values(_values_of(text))
    try:
        value = _value(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # a second document follows the first
            file.seek(start)
            return _jsonl(path, file, mistakes)
        raise OSError(f"not JSON, {error.msg} in line {error.lineno}, column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise OSError(f"not JSON, {error}") from error
    rows = value if isinstance(value, list) else [value]
    if len(rows) > MAX_ROWS:
        raise OSError(f"it has {len(rows):,} rows, more than the {MAX_ROWS:,} that are read: {MORE}")
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]


def _csv(path: str, file: BinaryIO, mistakes: Noting) -> list[LocatedValue]:
    """The first line names the columns and shows what separates them; all values are text, and an empty one is
    None."""
    _check_marks(file)
    longest = csv.field_size_limit(MAX_ROW)
    # Without translated line ends, which a quoted text may hold.
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    try:
        separator = _separator(path, text.readline(MAX_ROW))
        text.seek(0)
        lines = csv.reader(_text_lines(text), delimiter=separator, strict=True)
        columns = next(lines, [])
        if len(set(columns)) < len(columns):
            raise OSError(f"it has two columns with one name, of {', '.join(columns)}: rename one")
        rows, count, before = [], 0, lines.line_num
        for number, values in enumerate(lines, start=1):
            # Where the row begins: quoted values may have several lines.
            location, before = f"{path}, line {before + 1}", lines.line_num
            count += len(values)
            if len(values) == len(columns):
                rows.append((location, {n: v or None for n, v in zip(columns, values, strict=True)}))
            elif values:
                what = f"{len(values)} values for {len(columns)} columns: put quotes around values with a separator"
                mistakes.add(location, what)
            if number > MAX_ROWS:
                raise OSError(f"it has more than {MAX_ROWS:,} rows: {MORE}")
            _refuse_values(count)
    except (UnicodeDecodeError, csv.Error) as error:
        raise OSError(f"not CSV in UTF-8, {error}") from error
    finally:
        csv.field_size_limit(longest)
        text.detach()
    return rows


def _text_lines(text: TextIO) -> Iterator[str]:
    """Lines of a table, none of them without an end."""
    while line := text.readline(MAX_ROW + 1):
        if len(line) > MAX_ROW:
            raise OSError(f"it has more than {MAX_ROW >> 20} MiB in one line: shorten it")
        yield line


def _separator(path: str, header: str) -> str:
    """A tab in a .tsv file; else the first separator that gives the header line more than one column."""
    if Path(path).suffix == ".tsv":
        return "\t"
    header = header.rstrip("\r\n")
    return next(
        (separator for separator in SEPARATORS if len(next(csv.reader([header], delimiter=separator), [])) > 1), ","
    )


# Tables


def _parquet(path: str, file: BinaryIO, mistakes: Noting) -> list[LocatedValue]:
    # Imported late, because only these formats need it.
    from proximo.system.parquet import open_parquet

    try:
        return _numbered(path, open_parquet(file, _limits()).iter_batches(use_threads=False))
    except ValueError as error:
        raise OSError(str(error)) from error


def _arrow(path: str, file: BinaryIO, mistakes: Noting) -> list[LocatedValue]:
    """Arrow's file format, or its stream format, which Hugging Face's `save_to_disk` writes."""
    from proximo.system.arrow import arrow_batches

    try:
        return _numbered(path, arrow_batches(file, _limits()))
    except ValueError as error:
        raise OSError(str(error)) from error


def _limits() -> Any:
    from proximo.system.parquet import TableLimits

    return TableLimits(MAX_ROWS, MAX_VALUES, MAX_BYTES)


def _numbered(path: str, batches: Any) -> list[LocatedValue]:
    """The rows of all batches."""
    from pyarrow import ArrowException

    rows: list[LocatedValue] = []
    try:
        for batch in batches:
            batch.validate(full=True)
            names = batch.schema.names
            columns = [column_values(name, column) for name, column in zip(names, batch.columns, strict=True)]
            lists = zip(*columns, strict=True) if columns else iter([()] * batch.num_rows)
            rows += (
                (f"{path}, row {n}", dict(zip(names, row, strict=True))) for n, row in enumerate(lists, len(rows) + 1)
            )
    except (ArrowException, MemoryError) as error:
        raise OSError(f"it is damaged: {str(error).partition(chr(10))[0][:300]}") from error
    return rows


def column_values(name: str, column: Any) -> list[Any]:
    """A column's values; one that is numbers of a few values makes each of these once."""
    try:
        if not hasattr(column, "dictionary"):
            return column.to_pylist()
        known = column.dictionary.to_pylist()
        return [None if number is None else known[number] for number in column.indices.to_pylist()]
    except (ValueError, OverflowError, LookupError, TypeError) as error:  # a date that Python does not have, and such
        reason = str(error).partition("\n")[0][:200]
        raise OSError(
            f"its column {name[:100]!r}, of type {str(column.type)[:100]}, cannot be read: {reason}"
        ) from error
