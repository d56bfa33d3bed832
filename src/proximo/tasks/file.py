"""Problems from a JSONL or Parquet file."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from proximo.data import Row, stable_hash
from proximo.data.rows import check_share
from proximo.data.splits import prompt_key
from proximo.rewards import ExactMatch, Reward
from proximo.rewards.scoring import scores_of
from proximo.tasks.protocol import RewardRange, Split, final_answer, reward_range
from proximo.tasks.reading import FileProblems, row_prompt
from proximo.types import Completion, Grade, Problem


@dataclass(frozen=True)
class File:
    """Problems from a file, one per row. The prompt is text or a list of messages; rewards see the other columns."""

    path: str
    """A .jsonl or .parquet file."""
    prompt_column: str = "prompt"
    """Column with the prompt."""
    answer_columns: tuple[str, ...] = ("answer", "solution", "ground_truth", "label")
    """Columns that may hold the answer; the first one present is used. `a.b` reads field b of column a."""
    reward: Reward | None = field(default_factory=ExactMatch)
    """Reward that grades the completions. None: only reward models and rules of the run grade them."""
    held_out: float | str = 0.1
    """Held-out data: a share of the prompts, chosen by hash, or the path of a separate file."""
    skip_bad: bool = False
    """Whether to skip and count bad rows instead of refusing the file."""

    while_sampling = True

    def __post_init__(self) -> None:
        check_share(self.held_out, "task.held_out")

    def size(self, split: Split) -> int:
        return self._problems.size(split)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return self._problems.problem(index, split, seed)

    def check(self, complaint: Callable[[Problem], str | None]) -> list[str]:
        """Refuse problems that the run cannot use; with skip_bad they are left out and returned."""
        return self._problems.check(complaint)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        if self.reward is None:
            return [Grade(math.nan)] * len(completions)
        scores = scores_of(self.reward, problems, completions)
        return [Grade(math.nan, applies=False) if score is None else Grade(score) for score in scores]

    def final_answer(self, completion: Completion) -> str | None:
        """The answer as the reward reads it; None if the reward compares none."""
        return final_answer(self.reward, completion)

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
        column = next((column for column in self.answer_columns if row.find(column) is not None), "")
        answer = row.find(column) if column else None
        if self.reward is not None and self.reward.needs_answer:
            self._check_answer(column, answer)
        data = {column: value for column, value in row.values.items() if column != self.prompt_column}
        name = stable_hash(prompt_key(prompt), json.dumps(answer, default=str))
        return Problem(id=f"{Path(self.path).stem}-{name:016x}", prompt=prompt, answer=answer, data=data)

    def _check_answer(self, column: str, answer: object) -> None:
        """Refuse an answer that no completion can match, such as a dictionary or a list."""
        if answer is None:
            wanted = ", ".join(self.answer_columns)
            raise ValueError(
                f"no answer in {wanted}, and {type(self.reward).__name__} needs one: set task.answer_columns"
            )
        if isinstance(answer, Mapping):
            fields = [f"{column}.{name}" for name in answer]
            raise ValueError(
                f"{column} is no answer but has fields: set task.answer_columns to one of {', '.join(fields) or 'none'}"
            )
        if isinstance(answer, list):
            raise ValueError(
                f"{column} is a list, which no completion equals: give one answer, or judge with a PythonFunction"
            )
