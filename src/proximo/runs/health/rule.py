"""A rule, and a finding: what is wrong with a run, the evidence, and the first thing to do about it."""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

from proximo.runs.health.history import History

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


@runtime_checkable
class Rule(Protocol):
    """One thing that goes wrong in runs: a pure function of the rows so far, with its texts."""

    name: ClassVar[str]
    severity: ClassVar[Severity]
    reads: ClassVar[str]
    """Metric that the rule reads; a row without it is skipped."""
    show: ClassVar[str]
    """Filter of `proximo view` for completions that show it."""
    why: ClassVar[str]
    """Harm that it does."""
    remedy: ClassVar[str]
    """First thing to do."""

    @property
    def window(self) -> int:
        """Number of rows that it looks at; a finding is over after this many rows without evidence."""
        ...

    @property
    def when(self) -> str:
        """The threshold in words."""
        ...

    def evidence(self, history: History) -> str | None:
        """The evidence, with numbers; None if all is well or not enough is known."""
        ...
