"""Data of known shapes: which columns hold prompt and answer, and how answers are compared. Always said in one line."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from proximo.data import Mistakes, Row, read_rows
from proximo.data.locating import split_patterns
from proximo.data.rows import refuse_absent
from proximo.data.stored import stored_rows
from proximo.rewards import ExactMatch, MathVerify, Reward
from proximo.rewards.text import last_number
from proximo.tasks.file import File

PROMPTS = ("prompt", "question", "problem", "messages", "instruction", "query")
ANSWERS = (
    "reward_model.ground_truth",
    "ground_truth",
    "answer",
    "solution",
    "label",
    "final_answer",
    "expected_answer",
    "target",
)
"""Columns that may hold the prompt or the answer."""
LOOKED_AT = 4096
"""Rows of a large file that are looked at."""
MARK = "####"
"""Stands before the final number in GSM8K's answers."""
_NUMBER = re.compile(r"[-+]?[$€£¥]?[\d,]*\.?\d+(?:[eE][-+]?\d{1,2})?", re.ASCII)
_QUOTIENT = re.compile(r"[-+]?\d+ ?/ ?[1-9]\d*|[-+]?[\d,]*\.?\d+ ?\\?%", re.ASCII)
"""A fraction or a percentage, whose last number alone is not its value."""
_LATEX = re.compile(r"\\[A-Za-z]+|\$.+\$|\\[(\[]")


@dataclass(frozen=True)
class Chosen:
    """Choices of a person, which need not be recognised. None: not decided."""

    prompt_column: str | None = None
    answer_columns: tuple[str, ...] | None = None
    held_out: float | str | None = None
    template: str = ""
    system: str = ""
    chat: bool | None = None
    chat_template_kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    has_reward: bool = False
    """True if something else than the data's answers is rewarded, such as a function."""
    only_watched: bool = False
    """True if a reward model is rewarded, and the verdict on the data's answers is only logged: where there are any."""

    @property
    def needs_answers(self) -> bool:
        return not self.has_reward and not self.only_watched


def recognise(data: str, chosen: Chosen | None = None, *, chat: bool = False) -> tuple[File, str]:
    """The task that data mean, and a line that says how they were read; ValueError, in one line with what to give,
    where they can be read in two ways or in none. `chat`: whether the model has a chat template.

    Example: task, line = recognise("gsm8k.jsonl")
    """
    chosen = chosen or Chosen()
    path, tests = split_patterns(data, "data")
    held_out = _held_out(data, tests, chosen)
    mistakes = Mistakes()  # where other rows are good, the task reports or skips them
    stored = stored_rows(path, "data")
    rows = stored.spread(LOOKED_AT) if stored else read_rows(path, mistakes, field="data")
    if not rows:
        mistakes.refuse(f"data is {data!r}, in which no row can be read:")
        raise ValueError(f"data is {data!r}: it has no rows")
    prompt = _prompt_column(data, rows, chosen)
    # Rows without a prompt are bad rows, from which nothing follows for the others.
    asked = [row for row in rows if chosen.template or row.find(prompt) is not None] or rows
    answers = _answer_columns(data, asked, chosen)
    reward, how = _reward(data, asked, answers, chosen)
    is_text = bool(chosen.template) or not any(isinstance(row.find(prompt), list) for row in asked)
    is_question = chat and prompt.rpartition(".")[2] != "prompt"
    asks = is_text and (is_question if chosen.chat is None else chosen.chat)
    defaults = File(path)
    task = File(
        path,
        prompt_column=prompt,
        answer_columns=answers or defaults.answer_columns,
        reward=reward,
        held_out=defaults.held_out if held_out is None else held_out,
        template=chosen.template,
        system=chosen.system,
        # Where nothing is decided, a system prompt makes a conversation of a text, too.
        chat=chosen.chat if chosen.chat is False or not is_text else asks or (None if chosen.system else False),
        chat_template_kwargs=chosen.chat_template_kwargs,
    )
    parts = [
        f"{_shape(asked, prompt, answers)}: prompt in {prompt}"
        + (f", answer in {answers[0]}" if answers else "")
        + (
            ", formatted with the chat template"
            if asks
            else ", without a chat template" * (chosen.chat is False and not is_text)
        ),
        how,
        f"{task.held_out:.0%} of the prompts held out" if isinstance(task.held_out, float) else f"held out: {held_out}",
    ]
    number = f"{len(stored):,} rows, {len(rows):,} of them looked at" if stored else f"{len(rows)} rows"
    return task, f"data {path}: {number}, {'; '.join(filter(None, parts))}"


def _held_out(data: str, tests: Sequence[str], chosen: Chosen) -> float | str | None:
    if chosen.held_out is not None or not tests:
        return chosen.held_out
    if len(tests) > 1:
        raise ValueError(
            f"data is {data!r}, which has several test files, {' and '.join(tests)}: choose with "
            f"`task.held_out={tests[0]}`"
        )
    return tests[0]


