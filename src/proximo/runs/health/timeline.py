"""Readings of a row of timeline.jsonl: who was idle, how long pushes took, who is slower than the others.

Rows come from a file, which may be damaged: what is not understood is skipped.
"""

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proximo.runs.health.history import Row, is_step, number

LEARNER, SAMPLER = "learner", "sampler"
ENGINE, RANK = re.compile(r"engine-(\d{1,9})"), re.compile(r"rank (\d{1,9})")
MAX_INTERVALS = 100_000
"""Maximum number of intervals of a row that are read."""


@dataclass(frozen=True)
class Bar:
    """An interval of a row: seconds from the row's beginning."""

    lane: str
    kind: str
    start: float
    end: float
    numbers: Mapping[str, float]


def bars(row: Row) -> Iterator[Bar]:
    """The intervals of a row that lie in it, cut at its ends."""
    intervals, seconds = row.get("intervals"), number(row, "seconds")
    for each in intervals[:MAX_INTERVALS] if isinstance(intervals, list) and seconds > 0 else ():
        if not isinstance(each, list) or len(each) != 5 or not all(isinstance(text, str) for text in each[:2]):
            continue
        start, end = (number({"": value}, "") for value in each[2:4])
        numbers = each[4] if isinstance(each[4], dict) else {}
        if max(start, 0.0) < min(end, seconds):
            known = {name: value for name in numbers if not math.isnan(value := number(numbers, name))}
            yield Bar(each[0], each[1], max(start, 0.0), min(end, seconds), known)


def covered(intervals: Iterable[Bar], *kinds: str) -> float:
    """Seconds in which at least one of the intervals of these kinds was open."""
    total, until = 0.0, -math.inf
    for bar in sorted((each for each in intervals if each.kind in kinds), key=lambda each: each.start):
        total += max(bar.end - max(bar.start, until), 0.0)
        until = max(until, bar.end)
    return total


def loads(row: Row) -> dict[str, float]:
    """Numbers of a row for the rules: shares of its seconds, and the pace of the slowest."""
    seconds, row_bars = number(row, "seconds"), list(bars(row))
    lanes = {name: [bar for bar in row_bars if bar.lane == name] for name in {bar.lane: None for bar in row_bars}}
    engines = {int(match[1]): lane for name, lane in lanes.items() if (match := ENGINE.fullmatch(name))}
    ranks = {int(match[1]): lane for name, lane in lanes.items() if (match := RANK.fullmatch(name))}
    known: dict[str, float] = {}
    if engines or SAMPLER in lanes:  # else the learner's process samples itself
        known["learner_idle"] = covered(lanes.get(LEARNER, []), "rollout") / seconds
    if engines:
        busy = [covered(lane, "sample", "push", "probe", "start") / seconds for lane in engines.values()]
        known["engines_idle"] = 1 - statistics.mean(busy)
        known["push_share"] = max(covered(lane, "push", "probe") for lane in engines.values()) / seconds
    slow = [(pace, index, 0.0) for pace, index in _slowest({index: _speed(lane) for index, lane in engines.items()})]
    speeds = {index: 1 / spent for index, lane in ranks.items() if (spent := covered(lane, "sample"))}
    slow += [(pace, index, 1.0) for pace, index in _slowest(speeds)]
    if slow:
        known["pace"], known["slowest"], known["slowest_is_rank"] = min(slow)
    ages = row.get("staleness")
    if isinstance(ages, dict) and any(isinstance(age, str) and age.isdecimal() and age.strip("0") for age in ages):
        known["is_stale"] = 1.0
    return known


def _speed(lane: Sequence[Bar]) -> float:
    """Tokens a second while it samples; 0 if it did not."""
    spent = covered(lane, "sample")
    return sum(bar.numbers.get("tokens", 0.0) for bar in lane if bar.kind == "sample") / spent if spent else 0.0


def _slowest(speeds: Mapping[int, float]) -> list[tuple[float, int]]:
    """Speed of the slowest as a share of the others' median, and its number; nothing where there is only one."""
    there = {index: speed for index, speed in speeds.items() if speed > 0}
    if len(there) < 2:
        return []
    slowest = min(there, key=lambda index: (there[index], index))
    return [(there[slowest] / statistics.median(speed for index, speed in there.items() if index != slowest), slowest)]


def with_loads(metrics: Iterable[dict[str, Any]], timeline: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows of metrics with what the time line says of their steps; an earlier attempt's rows are replaced."""
    rows = {step: row for row in timeline if is_step(step := row.get("step"))}
    return [row | _merged(row, rows) if "sampled_tokens" in row else row for row in metrics]


def _merged(row: Row, rows: Mapping[int, Row]) -> dict[str, float]:
    step = row.get("step")
    known = loads(rows[step]) if isinstance(step, int) and step in rows else {}
    gap = number(row, "mismatch_kl")
    return known | ({"stale_gap": gap} if known.get("is_stale") and not math.isnan(gap) else {})
