"""A task as an environment plays it: the problems that it prepares, and the task scores that it gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proximo.environments.protocol import Acting, Interaction
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.rewards.grading import grading
from proximo.rewards.protocol import Waiting
from proximo.tasks import RewardRange, Split, Task, reward_range
from proximo.tasks.protocol import begin_grading
from proximo.types import Completion, Grade, Problem


def played(task: Task, environment: Interaction, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The task as this environment plays it; the task itself where the environment has no say in it."""
    if not isinstance(environment, Acting):
        return task
    environment.check()
    return PlayedTask(task, environment, tokenizer)


def paying(task: Task, environment: Interaction) -> object:
    """The environment or the task: which of them gives the task scores of completions, and may declare their range."""
    return environment if isinstance(environment, Acting) and environment.scores else task


@dataclass(frozen=True)
class PlayedTask:
    """A task whose completions earn what their turns earned."""

    task: Task
    environment: Acting
    tokenizer: Any

    @property
    def while_sampling(self) -> bool:
        return self.task.while_sampling

    @property
    def reward_range(self) -> RewardRange | None:
        """Range of texts that a grader is tried with; the environment sees none of them."""
        return None if self.environment.scores else reward_range(self.task)

    def size(self, split: Split) -> int | None:
        return self.task.size(split)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return self.environment.prepared(self.task.problem(index, split, seed), self.tokenizer)

    def reference(self, problem: Problem) -> str | None:
        """The task's reference; None where the environment gives task scores: no single text earns one."""
        return None if self.environment.scores else self.task.reference(problem)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        with grading():
            return self.begin(problems, completions)()

    def begin(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Waiting[list[Grade]]:
        if not self.environment.scores:
            return begin_grading(self.task, problems, completions)
        # A text that was never played, such as one that a grader is tried with, has earned nothing.
        earned = [0.0 if completion.earned is None else completion.earned for completion in completions]
        grades = [Grade(outcome) for outcome in earned]
        return lambda: grades
