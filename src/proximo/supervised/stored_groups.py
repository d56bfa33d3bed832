"""A run's stored completions, group by group: what rankings are made from. Without torch."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from proximo.data.rows import Prompt, read_prompt
from proximo.runs.files import ROLLOUTS, stored_steps
from proximo.runs.rollout_files import read_columns
from proximo.system.opening import without_links

COLUMNS = ("group", "prompt", "messages", "text", "truncated")
"""Columns that every reader of groups needs."""


def group_files(run: str, steps: str) -> list[Path]:
    """Files with the rollouts of a range of steps A:B; ValueError where there are none."""
    folder = without_links(run)
    files = [folder / ROLLOUTS / f"step-{step:06d}.parquet" for step in stored_steps(folder)]
    if not files:
        raise ValueError(f"run is {run!r}: it has no rollouts, give the folder of a run of proximo train")
    chosen = [path for path in files if _step(path) in step_range(steps)]
    if not chosen:
        stored = f"{_step(files[0])} to {_step(files[-1])}"
        raise ValueError(f"steps is {steps!r}: {run} has steps {stored}, none of them in this range")
    return chosen


def step_range(steps: str) -> range:
    """Example: step_range("10:20") == range(10, 20)."""
    first, colon, last = steps.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, last)):
        raise ValueError(f"steps is {steps!r}: give A:B, such as 10:20, 10: or :20")
    return range(int(first or 0), int(last or sys.maxsize))


def groups_in(path: Path, more: Sequence[str] = ()) -> Iterator[list[Mapping[str, Any]]]:
    """The rows of each group of a file, with COLUMNS and `more`."""
    columns = [*COLUMNS, *more]
    try:
        table = read_columns(path, columns)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): leave its step out with steps") from error
    missing = set(columns) - set(table.column_names)
    if missing:
        raise ValueError(f"{path} has no column {', '.join(sorted(missing))}: it is from an older Proximo, train again")
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for row in table.to_pylist():
        groups.setdefault(row["group"], []).append(row)
    yield from groups.values()


def prompt_of(row: Mapping[str, Any]) -> Prompt:
    """The prompt of a stored row: its messages where it has some, else the text."""
    return row["prompt"] if row["messages"] is None else read_prompt(json.loads(row["messages"]))


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
