"""Files of rows: JSON, one to a line, as data and runs have them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    """The path, as flags and configs name it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics."""
    return read_rows(folder / "metrics.jsonl")
