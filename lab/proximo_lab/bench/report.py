"""Tables of results: rows with figures, ratios and verdicts, as aligned text and as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from proximo.system.lines import plain


@dataclass(frozen=True)
class Verdict:
    """A number compared with its target."""

    what: str
    value: float
    bound: float
    at_least: bool = True

    @property
    def reached(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def cells(self) -> tuple[str, str]:
        """Target and result."""
        sign = "≥" if self.at_least else "≤"
        return f"{self.what} {sign} {short(self.bound)}", f"{'yes' if self.reached else 'NO'}, {short(self.value)}"


@dataclass(frozen=True)
class Row:
    name: str
    figures: dict[str, str] = field(default_factory=dict)
    """Seconds, tokens per second, bytes; not printed for a CPU, where they do not transfer to other machines."""
    ratios: dict[str, str] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    note: str = ""
    refused: bool = False
    """True if the row is refused; the note says why."""
    details: dict[str, Any] = field(default_factory=dict)
    """All measurements, for the JSON file."""


def short(value: float) -> str:
    """The value with three digits, all that a time is good for."""
    if not math.isfinite(value):
        return "–"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def rendered(rows: Sequence[Row], *, figures: bool) -> str:
    """One line per row and per further verdict of it; empty columns are left out."""
    names = [*dict.fromkeys(name for row in rows for name in (row.figures if figures else {}))]
    ratios = [*dict.fromkeys(name for row in rows for name in row.ratios)]
    judged = any(row.verdicts for row in rows)
    lines = [["row", *names, *ratios, *(("target", "reached") if judged else ("", "")), ""]]
    for row in rows:
        values = {**row.figures, **row.ratios}
        cells = [values.get(name, "") for name in [*names, *ratios]]
        first, *more = [verdict.cells() for verdict in row.verdicts] or [("", "")]
        lines.append([row.name, *cells, *first, f"REFUSED: {row.note}" if row.refused else row.note])
        lines += [["", *("" for _ in cells), *verdict, ""] for verdict in more]
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    kept = [column for column, width in enumerate(widths) if width]
    return "\n".join("  ".join(line[column].ljust(widths[column]) for column in kept).rstrip() for line in lines)


def save(folder: Path, table: str, device: str, around: dict[str, Any], rows: Sequence[Row]) -> Path:
    """Save rows into today's file of the table; rows measured earlier today stay unless measured again."""
    path = folder / f"{table}-{device}-{date.today():%Y%m%d}.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    fresh = [plain({**asdict(row), "around": around}) for row in rows]
    for row, written in zip(rows, fresh, strict=True):
        written["verdicts"] = [{**asdict(each), "reached": each.reached} for each in row.verdicts]
    names = {row.name for row in rows}
    kept = [row for row in known if row["name"] not in names]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain({"table": table, "rows": kept + fresh}), indent=1) + "\n")
    return path
