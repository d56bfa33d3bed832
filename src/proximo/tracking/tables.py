"""Some completions of a step, small enough for any tracker."""

import math
from pathlib import Path

from proximo.redacting import masked
from proximo.tracking.tracker import Completion

MAX_ROWS, MAX_TEXT = 16, 2000
"""Maximum completions per step, and characters of each text."""
TEXTS, NUMBERS, FLAGS = ("prompt", "text", "answer", "state"), ("group", "outcome", "reward"), ("truncated",)


def completion_rows(path: Path) -> list[Completion]:
    """Completions spread evenly over the rows of a rollout file. OSError or ValueError if it cannot be read."""
    # Imported late: pyarrow is large, and the other files need none of it.
    import pyarrow.compute as pc

    from proximo.training.runfolder.rollout_files import read_columns

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
