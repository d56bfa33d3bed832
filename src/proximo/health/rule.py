"""What a rule is."""

from typing import ClassVar, Protocol, runtime_checkable

from proximo.health.finding import Severity
from proximo.health.history import History


@runtime_checkable
class Rule(Protocol):
    """One thing that goes wrong in runs: a pure function of the rows so far, with its words beside it."""

    name: ClassVar[str]
    severity: ClassVar[Severity]
    reads: ClassVar[str]
    """A row without this metric says nothing to the rule."""
    show: ClassVar[str]
    """The reader's filter for completions that show it."""
    why: ClassVar[str]
    """What is bad about it."""
    remedy: ClassVar[str]
    """The first thing to do."""

    @property
    def window(self) -> int:
        """Rows that it looks at; it is over after as many rows in a row without evidence."""
        ...

    @property
    def when(self) -> str:
        """The threshold in words."""
        ...

    def evidence(self, history: History) -> str | None:
        """With numbers; None where all is well, or not enough is known."""
        ...
