"""Several sources of problems in one task, drawn by weight."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

from proximo.data.splits import prompt_key
from proximo.rewards import Reward
from proximo.rewards.grading import grading
from proximo.rewards.protocol import Waiting
from proximo.tasks.arithmetic import Arithmetic
from proximo.tasks.code import Code
from proximo.tasks.countdown import Countdown
from proximo.tasks.echo import Echo
from proximo.tasks.file import File
from proximo.tasks.gym import Gym
from proximo.tasks.protocol import Complaints, RewardRange, Split, Task, begin_grading, reward_range
from proximo.tasks.sorting import Sorting
from proximo.types import Completion, Grade, Problem

SourceTask = Arithmetic | Countdown | Echo | Sorting | Gym | File | Code | Task
TAKEN = ("parts",)
"""Names that metrics use for something else."""


@dataclass(frozen=True)
class Source:
    """One source of a mixture."""

    name: str
    """Name of the source in metrics, ledger and problem ids."""
    task: SourceTask
    """Problems of the source, with their own columns and reward."""
    weight: float = 1.0
    """Share of the training prompts, relative to the other sources. 0: for evaluation only."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name in TAKEN:
            raise ValueError(f"task.sources: name is {self.name!r}: give a name without a slash, other than {TAKEN[0]}")
        if not 0 <= self.weight < math.inf:
            raise ValueError(f"task.sources: weight of {self.name} is {self.weight}: give 0 or a positive number")


@dataclass(frozen=True)
class Mixture:
    """Problems from several sources: training draws from them by weight, evaluation asks each one's held-out problems.

    Draws are spread evenly and follow from their number alone, so that any stretch of them has the sources in their
    shares and a resume draws the same.
    """

    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        if not any(source.weight for source in self.sources):
            raise ValueError("task.sources has no source with a weight above 0: there is nothing to train on")
        if len(set(names)) < len(names):
            raise ValueError(f"task.sources has the names {', '.join(names)}: give each source its own")

    @property
    def while_sampling(self) -> bool:
        return all(source.task.while_sampling for source in self.sources)

    @property
    def reward_range(self) -> RewardRange | None:
        """The sources' range, where all have the same."""
        ranges = {reward_range(source.task) for source in self.sources}
        return ranges.pop() if len(ranges) == 1 else None

    def size(self, split: Split) -> int | None:
        """Number of problems: training is endless, as sources repeat at different times, unless all are for evaluation;
        held out are those of all."""
        if split == "held_out":
            return len(self._held_out)
        return None if any(source.task.size("train") != 0 for source in self.sources if source.weight) else 0

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        number, draw = self._order[index] if split == "train" else self._held_out[index % len(self._held_out)]
        source = self.sources[number]
        problem = source.task.problem(draw, split, seed)
        return replace(problem, id=f"{source.name}/{problem.id}", source=source.name)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        with grading():
            return self.begin(problems, completions)()

    def begin(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Waiting[list[Grade]]:
        begun: list[tuple[list[int], Waiting[list[Grade]]]] = []
        for source in self.sources:
            rows = [row for row, problem in enumerate(problems) if problem.source == source.name]
            if rows:
                asked, answered = [problems[row] for row in rows], [completions[row] for row in rows]
                begun.append((rows, begin_grading(source.task, asked, answered)))

        def finish() -> list[Grade]:
            grades = {row: grade for rows, waiting in begun for row, grade in zip(rows, waiting(), strict=True)}
            return [grades[row] for row in range(len(problems))]

        return finish

    def reference(self, problem: Problem) -> str | None:
        source = next(source for source in self.sources if source.name == problem.source)
        return source.task.reference(problem)

    def check(self, complaints: Complaints) -> list[str]:
        """Refuse problems of files that the run cannot use, and training prompts that are held out as well; rows that
        may be skipped are returned."""
        checked = [source.task for source in self.sources if isinstance(source.task, Checked)]
        skipped = [line for task in checked for line in task.check(complaints)]
        vars(self).pop("_held_out", None)  # rows that were skipped are gone
        self._refuse_overlap()
        return skipped

    def _refuse_overlap(self) -> None:
        held_out = {prompt_key(self.problem(index, "held_out", 0).prompt) for index in range(len(self._held_out))}
        for source in self.sources:
            both = _asked_in_training(source.task, held_out) if source.weight else []
            if both:
                raise ValueError(
                    f"task.sources: {len(both)} training prompts of {source.name} are also held out, such "
                    f"as {both[0].id}: remove them from one"
                )

    @cached_property
    def _order(self) -> "_SourceOrder":
        for source in self.sources:
            if source.weight and source.task.size("train") == 0:
                raise ValueError(f"task.sources: {source.name} has no problem to train on: give it weight 0")
        return _SourceOrder([source.weight for source in self.sources])

    @cached_property
    def _held_out(self) -> list[tuple[int, int]]:
        """Source and index of each held-out problem, the sources taking turns, so that the first ones are of all."""
        sizes = [source.task.size("held_out") or 0 for source in self.sources]
        return [(number, index) for index in range(max(sizes)) for number, size in enumerate(sizes) if index < size]


def _asked_in_training(task: Task, keys: Collection[str]) -> list[Problem]:
    """Training problems whose prompts have one of these keys; none of a task that generates problems without end."""
    if isinstance(task, File):
        return task.asked_in_training(keys)
    problems = (task.problem(index, "train", 0) for index in range(task.size("train") or 0))
    return [problem for problem in problems if prompt_key(problem.prompt) in keys]


@runtime_checkable
class Checked(Protocol):
    """A task that can say in advance which of its problems a run cannot use."""

    def check(self, complaints: Complaints) -> list[str]: ...


def with_reward(task: Mixture | SourceTask, reward: Reward | None) -> Mixture | SourceTask:
    """A file, or all files of a mixture, with this reward; another task as it is."""
    if isinstance(task, Mixture):
        sources = (replace(source, task=with_reward(source.task, reward)) for source in task.sources)
        return replace(task, sources=tuple(sources))
    return replace(task, reward=reward) if isinstance(task, File) else task


def data_remarks(task: Mixture | SourceTask) -> list[str]:
    """Lines for a person about the rows of each file."""
    if isinstance(task, Mixture):
        return [line for source in task.sources for line in data_remarks(source.task)]
    return task.remarks if isinstance(task, File | Code) else []


def storage_words(task: object) -> str:
    """Place of the rows of a task's files, and what was checked, for a person; empty for others."""
    if isinstance(task, Mixture):
        each = {source.name: storage_words(source.task) for source in task.sources}
        return ", ".join(f"{name} {words}" for name, words in each.items() if words)
    return task.storage_words if isinstance(task, File | Code) else ""


class _SourceOrder:
    """Order of the sources: which one each draw comes from, and which of that source's own draws it is.

    Each source gains its weight with every draw; the one with the most is drawn, and pays the sum of all.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights, self._gained, self._counts = list(weights), [0.0] * len(weights), [0] * len(weights)
        self._drawn: list[tuple[int, int]] = []

    def __getitem__(self, index: int) -> tuple[int, int]:
        while len(self._drawn) <= index:
            self._gained = [gained + weight for gained, weight in zip(self._gained, self._weights, strict=True)]
            number = max(range(len(self._weights)), key=lambda at: (self._weights[at] > 0, self._gained[at]))
            self._gained[number] -= math.fsum(self._weights)
            self._drawn.append((number, self._counts[number]))
            self._counts[number] += 1
        return self._drawn[index]
