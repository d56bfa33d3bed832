"""What a task and a run ask of a reward."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from proximo.types import Completion, Problem


@runtime_checkable
class Grader(Protocol):
    """A frozen value that scores completions. It may also declare `reward_range`, what a wrong and a right answer earn.

    Example: ExactMatch()([problem], [completion]) -> [1.0]
    """

    @property
    def needs_answer(self) -> bool:
        """Whether it scores only problems that have an answer."""
        ...

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Sequence[float | None]:
        """One score per completion. NaN: unscored. None: this reward does not apply to the problem."""
        ...

    def reference(self, problem: Problem) -> str | None:
        """A completion that scores 1, to check the grader with; None where none is known."""
        ...
