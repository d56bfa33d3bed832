"""What is wrong with a run, with the numbers that say so and the first thing to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Row = Mapping[str, object]
"""Of metrics.jsonl, or as it was before it was written."""
Severity = Literal["warning", "failing"]
"""Failing: going on as it is will not help."""
SEVERITIES: tuple[Severity, ...] = ("failing", "warning")
"""Worst first."""


@dataclass(frozen=True)
class Finding:
    rule: str
    severity: Severity
    step: int
    """Where it was first seen; rollouts of this step show it."""
    message: str
    """The evidence, with numbers."""
    remedy: str
    """The first thing to do."""
    show: str
    """Which completions of the step the reader is to show; empty where it is not in any."""

    def __str__(self) -> str:
        grave = ", the run is failing" if self.severity == "failing" else ""
        return f"{self.rule}{grave}: {self.message}. First: {self.remedy}"
