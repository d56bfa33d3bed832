"""Values read from untrusted files."""

import math
from collections.abc import Mapping
from typing import Any

from proximo.insight.charts.drawing import LARGEST, Number, is_known

Row = Mapping[str, Any]


def real(value: object) -> float:
    """The value as a float; NaN if it is not a number that can be drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return math.nan
    return float(value)


def is_number(value: object) -> bool:
    return is_known(real(value))


NO_PHASE = ("step", "tokens", "attempt")
COSTS = ("judge_", "episode_")
"""Prefixes of numbers that are no phase: they were spent within one, or are no seconds."""


def phases(timing: Row) -> dict[str, Number]:
    """Seconds by phase in a row of timings."""
    return {
        name: value
        for name, value in timing.items()
        if name not in NO_PHASE and not name.startswith(COSTS) and is_number(value)
    }
