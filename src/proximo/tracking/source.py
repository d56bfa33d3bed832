"""What is new in a run folder for a tracker, read without torch."""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proximo.redacting import masked
from proximo.storage.locks import NAME as LOCK
from proximo.storage.locks import is_held
from proximo.storage.opening import UnsafeFile, json_value, read_file
from proximo.tracking.position import Position
from proximo.tracking.rows import Row, new_rows, step_of
from proximo.tracking.tables import completion_rows
from proximo.tracking.tracker import Completion, TrackedRun, Tracker
from proximo.training.runfolder.files import EVENTS, METRICS, RESULT, ROLLOUTS, TIMINGS, TRACKING, stored_steps

SYSTEM = f"{TRACKING}/system.jsonl"
"""Readings of the machine; see readings.py."""
FACTS = ("algorithm", "version", "source", "python", "torch", "transformers", "processor", "argv", "parameters")
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


class Source:
    """Reads a run folder at any time.

    Example: items = list(Source(Path("runs/a")).items(Position(), is_over=True))
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

    def about(self, place: Path) -> TrackedRun:
        text = _read(self.run / "config.toml").decode("utf-8-sig", errors="replace")
        record = self._json("run.json")
        facts = {name: record[name] for name in FACTS if record.get(name) is not None}
        folder = self.run.resolve()
        return TrackedRun(folder.name, folder, place.resolve(), tomllib.loads(masked(text)), facts)

    def summary(self) -> dict[str, float]:
        """Numbers of result.json, those of evaluations as "before/accuracy" and "after/accuracy", or "best/loss"."""
        result = self._json(RESULT)
        parts = {name: result[name] for name in ("before", "after", "best") if isinstance(result.get(name), dict)}
        found = {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}
        return numbers(result | found)

    def items(self, position: Position, *, is_over: bool) -> Iterator[tuple[Item | None, Position]]:
        """Everything new, each with the position behind it; None where there is nothing to send before it."""
        for each in (self._metrics, self._timings, self._events, self._system, self._completions):
            for item, after in each(position, is_over):
                position = after
                yield item, position

    def _metrics(self, position: Position, is_over: bool) -> Iterator[tuple[Item | None, Position]]:
        origins = self._origins()
        later = origins[position.attempts :] or [0]
        place = position.place(METRICS)
        for row, behind in new_rows(self.run / METRICS, place, is_over=is_over, resumed_after=lambda: min(later)):
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
        place = position.place(name)
        for row, behind in new_rows(self.run / name, place, is_over=is_over, resumed_after=lambda: 0):
            if row is not None:
                position = position.at(name, behind)
                yield row, position, place.step
            place = behind

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
        """For each attempt at the run the step it continued after; 0 if it began anew."""
        attempts = self._json("run.json").get("attempts")
        names = [each.get("from") for each in attempts if isinstance(each, dict)] if isinstance(attempts, list) else []
        found = [re.fullmatch(r"step-(\d+)", name) if isinstance(name, str) else None for name in names]
        return [int(match[1]) if match else 0 for match in found]

    def _json(self, name: str) -> dict[str, Any]:
        try:
            found = json_value(_read(self.run / name))
        except UnsafeFile:
            raise
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


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
