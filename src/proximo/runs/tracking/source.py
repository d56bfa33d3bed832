"""New rows of a run folder for a tracker, read without torch, and how far the tracker has got."""

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from proximo.runs.files import EVENTS, METRICS, RESULT, ROLLOUTS, TIMINGS, TRACKING, stored_steps
from proximo.runs.tracking.tracker import Completion, TrackedRun, Tracker
from proximo.system.folders import write_file
from proximo.system.lines import to_row, whole_lines
from proximo.system.locks import NAME as LOCK
from proximo.system.locks import is_held
from proximo.system.opening import UnsafeFile, json_value, open_file, read_file, read_json
from proximo.system.secrets import masked

NAME = "sent.json"
"""The file of a position, in the tracker's folder."""


@dataclass(frozen=True)
class FileCursor:
    """The end of the last row that was sent from a .jsonl file, and what that row looked like: a resumed run cuts
    files back and writes the same rows again, or others if its settings were changed."""

    offset: int = 0
    length: int = 0
    """Bytes of the last row."""
    digest: str = ""
    """SHA-256 of the last row."""
    step: int = -1
    """Highest step sent."""


@dataclass(frozen=True)
class Position:
    """Position of a tracker: all that a later process needs to continue."""

    key: str | None = None
    """Name that the tracker gave to the run; None: never opened."""
    attempts: int = 0
    """Attempts at the run when this was stored."""
    places: Mapping[str, FileCursor] = field(default_factory=dict)
    completions: int = -1
    """Highest step whose completions were sent."""
    is_closed: bool = False
    """True once the end of a finished run was sent."""

    def cursor(self, name: str) -> FileCursor:
        return self.places.get(name, FileCursor())

    def at(self, name: str, cursor: FileCursor) -> "Position":
        return replace(self, places={**self.places, name: cursor})

    def save(self, folder: Path) -> None:
        write_file(folder / NAME, (json.dumps(asdict(self)) + "\n").encode())


def read_position(folder: Path) -> Position:
    """The stored position; a new one where there is none. ValueError if it is damaged: sending everything again would
    double it."""
    path = folder / NAME
    try:
        data = read_json(path)
        places = {name: FileCursor(**cursor) for name, cursor in data.pop("places").items()}
        return Position(places=places, **data)
    except FileNotFoundError:
        return Position()
    except UnsafeFile:
        raise
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is damaged: remove its folder to send everything again, as a new run") from None


# Rows

Row = dict[str, Any]


def new_rows(
    path: Path, cursor: FileCursor, *, is_over: bool, resumed_after: Callable[[], int]
) -> Iterator[tuple[Row | None, FileCursor]]:
    """Rows after a cursor, each with the cursor behind it. None: what was sent before has been replaced by other rows,
    which follow.

    A file that has become shorter belongs to a resumed run, which writes the same rows again: until it has passed the
    cursor nothing is new. If it then has other rows there, those after step `resumed_after()` follow.
    """
    try:
        file = open_file(path)
    except UnsafeFile:
        raise
    except OSError:
        return
    with file:
        if file.seek(0, 2) < cursor.offset and not is_over:
            return
        if cursor.offset and not _is_there(file, cursor):
            cursor = _first_after(file, resumed_after())
            yield None, cursor
        file.seek(cursor.offset)
        for line in whole_lines(file):
            row = to_row(line)
            cursor = _behind(cursor, file.tell(), line or b"", row)
            if row is not None:
                yield row, cursor


def _is_there(file: BinaryIO, cursor: FileCursor) -> bool:
    """True if the last row that was sent is still where it was."""
    file.seek(cursor.offset - cursor.length)
    return hashlib.sha256(file.read(cursor.length)).hexdigest() == cursor.digest


def _first_after(file: BinaryIO, step: int) -> FileCursor:
    """The cursor before the first row of a later step."""
    file.seek(0)
    cursor = FileCursor()
    for line in whole_lines(file):
        row = to_row(line)
        if row is not None and step_of(row) > step:
            break
        cursor = _behind(cursor, file.tell(), line or b"", row)
    return cursor


