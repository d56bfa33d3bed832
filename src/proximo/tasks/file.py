"""Problems from a JSONL or Parquet file."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from proximo.rewards import ExactMatch, Reward
from proximo.tasks.draws import shuffled, stable_hash
from proximo.tasks.protocol import Split
from proximo.types import Completion, Grade, Message, Problem

_SHOWN = 20
"""Bad rows that an error spells out."""


@dataclass(frozen=True)
class File:
    """One problem to a row. The prompt is a text or a list of messages; all other columns go to the reward."""

    path: str
    """A .jsonl or .parquet file."""
    prompt_column: str = "prompt"
    answer_columns: tuple[str, ...] = ("answer", "solution", "ground_truth", "label")
    """The first of these that a row has is its answer."""
    reward: Reward = field(default_factory=ExactMatch)
    """Judges the completions."""
    held_out: float | str = 0.1
    """The share of prompts kept for evaluation, chosen by a hash of the prompt; or the path of a file of its own."""

    def __post_init__(self) -> None:
        if not isinstance(self.held_out, str) and not 0 <= self.held_out < 1:
            raise ValueError(f"task.held_out is {self.held_out}: give a share from 0 up to 1, or a path")

    def size(self, split: Split) -> int:
        return len(self._splits[split])

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        problems = self._splits[split]
        # The held-out set keeps its order: evaluations look at the same problems for every seed.
        return problems[shuffled(index, len(problems), seed) if split == "train" else index % len(problems)]

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        return [Grade(outcome) for outcome in self.reward(problems, completions)]

    def reference(self, problem: Problem) -> str | None:
        return self.reward.reference(problem)

    @cached_property
    def _splits(self) -> dict[Split, list[Problem]]:
        """Everything is read at once, so that all bad rows are known before anything trains."""
        mistakes: list[str] = []
        rows = list(self._problems(self.path, mistakes))
        splits: dict[Split, list[Problem]]
        if isinstance(self.held_out, str):
            kept = [problem for _, problem in self._problems(self.held_out, mistakes)]
            known = {_prompt_key(problem) for problem in kept}
            for place, problem in rows:
                if _prompt_key(problem) in known:
                    mistakes.append(f"{place}: this prompt is also in {self.held_out}: remove one of them")
            splits = {"train": [problem for _, problem in rows], "held_out": kept}
        else:
            splits = {"train": [], "held_out": []}
            for _, problem in rows:
                splits["held_out" if self._keeps(problem) else "train"].append(problem)
        if mistakes:
            more = [f"and {len(mistakes) - _SHOWN} more"] if len(mistakes) > _SHOWN else []
            raise ValueError("\n".join([f"task.path is {self.path!r}, with bad rows:", *mistakes[:_SHOWN], *more]))
        for split, problems in splits.items():
            if not problems and (split == "train" or self.held_out != 0):
                raise ValueError(
                    f"task.path is {self.path!r} and task.held_out {self.held_out}: no row is left for {split}"
                )
        return splits

    def _keeps(self, problem: Problem) -> bool:
        """By a hash of the prompt: rows with equal prompts stay together, and rows added later move nothing."""
        return stable_hash("held_out", _prompt_key(problem)) < float(self.held_out) * 2**64

    def _problems(self, path: str, mistakes: list[str]) -> Iterator[tuple[str, Problem]]:
        for place, row in _rows(path, mistakes):
            try:
                yield place, self._problem(row)
            except ValueError as error:
                mistakes.append(f"{place}: {error}")

    def _problem(self, row: Any) -> Problem:
        if not isinstance(row, Mapping):
            raise ValueError(f"{_shortened(row)} is not an object with columns")
        if self.prompt_column not in row:
            raise ValueError(f"no column {self.prompt_column!r}, only {', '.join(row)}: set task.prompt_column")
        prompt = _prompt(row[self.prompt_column])
        answer = next((row[column] for column in self.answer_columns if row.get(column) is not None), None)
        if answer is None and self.reward.needs_answer:
            wanted = ", ".join(self.answer_columns)
            raise ValueError(
                f"no answer in {wanted}, and {type(self.reward).__name__} needs one: set task.answer_columns"
            )
        data = {column: value for column, value in row.items() if column != self.prompt_column}
        name = stable_hash(json.dumps(prompt), json.dumps(answer, default=str))
        return Problem(id=f"{Path(self.path).stem}-{name:016x}", prompt=prompt, answer=answer, data=data)


def _rows(path: str, mistakes: list[str]) -> Iterator[tuple[str, Any]]:
    """Every row, with the place to name it by."""
    if not Path(path).is_file():
        raise ValueError(f"task.path is {path!r}: there is no such file")
    match Path(path).suffix:
        case ".jsonl":
            # Split at line feeds alone: a JSON string may hold other line separators as they are.
            for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").split("\n"), start=1):
                if line.strip():
                    try:
                        yield f"{path}:{number}", json.loads(line)
                    except ValueError as error:
                        mistakes.append(f"{path}:{number}: not JSON, {error}")
        case ".parquet":
            # Imported late, because only this format needs it.
            from pyarrow import parquet

            for number, row in enumerate(parquet.read_table(path).to_pylist(), start=1):
                yield f"{path}, row {number}", row
        case suffix:
            raise ValueError(
                f"task.path is {path!r}: {suffix or 'no suffix'} is not a known format, use .jsonl or .parquet"
            )


def _prompt(value: Any) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        # Parquet fills a key that only some messages have with None.
        return tuple({key: text for key, text in message.items() if text is not None} for message in value)
    raise ValueError(f"the prompt is {_shortened(value)}: give a text, or a list of messages with role and content")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _prompt_key(problem: Problem) -> str:
    return json.dumps(problem.prompt)


def _shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
