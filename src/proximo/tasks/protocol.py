"""The interface of a task."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol, runtime_checkable

from proximo.rewards.protocol import Waiting
from proximo.types import Completion, Grade, Problem

Split = Literal["train", "held_out"]

Complaints = Callable[[Sequence[Problem]], Iterable[str | None]]
"""Complaints about some problems, None where nothing is wrong; those of a file are asked about together."""

RewardRange = tuple[float, float]
"""Rewards of a wrong and a right answer, such as (0, 1) or (−1, 1). Partial credit lies between."""


@runtime_checkable
class Task(Protocol):
    """A source of problems, and the grader of their completions.

    Example: Arithmetic().problem(7, "train", seed=0) -> Problem("arithmetic-37+48", prompt="37+48=", answer="85")
    """

    @property
    def while_sampling(self) -> bool:
        """True if a group may be graded on another thread as soon as it is sampled, while others are still being
        sampled. False: all groups are graded together on the caller's thread after sampling."""
        ...

    def size(self, split: Split) -> int | None:
        """Number of problems; None if endless."""
        ...

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        """The problem at `index`, the same on every machine; an index beyond the size starts a new epoch."""
        ...

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        """One grade per completion; a task score of NaN means unscored."""
        ...

    def reference(self, problem: Problem) -> str | None:
        """A completion that must score 1, used to check the grader; None if none is known."""
        ...


@runtime_checkable
class BeginsGrading(Protocol):
    """A task whose rewards may wait for something else, so that several groups are graded at once."""

    def begin(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Waiting[list[Grade]]:
        """Begin to grade. Groups are begun in the order in which they are sampled."""
        ...


def begin_grading(task: Task, problems: Sequence[Problem], completions: Sequence[Completion]) -> Waiting[list[Grade]]:
    """Begin to grade if the task can; another task grades here and now."""
    if isinstance(task, BeginsGrading):
        return task.begin(problems, completions)
    grades = task.grade(problems, completions)
    return lambda: grades


@runtime_checkable
class Ranged(Protocol):
    """A task or reward that declares its range, which sets the scale of length penalties."""

    @property
    def reward_range(self) -> RewardRange | None:
        """Rewards of a wrong and a right answer; None if not known."""
        ...


def reward_range(of: object) -> RewardRange | None:
    """The declared range of a task or reward; None if it declares none."""
    return of.reward_range if isinstance(of, Ranged) else None


@runtime_checkable
class GradesSteps(Protocol):
    """A task whose grades have a reward for each step of a completion, see `Grade.steps`."""

    @property
    def grades_steps(self) -> bool: ...


@runtime_checkable
class Answering(Protocol):
    """A task or reward whose completions give answers that can be compared with each other, for maj@k."""

    def final_answer(self, completion: Completion) -> str | None:
        """The answer that a completion gives, written so that equal answers are equal texts; None if it gives none."""
        ...


@runtime_checkable
class Comparing(Protocol):
    """An Answering task or reward whose answers may be equal although their texts differ."""

    def united(self, answers: Sequence[str]) -> list[str]:
        """Each answer, or in its place the first of them that is equal to it."""
        ...


def final_answers(of: object, completions: Sequence[Completion]) -> list[str | None]:
    """The answers of completions, with one text for those that the task or reward finds equal."""
    answers = [final_answer(of, completion) for completion in completions]
    given = [answer for answer in answers if answer is not None]
    representatives = iter(united(of, given))
    return [None if answer is None else next(representatives) for answer in answers]


def united(of: object, answers: Sequence[str]) -> list[str]:
    """The answers, with one text for those that are equal."""
    return of.united(answers) if isinstance(of, Comparing) else list(answers)


def final_answer(of: object, completion: Completion) -> str | None:
    """The answer of a completion; None if there is none, or if the task or reward cannot compare answers."""
    return of.final_answer(completion) if isinstance(of, Answering) else None