def _behind(cursor: FileCursor, offset: int, line: bytes, row: Row | None) -> FileCursor:
    step = cursor.step if row is None else max(cursor.step, step_of(row))
    return replace(cursor, offset=offset, length=len(line), digest=hashlib.sha256(line).hexdigest(), step=step)


def step_of(row: Row) -> int:
    step = row.get("step")
    return step if isinstance(step, int) else 0


SYSTEM = f"{TRACKING}/system.jsonl"
"""Readings of the machine; see readings.py."""
RECORD_KEYS = ("algorithm", "version", "source", "python", "torch", "transformers", "processor", "argv", "parameters")
"""Keys of run.json that trackers get."""


@dataclass(frozen=True)
class Metrics:
    step: int
    values: Mapping[str, float]

    def give(self, tracker: Tracker) -> None:
        if self.values:
            tracker.metrics(self.step, self.values)


@dataclass(frozen=True)
class Event:
    step: int
    severity: str
    text: str

    def give(self, tracker: Tracker) -> None:
        tracker.event(self.step, self.severity, self.text)


@dataclass(frozen=True)
class Completions:
    step: int
    rows: Sequence[Completion]

    def give(self, tracker: Tracker) -> None:
        tracker.completions(self.step, self.rows)


Item = Metrics | Event | Completions


