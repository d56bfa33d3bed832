"""A run's stored completions, group by group: what rankings are made from. Without torch."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from proximo.data.rows import Prompt, read_prompt
from proximo.runs.files import ROLLOUTS, stored_steps
from proximo.runs.rollout_files import read_columns
from proximo.system.opening import json_value, without_links


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


KINDS: Mapping[str, Callable[[pa.DataType], bool]] = {
    "group": pa.types.is_integer,
    "prompt": _is_text,
    "messages": lambda kind: _is_text(kind) or pa.types.is_null(kind),
    "text": _is_text,
    "truncated": pa.types.is_boolean,
}
"""Columns that every reader of groups needs, and what they hold."""
COLUMNS = tuple(KINDS)
EMPTY = ("messages",)
"""Columns that may have no value."""


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
    for name in columns:
        is_kind, column = KINDS.get(name, pa.types.is_floating), table.column(name)
        if not is_kind(column.type) or (column.null_count and name not in EMPTY):
            raise ValueError(f"{path} has a column {name} that no run writes: leave its step out with steps")
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for row in table.to_pylist():
        groups.setdefault(row["group"], []).append(row)
    yield from groups.values()


def prompt_of(row: Mapping[str, Any]) -> Prompt:
    """The prompt of a stored row: its messages where it has some, else the text."""
    return row["prompt"] if row["messages"] is None else read_prompt(json_value(row["messages"]))


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
