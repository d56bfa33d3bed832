"""Rows of data files, and what is wrong with them."""

import gc
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from proximo.data.formats import read_beginning, read_file
from proximo.data.locating import data_files
from proximo.types import Message

Prompt = str | tuple[Message, ...]
"""Plain text, or a conversation for the chat template."""

_SHOWN = 20
"""Mistakes, or columns, listed in full in an error message."""
_ALIKE = 3
"""Rows named individually that share a mistake."""
_SORTED = 50_000
"""Mistakes that are looked at for that: a file of millions of bad rows takes no minute to be refused."""
MAX_TEXT = 16 << 20
"""Characters of a prompt or a completion: millions of tokens. A longer text takes gigabytes to be split into tokens."""


class Mistakes:
    """Collects what is wrong with a file, so that one error can report all of it.

    Example: mistakes.add("pairs.jsonl:7", "no column 'chosen'"); mistakes.refuse("data.path is 'pairs.jsonl':")
    """

    def __init__(self) -> None:
        self._mistakes: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return len(self._mistakes)

    def __iter__(self) -> Iterator[str]:
        """All mistakes in file order."""
        return (
            f"{location}: {what}"
            for location, what in sorted(self._mistakes, key=lambda mistake: _numbered(mistake[0]))
        )

    def __str__(self) -> str:
        """A mistake that many rows share (apart from its numbers) is printed once, with an example and a count."""
        shown = self._mistakes[:_SORTED]
        counts, reported, lines = Counter(map(_kind, shown)), set[str](), []
        for mistake in sorted(shown, key=lambda mistake: _numbered(mistake[0])):
            kind, line = _kind(mistake), ": ".join(mistake)
            if counts[kind] <= _ALIKE:
                lines.append(line)
            elif kind not in reported:
                lines.append(f"{line} (and {counts[kind] - 1} more rows like it)")
                reported.add(kind)
        unsorted = len(self._mistakes) - len(shown)
        more = [f"and {len(lines) + unsorted - _SHOWN} more"] if len(lines) > _SHOWN else []
        more += [f"and {unsorted} more"] if unsorted and not more else []
        return "\n".join([*lines[:_SHOWN], *more])

    def add(self, location: str, what: str) -> None:
        self._mistakes.append((location, what))

    @property
    def noted(self) -> list[tuple[str, str]]:
        """Location and mistake, in the order in which they were added."""
        return list(self._mistakes)

    def refuse(self, heading: str) -> None:
        """Raise a ValueError with all mistakes, if there are any."""
        if self._mistakes:
            raise ValueError(f"{heading}\n{self}")


def _kind(mistake: tuple[str, str]) -> str:
    """A mistake without its location and its numbers."""
    return re.sub(r"\d+", "#", mistake[1])