def _prompt_column(data: str, rows: Sequence[Row], chosen: Chosen) -> str:
    if chosen.prompt_column is not None:
        if not chosen.template:
            refuse_absent(rows, [chosen.prompt_column], f"data is {data!r}", "task.prompt_column")
        return chosen.prompt_column
    known = ([column for column in PROMPTS if row.find(column) is not None] for row in rows)
    columns = next(filter(None, known), [])  # of the first row that has any
    if len(columns) > 1 and not chosen.template:
        raise ValueError(
            f"data is {data!r}, whose prompt may be in {' or '.join(columns)}: choose with "
            + " or ".join(f"`task.prompt_column={column}`" for column in columns)
        )
    if not columns and not chosen.template:
        raise ValueError(
            f"data is {data!r}, whose columns are {', '.join(rows[0].values)}: choose the one with the prompt, "
            "`task.prompt_column=NAME`"
        )
    return columns[0] if columns else "prompt"


def _answer_columns(data: str, rows: Sequence[Row], chosen: Chosen) -> tuple[str, ...]:
    """The column with the answers; none where no column under such a name has a value."""
    if chosen.answer_columns is not None:
        refuse_absent(rows, chosen.answer_columns, f"data is {data!r}", "task.answer_columns")
        return chosen.answer_columns
    columns = [column for column in ANSWERS if all(_is_answer(row.find(column)) for row in rows)]
    if not columns and chosen.needs_answers:  # rows without an answer are bad rows, which the task names one by one
        columns = [column for column in ANSWERS if any(row.find(column) is not None for row in rows)]
    if len(columns) > 1 and chosen.needs_answers:
        raise ValueError(
            f"data is {data!r}, whose answer may be in {' or '.join(columns)}: choose with "
            + " or ".join(f"`task.answer_columns={column}`" for column in columns)
        )
    return tuple(columns)


def _is_answer(value: Any) -> bool:
    return value is not None and not isinstance(value, Mapping | list) and bool(str(value).strip())


def _reward(data: str, rows: Sequence[Row], columns: Sequence[str], chosen: Chosen) -> tuple[Reward | None, str]:
    """Find how completions are graded, and say it in words."""
    if chosen.has_reward:
        return None, ""
    if chosen.only_watched:
        return _watched(data, rows, columns, chosen)
    if not columns:
        raise ValueError(
            f"data is {data!r}, with no answers in {', '.join(ANSWERS)}: choose their column with "
            "`task.answer_columns=NAME`, or give a reward: `task.reward.type=PythonFunction` "
            "`task.reward.path=FILE.py:FUNCTION`; with a reward model none is needed where `rewards.task=0`"
        )
    values = [next((row.find(column) for column in columns if row.find(column) is not None), None) for row in rows]
    texts = [str(value).strip() for value in values if _is_answer(value)]
    if not texts:  # the task says what is wrong with each row
        return ExactMatch(), ""
    finals = [text.rpartition(MARK)[2].strip() for text in texts]
    numbers = [_NUMBER.fullmatch(text) is not None and last_number(text) is not None for text in finals]
    if all(MARK in text for text in texts) and all(numbers):
        return ExactMatch(last_number=True), f"answers end in {MARK}: comparing last numbers"
    if all(numbers):
        return ExactMatch(last_number=True), "answers are numbers: comparing last numbers"
    quotients = [text for text in finals if _QUOTIENT.fullmatch(text)]
    if quotients and len(quotients) + sum(numbers) == len(texts):
        return MathVerify(), (
            f"answers are numbers, {len(quotients)} of {len(texts)} as fractions or percentages such as "
            f"{quotients[0]}: comparing with math-verify, for which 3/4 equals 0.75, and 12% equals 0.12 and 12"
        )
    latex = sum(_LATEX.search(text) is not None or MARK in text for text in texts)
    if latex:
        some = "answers" if latex == len(texts) else f"{latex} of {len(texts)} answers"
        return MathVerify(), f"{some} are LaTeX: comparing with math-verify"
    some = f"{numbers.count(False)} of {len(texts)} answers are no numbers" if any(numbers) else "answers are texts"
    return ExactMatch(), f"{some}: a completion must equal its answer"


def _watched(data: str, rows: Sequence[Row], columns: Sequence[str], chosen: Chosen) -> tuple[Reward | None, str]:
    """Find how completions are graded beside a reward model, which is the whole reward."""
    if columns and (len(columns) == 1 or chosen.answer_columns is not None):
        reward, how = _reward(data, rows, columns, replace(chosen, only_watched=False))
        return reward, f"{how}, which is logged and not rewarded"
    some = f"answers may be in {' or '.join(columns)} (`task.answer_columns=NAME`)" if columns else "no answers"
    return None, f"{some}: the reward model's score is the reward, and there is no other"


def _shape(rows: Sequence[Row], prompt: str, answers: Sequence[str]) -> str:
    """Name whose shape the rows have, by their columns."""
    first, answer = rows[0], answers[0] if answers else ""
    if first.find("reward_model.ground_truth") is not None:
        return "verl's shape"
    if prompt == "messages" and answer == "ground_truth":
        return "open-instruct's shape"
    if prompt == "question" and answer == "answer" and MARK in str(first.find(answer)):
        return "GSM8K's shape"
    if answer == "answer" and (
        prompt == "question" or first.find("info") is not None or first.find("task") is not None
    ):
        return "verifiers' shape"
    is_structured = isinstance(first.find("ground_truth"), Mapping | list)  # for a function of somebody's own
    return "TRL's shape" if prompt == "prompt" and not is_structured else "a table"
