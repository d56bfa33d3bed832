"""Problems from a JSONL or Parquet file."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from proximo.data import Row, stable_hash
from proximo.data.rows import check_share
from proximo.data.splits import prompt_key
from proximo.rewards import ExactMatch, Reward
from proximo.tasks.protocol import RewardRange, Split, reward_range
from proximo.tasks.reading import FileProblems, row_prompt
from proximo.types import Completion, Grade, Problem


@dataclass(frozen=True)
class File:
    """One problem to a row. The prompt is a text or a list of messages; all other columns go to the reward."""

    path: str
    """A .jsonl or .parquet file."""
    prompt_column: str = "prompt"
    answer_columns: tuple[str, ...] = ("answer", "solution", "ground_truth", "label")
    """The first of these that a row has is its answer."""
    reward: Reward | None = field(default_factory=ExactMatch)
    """Judges the completions. None: prompts alone, whose completions only reward models or further rules judge."""
    held_out: float | str = 0.1
    """The share of prompts kept for evaluation, chosen by a hash of the prompt; or the path of a file of its own."""
    skip_bad: bool = False
    """Leave bad rows out and count them, instead of refusing."""

    while_sampling = True

    def __post_init__(self) -> None:
        check_share(self.held_out, "task.held_out")

    def size(self, split: Split) -> int:
        return self._problems.size(split)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return self._problems.problem(index, split, seed)

    def check(self, complaint: Callable[[Problem], str | None]) -> list[str]:
        """Ask of every problem whether the run can use it: those it cannot are refused, or left out and returned."""
        return self._problems.check(complaint)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        if self.reward is None:
            return [Grade(math.nan)] * len(completions)
        return [Grade(outcome) for outcome in self.reward(problems, completions)]

    @property
    def reward_range(self) -> RewardRange | None:
        return reward_range(self.reward)

    def reference(self, problem: Problem) -> str | None:
        return None if self.reward is None else self.reward.reference(problem)

    @cached_property
    def _problems(self) -> FileProblems:
        return FileProblems(self.path, self.held_out, self.skip_bad, self._problem)

    def _problem(self, row: Row) -> Problem:
        prompt = row_prompt(row, self.prompt_column)
        answer = next((row[column] for column in self.answer_columns if row.has(column)), None)
        if answer is None and self.reward is not None and self.reward.needs_answer:
            wanted = ", ".join(self.answer_columns)
            raise ValueError(
                f"no answer in {wanted}, and {type(self.reward).__name__} needs one: set task.answer_columns"
            )
        data = {column: value for column, value in row.values.items() if column != self.prompt_column}
        name = stable_hash(prompt_key(prompt), json.dumps(answer, default=str))
        return Problem(id=f"{Path(self.path).stem}-{name:016x}", prompt=prompt, answer=answer, data=data)