def _numbered(location: str) -> list[tuple[int, str]]:
    """Sorts line 9 before line 10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", location)]


@dataclass(frozen=True)
class Row:
    location: str
    """File and row, for messages: `pairs.jsonl:7`, `pairs.csv, line 7` or `pairs.parquet, row 7`."""
    values: Mapping[str, Any]
    """Values by column."""

    def __getitem__(self, column: str) -> Any:
        if column not in self.values:
            raise ValueError(f"no column {column!r}, only {', '.join(self.values) or 'an empty row'}")
        return self.values[column]

    def find(self, path: str) -> Any:
        """The value of a column, or of a field inside one, as in `reward_model.ground_truth`; None if absent."""
        if path in self.values:
            return self.values[path]
        value: Any = self.values
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def has(self, *columns: str) -> bool:
        """Tell whether all of these have a value; Parquet fills a column that only some rows have with None."""
        return all(self.values.get(column) is not None for column in columns)


@dataclass(frozen=True)
class DataFile:
    """A file of training data, one item per row."""

    path: str
    """A .jsonl, .json, .parquet, .csv, .tsv or .arrow file, a pattern like `train-*.parquet`, a folder or a hub id."""
    held_out: float | str = 0.1
    """Held-out data: a share of the prompts, chosen by hash, or the path of a separate file."""
    max_tokens: int = 2048
    """Maximum tokens of prompt and completion together."""
    too_long: Literal["leave_out", "cut", "cut_start"] | None = "leave_out"
    """Fate of a longer row: left out and counted, cut at its end, or cut at its start. None: it is a bad row."""
    skip_bad: bool = False
    """True to skip and count bad rows instead of refusing the file."""

    def __post_init__(self) -> None:
        check_share(self.held_out, "data.held_out")
        if self.max_tokens < 2:
            raise ValueError(f"data.max_tokens is {self.max_tokens}: give room for a prompt and a completion")


def check_share(held_out: float | str, field: str, *, may_be_all: bool = False) -> None:
    """Refuse a share that is none. `may_be_all`: whether data may be for evaluation only."""
    if isinstance(held_out, str) or 0 <= held_out < 1 or (may_be_all and held_out == 1):
        return
    raise ValueError(f"{field} is {held_out}: give a share from 0 up to 1, or a path")


def read_rows(path: str, mistakes: Mistakes, *, field: str = "data.path") -> list[Row]:
    """Read every row that is an object; `field` is the config field named in errors."""
    rows: list[Row] = []
    for file in data_files(path, field):
        with _no_collection():
            rows += _remembered(file, mistakes, field)
    return rows


def first_rows(path: str, size: int) -> list[Row]:
    """Rows in the first bytes of a larger .jsonl file, for what cannot wait for all of them; none of any other file."""
    return [Row(location, values) for location, values in read_beginning(path, size) if isinstance(values, Mapping)]


def forget_rows() -> None:
    """Forget the rows that were read last, once nothing reads them again."""
    _last.clear()


@dataclass(frozen=True)
class _FileRows:
    """Rows of a file, and what is wrong with others, as long as it has not changed."""

    stamp: tuple[int, ...]
    rows: list[Row]
    mistakes: list[tuple[str, str]]


_last: dict[str, _FileRows] = {}
"""The file that was read last: it is recognised first, then read for the defaults, then for the run."""
_SETTLED = 2.0
"""Seconds after which a change of a file shows in its time."""


def _remembered(file: str, mistakes: Mistakes, field: str) -> list[Row]:
    """Rows of a file, which is read once however often it is asked for."""
    stamp, known = file_state(file), _last.get(file)
    if known is None or stamp is None or known.stamp != stamp:
        wrong = Mistakes()
        _last.clear()
        known = _FileRows(stamp or (), list(_rows_of(file, wrong, field)), wrong.noted)
        if stamp is not None:
            _last[file] = known
    for location, what in known.mistakes:
        mistakes.add(location, what)
    return known.rows


def file_state(file: str) -> tuple[int, ...] | None:
    """The state of a file; None where it cannot be told from that of a moment ago."""
    try:
        now = os.stat(file)
    except OSError:
        return None
    if not stat.S_ISREG(now.st_mode) or time.time() - max(now.st_mtime, now.st_ctime) < _SETTLED:
        return None
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns


def _rows_of(file: str, mistakes: Mistakes, field: str) -> Iterator[Row]:
    try:
        rows = read_file(file, mistakes)
    except OSError as error:
        raise ValueError(f"{field} is {file!r}: it cannot be read, {error}") from error
    except MemoryError:
        raise ValueError(f"{field} is {file!r}: it cannot be read, there is not enough memory: give a part") from None
    for location, values in rows:
        if isinstance(values, Mapping):
            yield Row(location, values)
        else:
            mistakes.add(location, f"{shortened(values)} is not an object with columns: write one object to a line")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Stop looking for garbage: among millions of new rows, none of which is any, that takes half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def refuse_absent(rows: Sequence[Row], columns: Sequence[str], data: str, field: str) -> None:
    """Raise ValueError, in one line, if no row has a value in any of these columns; `field` is the config field that
    names them and `data` says where the rows are from."""
    if any(row.find(column) is not None for row in rows for column in columns):
        return
    named = f"the column {columns[0]!r}" if len(columns) == 1 else f"any of the columns {', '.join(columns)}"
    known = _columns(rows)
    shown = [*known[:_SHOWN], *([f"{len(known) - _SHOWN} more"] if len(known) > _SHOWN else [])]
    raise ValueError(
        f"{data}: no row has a value in {named}, only in {', '.join(shown) or 'none'}: choose with `{field}=NAME`"
    )


def _columns(rows: Sequence[Row]) -> list[str]:
    """Names of all columns with a value; those of a column's fields are given instead of its own, as `a.b`."""
    names: dict[str, None] = {}
    for row in rows:
        for name, value in row.values.items():
            if isinstance(value, Mapping):
                names |= dict.fromkeys(f"{name}.{inner}" for inner in value)
            elif value is not None:
                names[name] = None
    return list(names)


def read_prompt(value: Any, name: str = "the prompt") -> Prompt:
    """Read a text or a list of messages; `name` is its name in errors."""
    if is_text(value) and value:
        return _sound(value, name)
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        _sound("".join(message["content"] for message in value), name)
        # Parquet fills a key that only some messages have with None.
        return tuple({key: text for key, text in message.items() if text is not None} for message in value)
    raise ValueError(f"{name} is {shortened(value)}: give a text, or a list of messages with role and content")


def read_completion(value: Any, column: str) -> str:
    """Read a text, or a list with one assistant message; never empty."""
    if isinstance(value, list) and len(value) == 1 and _is_message(value[0]) and value[0]["role"] == "assistant":
        value = value[0]["content"]
    if not is_text(value):
        raise ValueError(f"{column} is {shortened(value)}: give a text, or a list of one message by the assistant")
    if not value.strip():
        raise ValueError(f"{column} is empty")
    return _sound(value, column)


def _sound(text: str, name: str) -> str:
    """Refuse a text that is too long for any model, and NUL characters: many programs end a text there, so what is
    graded would not be what was read."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"{name} has {len(text):,} characters, more than the {MAX_TEXT:,} that are read: shorten it")
    if "\0" in text:
        raise ValueError(f"{name} has a NUL character, its {text.index(chr(0)) + 1}th: remove it")
    return text


def is_text(value: Any) -> TypeGuard[str]:
    """Tell whether it is an encodable string: JSON can contain half a surrogate pair, which no tokenizer accepts."""
    if not isinstance(value, str):
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and is_text(message.get("role")) and is_text(message.get("content"))


def shortened(value: Any) -> str:
    """The beginning of a value as JSON, for messages; of a huge one no more than that is spelled out."""
    if isinstance(value, str | list):
        value = value[:60]
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that JSON does not have, as a Parquet file's map may
        text = str(type(value).__name__)
    return text if len(text) <= 60 else text[:57] + "..."
