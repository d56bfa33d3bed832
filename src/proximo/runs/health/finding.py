"""A finding: what is wrong with a run, the evidence, and the first thing to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Row = Mapping[str, object]
"""A row of metrics.jsonl, as in the file or before it is written."""
Severity = Literal["warning", "failing"]
"""Failing: continuing the run unchanged will not help."""
SEVERITIES: tuple[Severity, ...] = ("failing", "warning")
"""All severities, worst first."""


@dataclass(frozen=True)
class Finding:
    rule: str
    severity: Severity
    step: int
    """Step at which it was first seen; the rollouts of this step show it."""
    message: str
    """Evidence, with numbers."""
    remedy: str
    """First thing to do."""
    show: str
    """Filter for the completions of the step that show it; empty if none do."""

    def __str__(self) -> str:
        grave = ", the run is failing" if self.severity == "failing" else ""
        return f"{self.rule}{grave}: {self.message}. First: {self.remedy}"
