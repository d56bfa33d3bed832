"""The protocol of rewards: what a task and a run ask of one."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from proximo.processes.pool import Waiting
from proximo.types import Completion, Problem

Scores = Sequence[float | None]


@runtime_checkable
class Grader(Protocol):
    """A frozen value that scores completions. It may also declare `reward_range`, what a wrong and a right answer earn.

    Example: ExactMatch()([problem], [completion]) -> [1.0]
    """

    @property
    def needs_answer(self) -> bool:
        """True if it scores only problems that have an answer."""
        ...

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Scores:
        """One score per completion. NaN: unscored. None: this reward does not apply to the problem."""
        ...

    def reference(self, problem: Problem) -> str | None:
        """A completion that scores 1, to check the grader with; None where none is known."""
        ...


@runtime_checkable
class Begins(Protocol):
    """A reward that waits for something other than this processor, so that those of several groups run together."""

    def begin(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Waiting[Scores]:
        """Begin to score and return at once. Groups are begun in the order in which they are sampled."""
        ...


@runtime_checkable
class Checks(Protocol):
    """A reward that can say before a run whether it can be asked."""

    def check(self) -> None:
        """Raise ValueError if it cannot, before any model is loaded."""
        ...
