"""Search for a text in the prompts and completions of all steps of a run."""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from proximo.insight.folder import RunFolder
from proximo.insight.lens.turns import read_turns, transcript
from proximo.runs.rollout_files import read_columns
from proximo.system.lines import plain

SECONDS = 1.0
"""Time after which a response ends; the next request continues."""
MAX_HITS, AROUND = 200, 60
"""Maximum hits of a response; characters shown before and after a hit."""
COLUMNS = ("group", "sibling", "reward", "prompt", "text", "turns")


def found_in(run: RunFolder, wanted: str, start: int) -> dict[str, Any]:
    """Completions from step `start` on that contain a text, ignoring case; `next` is the step to continue with."""
    steps, end, hits = run.steps(), time.monotonic() + SECONDS, []
    for index, step in enumerate(each for each in steps if each >= start):
        if index and (len(hits) >= MAX_HITS or time.monotonic() > end):
            return {"found": hits[:MAX_HITS], "next": step, "steps": len(steps)}
        hits += _hits(run, step, wanted.casefold())
    return {"found": hits[:MAX_HITS], "next": None, "steps": len(steps)}


def _hits(run: RunFolder, step: int, wanted: str) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(_rows(run, step)):
        for text in (_completion(row), row["prompt"]):
            start = text.casefold().find(wanted)
            if start >= 0:
                end = start + len(wanted)
                yield {
                    "step": step,
                    "group": row["group"],
                    "row": number,
                    "reward": plain(row["reward"]),
                    "before": text[max(start - AROUND, 0) : start],
                    "text": text[start:end],
                    "after": text[end : end + AROUND],
                }
                break


def _completion(row: dict[str, Any]) -> str:
    """A completion; all turns of an episode."""
    turns = read_turns([row.get("turns")], [1 << 62])[0]
    return transcript(turns) or row["text"]


def _rows(run: RunFolder, step: int) -> list[dict[str, Any]]:
    """The texts of a step, from their columns alone; none if its file is damaged, which its own page reports."""
    with suppress(OSError, ValueError):
        return read_columns(run.step_file(step), COLUMNS).to_pylist()
    return []
