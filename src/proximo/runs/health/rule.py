"""The interface of a rule."""

from typing import ClassVar, Protocol, runtime_checkable

from proximo.runs.health.finding import Severity
from proximo.runs.health.history import History


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
    """Why it is bad."""
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
