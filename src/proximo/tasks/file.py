"""Problems from data files."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from proximo.data import Prompt, Row, stable_hash
from proximo.data.locating import data_name
from proximo.data.rows import check_share
from proximo.data.splits import prompt_key
from proximo.rewards import ExactMatch, Reward
from proximo.rewards.grading import grading
from proximo.rewards.protocol import Waiting
from proximo.rewards.scoring import begin_scores
from proximo.tasks.protocol import Complaints, RewardRange, Split, final_answer, reward_range, united
from proximo.tasks.reading import FileProblems
from proximo.tasks.row_index import CheckedPrompt
from proximo.tasks.sources.prompting import check_template, row_prompt, template_columns
from proximo.tasks.stored import LargeFile, StoredProblems, problems_of
from proximo.types import Completion, Grade, Problem


@dataclass(frozen=True)
class File:
    """Problems from data files, one per row. The prompt is text or a list of messages; rewards see the other
    columns."""

    path: str
    """A .jsonl, .json, .parquet, .csv, .tsv or .arrow file, a pattern like `train-*.parquet`, a folder or a hub id."""
    prompt_column: str = "prompt"
    """Column with the prompt. `a.b` reads field b of column a. The last reply in a column `messages` is left out."""
    answer_columns: tuple[str, ...] = ("answer", "solution", "ground_truth", "label")
    """Columns that may hold the answer; the first one present is used. `a.b` reads field b of column a."""
    reward: Reward | None = field(default_factory=ExactMatch)
    """Reward that grades the completions. None: only reward models and rules of the run grade them."""
    held_out: float | str = 0.1
    """Held-out data: a share of the prompts, chosen by hash, or the path of separate data. 1: all, none to train on."""
    skip_bad: bool = False
    """Skip and count bad rows instead of refusing the file."""
    keep_pass_rate: tuple[float, float] | None = None
    """Lowest and highest pass rate of the rows to train on, in the column pass_rate that `proximo rate` writes.
    None: all rows."""
    template: str = ""
    """Text of the prompt with columns in braces, as in `{question} Put the answer in \\boxed{}.`
    Empty: the prompt column as it is."""
    system: str = ""
    """System prompt, put before each prompt as a message of its own. Empty: none."""
    chat: bool | None = None
    """True: ask the prompt in the model's chat template, a text as a user's message. False: messages as their texts,
    without a template. None: messages in the template, texts as they are."""
    chat_template_kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking."""

    while_sampling = True

    def __post_init__(self) -> None:
        check_share(self.held_out, "task.held_out", may_be_all=True)
        if self.keep_pass_rate is not None and not 0 <= self.keep_pass_rate[0] <= self.keep_pass_rate[1] <= 1:
            raise ValueError(f"task.keep_pass_rate is {self.keep_pass_rate}: give two shares, the lower first")
        check_template(self.template, self.answer_columns)
        for name, value in self.chat_template_kwargs.items():
            if value in ("true", "false"):  # a template takes any text for true
                raise ValueError(
                    f"task.chat_template_kwargs has {name} as the text {value!r}: give {value.title()} on the command "
                    f"line, {value} without quotes in TOML"
                )

    def size(self, split: Split) -> int:
        return self._problems.size(split)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return self._problems.problem(index, split, seed)

    def check(self, complaints: Complaints) -> list[str]:
        """Refuse problems that the run cannot use; with skip_bad they are left out and returned."""
        return self._problems.check(complaints)

    @property
    def remarks(self) -> list[str]:
        """Lines for a person: rows that keep_pass_rate leaves out, how others are held out, and prompts that occur more
        than once."""
        lines = (self._kept_line, self._problems.again_line, self._problems.repeated_line)
        return [line for line in lines if line is not None]

    @property
    def _kept_line(self) -> str | None:
        """Number of rows that keep_pass_rate leaves out of training; None where it is not given."""
        if self.keep_pass_rate is None:
            return None
        low, high = self.keep_pass_rate
        dropped, kept = self._problems.not_kept, self._problems.size("train")
        return (
            f"{self.path}: task.keep_pass_rate leaves out {dropped} of {dropped + kept} training rows, whose pass rate "
            f"is not within {low} to {high}"
        )

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        with grading():
            return self.begin(problems, completions)()

    def begin(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Waiting[list[Grade]]:
        if self.reward is None:
            return lambda: [Grade(math.nan)] * len(completions)
        scores = begin_scores(self.reward, problems, completions)
        return lambda: [Grade(math.nan, applies=False) if score is None else Grade(score) for score in scores()]

    def final_answer(self, completion: Completion) -> str | None:
        """The answer as the reward reads it; None if the reward compares none."""
        return final_answer(self.reward, completion)

    def united(self, answers: Sequence[str]) -> list[str]:
        """The answers, with one text for those that the reward finds equal."""
        return united(self.reward, answers)

    @property
    def reward_range(self) -> RewardRange | None:
        return reward_range(self.reward)

    def reference(self, problem: Problem) -> str | None:
        return None if self.reward is None else self.reward.reference(problem)

    def ask(self, text: str) -> Problem:
        """A problem of one's own, asked as those of the file are: the text is the prompt column, or the one column of
        the template. With a template of several columns, which one text cannot fill, it is the whole prompt."""
        columns = template_columns(self.template) or {self.prompt_column}
        asked = self if len(columns) == 1 else replace(self, template="")
        row = Row("the question", dict.fromkeys(columns if len(columns) == 1 else {self.prompt_column}, text))
        return Problem("question", asked._prompt(row), None, chat_template_kwargs=self.chat_template_kwargs)

    def asked_in_training(self, keys: Collection[str]) -> list[Problem]:
        """Training problems whose prompts have one of these keys."""
        return self._problems.asked_in_training(keys)

    @property
    def storage_words(self) -> str:
        """Place of the rows, and what of them was checked, for a person."""
        return self._problems.storage_words

    @cached_property
    def _problems(self) -> FileProblems | StoredProblems:
        needed: dict[str, tuple[str, ...]] = {} if self.template else {"task.prompt_column": (self.prompt_column,)}
        if self._needs_answer:
            needed["task.answer_columns"] = self.answer_columns
        read_as = (self.prompt_column, self.answer_columns, self.template, self.system, self.chat, self.keep_pass_rate)
        settings = f"File {read_as} {type(self.reward).__name__ if self._needs_answer else ''}"
        file = LargeFile(self.path, self.held_out, self.skip_bad, self._problem, self._checked, settings, needed)
        return problems_of(file, self._keeps)

    @cached_property
    def _name(self) -> str:
        return data_name(self.path)

    @property
    def _needs_answer(self) -> bool:
        return self.reward is not None and self.reward.needs_answer

    def _keeps(self, problem: Problem) -> bool:
        """Tell whether to train on a problem, by its pass rate; one without is left out."""
        if self.keep_pass_rate is None:
            return True
        if "pass_rate" not in problem.data:
            raise ValueError(
                f"task.keep_pass_rate is {self.keep_pass_rate}, and {self.path} has no column pass_rate: "
                "`proximo rate` writes it"
            )
        rate, (low, high) = problem.data["pass_rate"], self.keep_pass_rate
        return rate is not None and low <= float(rate) <= high

    def _checked(self, row: Row) -> CheckedPrompt:
        """The prompt of a row from which a problem can be made."""
        if self.keep_pass_rate is not None:
            problem = self._problem(row)
            return CheckedPrompt(problem.prompt, self._keeps(problem))
        prompt = self._prompt(row)
        self._answer(row)
        return CheckedPrompt(prompt)

    def _problem(self, row: Row) -> Problem:
        prompt, answer = self._prompt(row), self._answer(row)
        data = {column: value for column, value in row.values.items() if column != self.prompt_column}
        name = stable_hash(prompt_key(prompt), json.dumps(answer, default=str))
        return Problem(
            id=f"{self._name}-{name:016x}",
            prompt=prompt,
            answer=answer,
            data=data,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _prompt(self, row: Row) -> Prompt:
        return row_prompt(row, self.prompt_column, template=self.template, system=self.system, chat=self.chat)

    def _answer(self, row: Row) -> Any:
        """The answer of a row; ValueError if the reward needs another one."""
        column = next((column for column in self.answer_columns if row.find(column) is not None), "")
        answer = row.find(column) if column else None
        if self._needs_answer:
            self._check_answer(column, answer)
        return answer

    def _check_answer(self, column: str, answer: object) -> None:
        """Refuse an answer that no completion can match, such as a dictionary or a list."""
        if answer is None:
            wanted = ", ".join(self.answer_columns)
            raise ValueError(
                f"no answer in {wanted}, and {type(self.reward).__name__} needs one: give the answer, or leave the row "
                "out"
            )
        if not str(answer).strip():
            raise ValueError(f"{column} is empty, and an empty completion would be right: give the answer")
        if isinstance(answer, Mapping):
            fields = [f"{column}.{name}" for name in answer]
            raise ValueError(
                f"{column} is no answer but has fields: set task.answer_columns to one of {', '.join(fields) or 'none'}"
            )
        if isinstance(answer, list):
            raise ValueError(
                f"{column} is a list, which no completion equals: give one answer, or judge with a PythonFunction"
            )
