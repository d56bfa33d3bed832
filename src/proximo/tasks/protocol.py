"""What training asks of a task."""

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from proximo.types import Completion, Grade, Problem

Split = Literal["train", "held_out"]

RewardRange = tuple[float, float]
"""What a wrong and a right answer earn, such as (0, 1) or (−1, 1). Partial credit lies between."""


@runtime_checkable
class Task(Protocol):
    """A source of problems, and the judge of their answers.

    Example: Arithmetic().problem(7, "train", seed=0) -> Problem("arithmetic-37+48", prompt="37+48=", answer="85")
    """

    @property
    def while_sampling(self) -> bool:
        """Whether a group may be graded as soon as it is sampled, by itself and on another thread, while others are
        still being sampled. False: all groups at once, on the caller's thread, when sampling has ended."""
        ...

    def size(self, split: Split) -> int | None:
        """How many problems there are; None is endless."""
        ...

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        """The same arguments give the same problem on every machine; an index beyond the size begins a new epoch."""
        ...

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        """One verdict for each completion; an outcome of NaN is unscored."""
        ...

    def reference(self, problem: Problem) -> str | None:
        """A completion that must score 1, to check the grader with; None where nobody knows one."""
        ...


@runtime_checkable
class Ranged(Protocol):
    """A task or a reward that declares its range; length penalties are measured by it."""

    @property
    def reward_range(self) -> RewardRange | None:
        """What a wrong and a right answer earn; None where it is not known."""
        ...


def reward_range(of: object) -> RewardRange | None:
    """What a task or a reward declares; None where it declares nothing."""
    return of.reward_range if isinstance(of, Ranged) else None
