"""A step's time as the page draws it: lanes of the learner, the sampler, ranks and engines, and the queue."""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from proximo.insight.folder import RunFolder
from proximo.insight.page.overview import whole_number
from proximo.insight.reading import is_number
from proximo.runs.files import TIMELINE
from proximo.runs.health.history import is_step
from proximo.runs.health.timeline import ENGINE, LEARNER, RANK, SAMPLER, Bar, bars, covered

WAITING = "wait"
"""Kind of the learner's bar in its rollout phase while others sample."""
QUEUE = ("waiting", "in_flight", "graded")
MAX_BARS = 5000
"""Maximum number of bars that are sent for a step."""


def timeline(run: RunFolder, query: Mapping[str, str]) -> dict[str, Any]:
    """A step's time line, of the last step if `step` is not given; `steps` are those that have one, empty if none."""
    rows = _rows(run.path, _stamp(run.path / TIMELINE))
    if not rows:
        return {"steps": []}
    step = whole_number(query, "step", max(rows))
    if step not in rows:
        raise LookupError(f"the run has no time line of step {step}: there are those of {min(rows)} to {max(rows)}")
    return {"steps": [min(rows), max(rows)], "step": step, **gantt(rows[step])}


def gantt(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of timeline.jsonl as lanes with bars, with the seconds that each lane was idle."""
    drawn = list(bars(row))[:MAX_BARS]
    names = sorted({bar.lane for bar in drawn}, key=_order)
    do_others_sample = any(bar.kind == "sample" and bar.lane != LEARNER for bar in drawn)
    lanes = [
        _lane(name, [bar for bar in drawn if bar.lane == name], row["seconds"], do_others_sample) for name in names
    ]
    return {
        "began": row.get("began") if is_number(row.get("began")) else None,
        "seconds": row["seconds"] if is_number(row.get("seconds")) else 0.0,
        "lanes": lanes,
        "queue": {name: row[name] for name in QUEUE if is_number(row.get(name))},
        "versions": _counts(row.get("versions")),
        "staleness": _counts(row.get("staleness")),
    }


def _lane(name: str, lane_bars: list[Bar], seconds: float, do_others_sample: bool) -> dict[str, Any]:
    def kind(bar: Bar) -> str:
        return WAITING if do_others_sample and (bar.lane, bar.kind) == (LEARNER, "rollout") else bar.kind

    idle = seconds - covered(lane_bars, *({bar.kind for bar in lane_bars if kind(bar) != WAITING}))
    drawn = [[kind(bar), bar.start, bar.end, bar.numbers] for bar in sorted(lane_bars, key=lambda bar: bar.start)]
    return {"name": name, "bars": drawn, "idle": round(max(idle, 0.0), 4)}


def _order(lane: str) -> tuple[int, int, str]:
    """Learner, sampler, ranks and engines by their numbers, then what is unknown."""
    for rank, pattern in enumerate((re.compile(LEARNER), re.compile(SAMPLER), RANK, ENGINE)):
        if match := pattern.fullmatch(lane):
            return rank, int(match[1]) if match.groups() else 0, lane
    return 4, 0, lane


def _counts(value: object) -> dict[str, int]:
    """Numbers by number: groups by version, or by age in updates."""
    known = value.items() if isinstance(value, dict) else ()
    counts = {int(key): int(count) for key, count in known if key.lstrip("-").isdecimal() and is_number(count)}
    return {str(key): counts[key] for key in sorted(counts)}


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=2)
def _rows(folder: Path, stamp: tuple[int, int]) -> dict[int, dict[str, Any]]:
    """The last row of each step, until the file changes."""
    rows = RunFolder(folder).rows(TIMELINE)
    return {row["step"]: row for row in rows if is_step(row.get("step")) and is_number(row.get("seconds"))}