class RunSource:
    """Reads a run folder at any time.

    Example: items = list(RunSource(Path("runs/a")).items(Position(), is_over=True))
    """

    def __init__(self, run: Path) -> None:
        self.run = run

    @property
    def is_run(self) -> bool:
        return (self.run / "run.json").is_file()

    @property
    def is_finished(self) -> bool:
        return (self.run / RESULT).is_file()

    @property
    def is_running(self) -> bool:
        return not self.is_finished and is_held(self.run / LOCK)

    def about(self, tracker_folder: Path) -> TrackedRun:
        text = _read(self.run / "config.toml").decode("utf-8-sig", errors="replace")
        record = self._json("run.json")
        details = {name: record[name] for name in RECORD_KEYS if record.get(name) is not None}
        folder = self.run.resolve()
        return TrackedRun(folder.name, folder, tracker_folder.resolve(), tomllib.loads(masked(text)), details)

    def summary(self) -> dict[str, float]:
        """Numbers of result.json, those of evaluations as "before/accuracy" and "after/accuracy", or "best/loss"."""
        result = self._json(RESULT)
        parts = {name: result[name] for name in ("before", "after", "best") if isinstance(result.get(name), dict)}
        flat = {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}
        return numbers(result | flat)

    def items(self, position: Position, *, is_over: bool) -> Iterator[tuple[Item | None, Position]]:
        """New items, each with the position behind it; None where there is nothing to send before it."""
        for each in (self._metrics, self._timings, self._events, self._system, self._completions):
            for item, after in each(position, is_over):
                position = after
                yield item, position

    def _metrics(self, position: Position, is_over: bool) -> Iterator[tuple[Item | None, Position]]:
        origins = self._origins()
        later = origins[position.attempts :] or [0]
        cursor = position.cursor(METRICS)
        for row, behind in new_rows(self.run / METRICS, cursor, is_over=is_over, resumed_after=lambda: min(later)):
            # A new row shows that the file has what was sent before, so later attempts have been dealt with.
            position = replace(position.at(METRICS, behind), attempts=len(origins))
            if row is None:
                position = replace(position, completions=min(position.completions, min(later)))
                text = f"resumed after step {min(later)} with other numbers than before: later steps follow again"
                yield Event(min(later), "warning", text), position
            else:
                yield Metrics(step_of(row), numbers(row)), position

    def _timings(self, position: Position, is_over: bool) -> Iterator[tuple[Item | None, Position]]:
        """Seconds of each phase. Steps that a resumed run did again are left out: the first attempt's are sent."""
        for row, after, seen in self._appended(TIMINGS, position, is_over):
            values = {f"seconds/{name}": value for name, value in numbers(row).items() if name != "tokens"}
            yield (None if step_of(row) <= seen else Metrics(step_of(row), values)), after

    def _events(self, position: Position, is_over: bool) -> Iterator[tuple[Item | None, Position]]:
        for row, after, _ in self._appended(EVENTS, position, is_over):
            name, remedy = row.get("rule") or row.get("kind"), row.get("remedy")
            text = f"{name}: {row.get('message')}" + (f". First: {remedy}" if remedy else "")
            yield Event(step_of(row), str(row.get("severity") or "info"), masked(text)), after

    def _system(self, position: Position, is_over: bool) -> Iterator[tuple[Item | None, Position]]:
        for row, after, _ in self._appended(SYSTEM, position, is_over):
            yield Metrics(step_of(row), {f"system/{name}": value for name, value in numbers(row).items()}), after

    def _appended(self, name: str, position: Position, is_over: bool) -> Iterator[tuple[Row, Position, int]]:
        """New rows of a file that is never cut back, each with the position behind it and the highest step before."""
        cursor = position.cursor(name)
        for row, behind in new_rows(self.run / name, cursor, is_over=is_over, resumed_after=lambda: 0):
            if row is not None:
                position = position.at(name, behind)
                yield row, position, cursor.step
            cursor = behind

    def _completions(self, position: Position, is_over: bool) -> Iterator[tuple[Item | None, Position]]:
        for step in stored_steps(self.run):
            if step > position.completions:
                position = replace(position, completions=step)
                try:
                    rows = completion_rows(self.run / ROLLOUTS / f"step-{step:06d}.parquet")
                except FileNotFoundError:  # removed by a resume in between; it is written again
                    return
                except (OSError, ValueError) as error:
                    yield Event(step, "warning", f"completions of step {step} cannot be read: {error}"), position
                else:
                    yield Completions(step, rows), position

    def _origins(self) -> list[int]:
        """Step that each attempt at the run continued after; 0 if it began anew."""
        attempts = self._json("run.json").get("attempts")
        names = [each.get("from") for each in attempts if isinstance(each, dict)] if isinstance(attempts, list) else []
        matches = [re.fullmatch(r"step-(\d+)", name) if isinstance(name, str) else None for name in names]
        return [int(match[1]) if match else 0 for match in matches]

    def _json(self, name: str) -> dict[str, Any]:
        try:
            value = json_value(_read(self.run / name))
        except UnsafeFile:
            raise
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row, without its step."""
    return {
        name: float(value)
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except FileNotFoundError:
        return b""


# Completions

MAX_ROWS, MAX_TEXT = 16, 2000
"""Maximum completions per step, and characters of each text."""
TEXTS, NUMBERS, FLAGS = ("prompt", "text", "answer", "state"), ("group", "outcome", "reward"), ("truncated",)


def completion_rows(path: Path) -> list[Completion]:
    """Completions spread evenly over the rows of a rollout file. OSError or ValueError if it cannot be read."""
    # Imported late: pyarrow is large, and the other files need none of it.
    import pyarrow.compute as pc

    from proximo.runs.rollout_files import read_columns

    table = read_columns(path, (*TEXTS, *NUMBERS, *FLAGS, "tokens"))
    known = table.column_names
    count = min(MAX_ROWS, table.num_rows)
    table = table.take([number * table.num_rows // count for number in range(count)])
    if "tokens" in known:
        lengths = pc.list_value_length(table.column("tokens"))  # pyright: ignore[reportAttributeAccessIssue]
        table = table.set_column(known.index("tokens"), "tokens", lengths)
    return [{name: _cell(value) for name, value in row.items()} for row in table.to_pylist()]


def _cell(value: object) -> str | float | None:
    """Text without secrets and of bounded length, or a number; None for what is not known."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, bool | int | float):
        return value
    text = masked(str(value))
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " …"
