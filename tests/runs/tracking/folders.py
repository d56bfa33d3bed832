"""Run folders and trackers made by hand."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from proximo.runs.files import EVENTS, METRICS, RESULT, ROLLOUTS, TIMINGS
from proximo.runs.tracking.tracker import Completion, TrackedRun

MINE = '''
import json
import os
import threading

class Mine:
    """Appends what it is sent to a file; as HANGS says, hangs instead."""

    def open(self, run, key):
        self.file = run.folder.parent / "mine.jsonl"
        if os.environ.get("TRACKER_HANGS"):
            threading.Event().wait()
        return key or "first"

    def write(self, *row):
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\\n")

    def metrics(self, step, values):
        self.write("metrics", step, values)

    def event(self, step, severity, text):
        self.write("event", step, severity, text)

    def completions(self, step, rows):
        self.write("completions", step, rows)

    def flush(self):
        pass

    def close(self, summary, finished):
        self.write("close", summary, finished)
'''
"""A tracker of a user's own."""


class Remembering:
    """Remembers what it is sent, for all objects of a class."""

    calls: ClassVar[list[tuple]] = []
    fails_after: ClassVar[int | None] = None
    """Rows of metrics after which it fails."""
    fails_to_flush: ClassVar[bool] = False

    def open(self, run: TrackedRun, key: str | None) -> str:
        self.calls.append(("open", run.name, key))
        return key or "first"

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        done = len([each for each in self.calls if each[0] == "metrics"])
        if self.fails_after is not None and done >= self.fails_after:
            raise ConnectionError("no route")
        self.calls.append(("metrics", step, dict(values)))

    def event(self, step: int, severity: str, text: str) -> None:
        self.calls.append(("event", step, severity, text))

    def completions(self, step: int, rows: Sequence[Completion]) -> None:
        self.calls.append(("completions", step, list(rows)))

    def flush(self) -> None:
        if self.fails_to_flush:
            raise OSError("no space left on device")

    def close(self, summary: Mapping[str, float], finished: bool) -> None:
        self.calls.append(("close", dict(summary), finished))


def remembering() -> type[Remembering]:
    """A class of its own, which remembers nothing yet."""
    return type("Fresh", (Remembering,), {"calls": []})


def make_run(folder: Path, steps: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('steps = 3\nmodel = "tiny"\n[training]\nlearning_rate = 1e-3\n')
    write_record(folder, [None])
    for step in range(1, steps + 1):
        add_step(folder, step)
    return folder


def write_record(folder: Path, origins: list[str | None]) -> None:
    record = {"version": "0.1", "algorithm": "grpo", "attempts": [{"from": origin} for origin in origins]}
    (folder / "run.json").write_text(json.dumps(record))


def add_step(folder: Path, step: int, outcome: float | None = None) -> None:
    add_row(folder / METRICS, {"step": step, "outcome": step / 10 if outcome is None else outcome, "gone": None})
    add_row(folder / TIMINGS, {"step": step, "rollout": 0.5, "tokens": 9})


def add_row(file: Path, row: Mapping[str, object]) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


def add_finding(folder: Path, step: int) -> None:
    row = {"step": step, "kind": "finding", "message": "all is dead", "rule": "dead_groups", "severity": "failing"}
    add_row(folder / EVENTS, row | {"remedy": "raise the temperature"})


def add_rollouts(folder: Path, step: int, count: int, text: str = "four") -> None:
    (folder / ROLLOUTS).mkdir(exist_ok=True)
    columns = {"group": list(range(count)), "text": [text] * count, "tokens": [[1, 2, 3]] * count}
    pq.write_table(pa.table(columns | {"reward": [1.0] * count}), folder / ROLLOUTS / f"step-{step:06d}.parquet")


def finish(folder: Path) -> None:
    result = {"before": {"accuracy": 0.25}, "after": {"accuracy": 0.5, "parts": {}}, "seconds": 2.0, "examples": []}
    (folder / RESULT).write_text(json.dumps(result))
