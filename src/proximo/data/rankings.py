"""Completions of one prompt in order of preference."""

import math
from dataclasses import dataclass
from typing import Any

from proximo.data.rows import Mistakes, Prompt, Row, read_completion, read_prompt, read_rows, shortened
from proximo.data.splits import prompt_key


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


def read_rankings(path: str, mistakes: Mistakes, *, field: str = "data.path") -> list[Ranking]:
    """Read rows of {prompt, chosen, rejected[, margin]}, {prompt, ranking}, or {chosen, rejected} as conversations."""
    rankings = []
    for row in read_rows(path, mistakes, field=field):
        try:
            rankings.append(ranking_of(row))
        except ValueError as error:
            mistakes.add(row.location, str(error))
    return rankings


def ranking_of(row: Row) -> Ranking:
    """The ranking of one row; ValueError says what is wrong with it."""
    if row.has("ranking"):
        ranked = row["ranking"]
        if not isinstance(ranked, list) or len(ranked) < 2:
            raise ValueError(f"ranking is {shortened(ranked)}: give at least two completions, the best first")
        completions = [read_completion(value, f"ranking[{number}]") for number, value in enumerate(ranked)]
        for number, text in enumerate(completions):
            if text in completions[:number]:
                raise ValueError(f"ranking[{completions.index(text)}] and ranking[{number}] are equal: remove one")
        prompt = read_prompt(row["prompt"])
    else:
        prompt, completions = _pair(row)
        if completions[0] == completions[1]:
            raise ValueError("chosen and rejected are equal: there is no preference to learn")
    return Ranking(row.location, prompt, tuple(completions), _margin(row, len(completions)))


def ranking_row(ranking: Ranking) -> dict[str, Any]:
    """The row that `ranking_of` reads: a pair as chosen and rejected, more completions as a list."""
    prompt = ranking.prompt if isinstance(ranking.prompt, str) else [dict(message) for message in ranking.prompt]
    match ranking.completions:
        case chosen, rejected:
            margin = {} if ranking.margin is None else {"margin": ranking.margin}
            return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **margin}
        case several:
            return {"prompt": prompt, "ranking": list(several)}


def _pair(row: Row) -> tuple[Prompt, list[str]]:
    chosen, rejected = row["chosen"], row["rejected"]
    if _is_conversation(chosen) and _is_conversation(rejected):
        return _diverging(row, chosen, rejected)
    return read_prompt(row["prompt"]), [read_completion(chosen, "chosen"), read_completion(rejected, "rejected")]


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1


def _diverging(row: Row, chosen: list[Any], rejected: list[Any]) -> tuple[Prompt, list[str]]:
    """Split two conversations that differ in their last turn; what comes before it is the prompt."""
    shared = read_prompt(chosen[:-1])
    if shared != read_prompt(rejected[:-1]):
        raise ValueError("chosen and rejected differ before their last turn: only their last turns may")
    if row.has("prompt"):
        # Some files repeat the prompt although the conversations contain it.
        prompt = read_prompt(row["prompt"])
        assert not isinstance(shared, str)
        if prompt != shared and prompt not in [message["content"] for message in shared]:
            raise ValueError("the prompt is not in the conversations chosen and rejected: leave one of them out")
    return shared, [read_completion(chosen[-1:], "chosen"), read_completion(rejected[-1:], "rejected")]


def _margin(row: Row, count: int) -> float | None:
    if not row.has("margin"):
        return None
    margin = row["margin"]
    if count > 2:
        raise ValueError(f"margin is {shortened(margin)} with {count} completions: only a pair may have a margin")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < math.inf:
        raise ValueError(f"margin is {shortened(margin)}: give a number that is not negative")
    return float(margin)
