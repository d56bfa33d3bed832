"""Problems from a JSONL or Parquet file."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from proximo.data import Mistakes, Row, read_prompt, read_rows, read_splits, stable_hash
from proximo.data.rows import check_share
from proximo.data.splits import prompt_key, refuse_empty
from proximo.rewards import ExactMatch, Reward
from proximo.tasks.draws import shuffled
from proximo.tasks.protocol import Split
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

    def __post_init__(self) -> None:
        check_share(self.held_out, "task.held_out")

    @property
    def while_sampling(self) -> bool:
        return self.reward is None or self.reward.while_sampling

    def size(self, split: Split) -> int:
        return len(self._splits[split])

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        rows = self._splits[split]
        # The held-out set keeps its order: evaluations look at the same problems for every seed.
        return rows[shuffled(index, len(rows), seed) if split == "train" else index % len(rows)].problem

    def check(self, complaint: Callable[[Problem], str | None]) -> list[str]:
        """Ask of every problem whether the run can use it. Those it cannot are refused at once, each with its row;
        with `skip_bad` they leave the task, and what was left out, for this or another reason, is returned."""
        mistakes = Mistakes()
        usable: dict[Split, list[_Placed]] = {"train": [], "held_out": []}
        for split, rows in self._splits.items():
            for row in rows:
                what = complaint(row.problem)
                if what is None:
                    usable[split].append(row)
                else:
                    mistakes.add(row.place, what)
        if not self.skip_bad:
            mistakes.refuse(f"task.path is {self.path!r}, with bad rows:")
        self._splits.update(usable)
        self._refuse_empty()
        return [*self._left_out, *mistakes]

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        if self.reward is None:
            return [Grade(math.nan)] * len(completions)
        return [Grade(outcome) for outcome in self.reward(problems, completions)]

    def reference(self, problem: Problem) -> str | None:
        return None if self.reward is None else self.reward.reference(problem)

    @cached_property
    def _splits(self) -> dict[Split, list["_Placed"]]:
        """Everything is read at once, so that all bad rows are known before anything trains."""
        mistakes = Mistakes()
        train, held_out = read_splits(self._read, self.path, self.held_out, mistakes, field="task")
        if not self.skip_bad:
            mistakes.refuse(f"task.path is {self.path!r}, with bad rows:")
        self._left_out.extend(mistakes)
        refuse_empty(len(train), len(held_out), self.path, self.held_out, field="task")
        return {"train": train, "held_out": held_out}

    @cached_property
    def _left_out(self) -> list[str]:
        """Rows that could not be read."""
        return []

    def _refuse_empty(self) -> None:
        train, held_out = (len(self._splits[split]) for split in ("train", "held_out"))
        refuse_empty(train, held_out, self.path, self.held_out, field="task")

    def _read(self, path: str, mistakes: Mistakes, *, field: str) -> list["_Placed"]:
        problems = []
        for row in read_rows(path, mistakes, field=field):
            try:
                problems.append(_Placed(row.place, self._problem(row)))
            except ValueError as error:
                mistakes.add(row.place, str(error))
        return problems

    def _problem(self, row: Row) -> Problem:
        if self.prompt_column not in row.values:
            raise ValueError(f"no column {self.prompt_column!r}, only {', '.join(row.values)}: set task.prompt_column")
        prompt = read_prompt(row[self.prompt_column])
        answer = next((row[column] for column in self.answer_columns if row.has(column)), None)
        if answer is None and self.reward is not None and self.reward.needs_answer:
            wanted = ", ".join(self.answer_columns)
            raise ValueError(
                f"no answer in {wanted}, and {type(self.reward).__name__} needs one: set task.answer_columns"
            )
        data = {column: value for column, value in row.values.items() if column != self.prompt_column}
        name = stable_hash(prompt_key(prompt), json.dumps(answer, default=str))
        return Problem(id=f"{Path(self.path).stem}-{name:016x}", prompt=prompt, answer=answer, data=data)


@dataclass(frozen=True)
class _Placed:
    """A problem and the row it comes from."""

    place: str
    problem: Problem

    @property
    def key(self) -> str:
        return prompt_key(self.problem.prompt)
