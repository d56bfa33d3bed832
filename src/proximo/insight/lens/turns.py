"""Turns of stored episodes: what each was, which tokens belong to it, and how many calls failed."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proximo.types import Turn

LARGEST = 10**300
"""A reward beyond it is no float."""
DAMAGED = "it is damaged: its turns do not fit its tokens"
REPLY = "assistant"
"""Role of what the policy sampled; all other roles answer it."""
ANSWERS = {"tool": "result of a tool", "user": "answer of the environment"}


@dataclass(frozen=True)
class EpisodeCounts:
    """An episode in a few numbers."""

    replies: int
    """Turns of the policy."""
    calls: int
    """Calls of tools that were answered."""
    failed: int
    """Turns that failed: calls of tools that raised, were wrong or took too long, and steps of the environment."""


def counted(turns: Sequence[Turn]) -> EpisodeCounts:
    return EpisodeCounts(
        replies=sum(turn.role == REPLY for turn in turns),
        calls=sum(turn.role == "tool" for turn in turns),
        failed=sum(bool(turn.failed) for turn in turns),
    )


def starts(turns: Sequence[Turn]) -> list[int]:
    """First token of each turn. Results of several calls of one reply are written at once and share their tokens."""
    firsts, start, end = [], 0, 0
    for turn in turns:
        if turn.end != end:
            start, end = end, turn.end
        firsts.append(start)
    return firsts


def turn_at(turns: Sequence[Turn], token: int) -> int | None:
    """Index of the turn that a token belongs to; None where there are no turns."""
    return next((index for index, turn in enumerate(turns) if token < turn.end), None)


def turns_of_tokens(turns: Sequence[Turn], length: int) -> list[int]:
    """Index of each token's turn; -1 where there are no turns."""
    indices = [-1] * length
    for index, start in reversed(list(enumerate(starts(turns)))):
        indices[start : turns[index].end] = [index] * (turns[index].end - start)
    return indices


def place_in_words(turns: Sequence[Turn], token: int) -> str:
    """Example: "reply 2 of 3", "answer of the environment to reply 1"; empty where there are no turns."""
    index = turn_at(turns, token)
    if index is None:
        return ""
    replies = counted(turns[: index + 1]).replies
    if turns[index].role == REPLY:
        return f"reply {replies} of {counted(turns).replies}"
    return f"{ANSWERS.get(turns[index].role, turns[index].role)} to reply {replies}"


def episodes_in_words(rows: Sequence[Sequence[Turn]]) -> str:
    """Turns and calls of all episodes, to be put behind a sentence; empty where there are none."""
    counts = [counted(turns) for turns in rows if turns]
    if not counts:
        return ""
    replies, calls, failed = (sum(getattr(each, name) for each in counts) for name in ("replies", "calls", "failed"))
    text = f"; {len(counts)} episodes of {replies / len(counts):.1f} replies in the mean"
    return f"{text}, {calls} calls of tools, {failed} failed turns" if calls or failed else text


def transcript(turns: Sequence[Turn]) -> str:
    """All turns as one text."""
    return "\n".join(f"{turn.role}: {turn.text}" for turn in turns)


def read_turns(texts: Sequence[str | None], lengths: Sequence[int]) -> list[tuple[Turn, ...]]:
    """Turns from their JSON; ValueError if they are not what a run writes."""
    return [_turns(text, length) for text, length in zip(texts, lengths, strict=True)]


def _turns(text: str | None, length: int) -> tuple[Turn, ...]:
    turns = tuple(_turn(each) for each in _list(text))
    ends = [turn.end for turn in turns]
    if ends != sorted(ends) or (ends and not 0 <= ends[0] <= ends[-1] <= length):
        raise ValueError(DAMAGED)
    return turns


def _turn(entry: Any) -> Turn:
    if not isinstance(entry, dict):
        raise ValueError(DAMAGED)
    role, text, end, reward = (entry.get(name) for name in ("role", "text", "end", "reward"))
    if not isinstance(role, str) or not isinstance(text, str) or type(end) is not int:
        raise ValueError(DAMAGED)
    failed = str(entry.get("failed") or "")
    if reward is None and role == REPLY and failed:  # JSON has no NaN
        reward = math.nan
    if isinstance(reward, int) and abs(reward) > LARGEST:  # no float holds it
        raise ValueError(DAMAGED)
    return Turn(role, text, end, float(reward) if isinstance(reward, int | float) else None, failed)


def read_messages(texts: Sequence[str | None]) -> list[list[Mapping[str, str]]]:
    """Conversations from their JSON, with texts only; equal ones are read once."""
    known = {text: _messages(text) for text in set(texts)}
    return [known[text] for text in texts]


def _messages(text: str | None) -> list[Mapping[str, str]]:
    entries = [each for each in _list(text) if isinstance(each, dict)]
    return [{"role": str(each.get("role", "")), "text": _content(each.get("content"))} for each in entries]


def _content(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _list(text: str | None) -> list[Any]:
    try:
        entries = [] if text is None else json.loads(text)
    except RecursionError:
        raise ValueError(DAMAGED) from None
    if not isinstance(entries, list):
        raise ValueError(DAMAGED)
    return entries
