"""Completions of one prompt in order of preference."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proximo.data.messages import read_messages
from proximo.data.rows import Mistakes, Prompt, Row, read_completion, read_prompt, read_rows, shortened
from proximo.data.splits import prompt_key
from proximo.system.opening import json_value
from proximo.types import Message


@dataclass(frozen=True)
class Ranking:
    location: str
    """File and row it comes from, for error messages."""
    prompt: Prompt
    completions: tuple[str, ...]
    """Completions, best first; at least two, all different."""
    margin: float | None = None
    """Margin by which the first is better; for pairs only."""

    @property
    def key(self) -> str:
        return prompt_key(self.prompt)


@dataclass(frozen=True)
class RankedColumns:
    """The columns of a ranking."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    ranking: str = "ranking"


MAX_CELL = 16 << 20
"""Maximum characters of a cell that is read as a list."""
REPLIES = ("\n\nAssistant:", "<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n")
"""Texts before a reply in conversations that are one text: of Anthropic's data, and of two chat templates."""


def read_rankings(
    path: str, mistakes: Mistakes, *, field: str = "data.path", columns: RankedColumns | None = None
) -> list[Ranking]:
    """Read rows of {prompt, chosen, rejected[, margin]}, {prompt, ranking}, or {chosen, rejected} as conversations, or
    as texts that begin alike."""
    rankings = []
    for row in read_rows(path, mistakes, field=field):
        try:
            rankings.append(ranking_of(row, columns))
        except ValueError as error:
            mistakes.add(row.location, str(error))
    return rankings


def ranking_of(row: Row, columns: RankedColumns | None = None) -> Ranking:
    """The ranking of one row; ValueError says what is wrong with it."""
    columns = columns or RankedColumns()
    if row.has(columns.ranking):
        ranked = as_list(row[columns.ranking])
        if not isinstance(ranked, list) or len(ranked) < 2:
            raise ValueError(f"{columns.ranking} is {shortened(ranked)}: give at least two completions, the best first")
        completions = [read_completion(value, f"{columns.ranking}[{number}]") for number, value in enumerate(ranked)]
        for number, text in enumerate(completions):
            if text in completions[:number]:
                first = completions.index(text)
                raise ValueError(f"{columns.ranking}[{first}] and {columns.ranking}[{number}] are equal: remove one")
        prompt = read_prompt(_given(row, columns.prompt))
    else:
        prompt, completions = _pair(row, columns)
        if completions[0] == completions[1]:
            raise ValueError("chosen and rejected are equal: there is no preference to learn")
    return Ranking(row.location, prompt, tuple(completions), _margin(row, len(completions)))


def as_list(value: Any) -> Any:
    """A list that a text spells as JSON, as cells of tables do; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("[") or len(value) > MAX_CELL:
        return value
    try:
        return json_value(value)
    except ValueError:
        return value


def ranking_row(ranking: Ranking) -> dict[str, Any]:
    """The row that `ranking_of` reads: a pair as chosen and rejected, more completions as a list."""
    prompt = ranking.prompt if isinstance(ranking.prompt, str) else [dict(message) for message in ranking.prompt]
    match ranking.completions:
        case chosen, rejected:
            margin = {} if ranking.margin is None else {"margin": ranking.margin}
            return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **margin}
        case several:
            return {"prompt": prompt, "ranking": list(several)}


def _given(row: Row, column: str) -> Any:
    """The value of a column; where there is none, ValueError says how to name it."""
    if column not in row.values:
        flags = " ".join(f"`{name}_column=NAME`" for name in ("prompt", "chosen", "rejected"))
        known = ", ".join(row.values) or "an empty row"
        raise ValueError(f"no column {column!r}, only {known}: choose with {flags}, or `ranking_column=NAME`")
    return row[column]


def _pair(row: Row, columns: RankedColumns) -> tuple[Prompt, list[str]]:
    chosen, rejected = _given(row, columns.chosen), _given(row, columns.rejected)
    if _is_conversation(chosen) and _is_conversation(rejected):
        shown = (read_messages(chosen, columns.chosen), read_messages(rejected, columns.rejected))
        return _diverging(row, columns, *shown)
    texts = [read_completion(chosen, columns.chosen), read_completion(rejected, columns.rejected)]
    if columns.prompt not in row.values and all(isinstance(value, str) for value in (chosen, rejected)):
        return _begun_alike(texts)
    return read_prompt(_given(row, columns.prompt)), texts


def _begun_alike(texts: list[str]) -> tuple[Prompt, list[str]]:
    """Split two texts where they part: behind the last mark of a reply, or before the word in which they differ."""
    chosen, rejected = texts
    parted = (index for index, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other)
    alike = chosen[: next(parted, min(map(len, texts)))]
    replies = [alike.rfind(mark) + len(mark) for mark in REPLIES if mark in alike]
    start = max(replies or [space.start() for space in re.finditer(r"\s+", alike)], default=0)
    if not start:
        raise ValueError("no column 'prompt', and chosen and rejected begin differently: give the prompt they reply to")
    return alike[:start], [read_completion(chosen[start:], "chosen"), read_completion(rejected[start:], "rejected")]


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1


def _diverging(
    row: Row, columns: RankedColumns, chosen: Sequence[Message], rejected: Sequence[Message]
) -> tuple[Prompt, list[str]]:
    """Split two conversations that differ in their last turn; what comes before it is the prompt."""
    shared = tuple(chosen[:-1])
    if shared != tuple(rejected[:-1]):
        raise ValueError("chosen and rejected differ before their last turn: only their last turns may")
    if row.has(columns.prompt):
        # Some files repeat the prompt although the conversations contain it.
        prompt = read_prompt(row[columns.prompt])
        if prompt != shared and prompt not in [message["content"] for message in shared]:
            raise ValueError("the prompt is not in the conversations chosen and rejected: leave one of them out")
    return shared, [read_completion([*chosen[-1:]], "chosen"), read_completion([*rejected[-1:]], "rejected")]


def _margin(row: Row, count: int) -> float | None:
    if not row.has("margin"):
        return None
    margin = row["margin"]
    if count > 2:
        raise ValueError(f"margin is {shortened(margin)} with {count} completions: only a pair may have a margin")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < math.inf:
        raise ValueError(f"margin is {shortened(margin)}: give a number that is not negative")
    return float(margin)
