"""The answers of the page's server that a bundle holds, as values for JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from proximo.insight.folder import RunFolder
from proximo.insight.lens.explanations import why
from proximo.insight.lens.replay import FIVE, own_name
from proximo.insight.lens.turns import place_in_words
from proximo.insight.page import overview, reader
from proximo.insight.page.lenses import Look, looked

MAX_WORDS, MAX_COMPARED = 50_000, 300_000
"""Tokens of a step up to which the reason of each is stored, and up to which the five algorithms are."""


def of_run(run: RunFolder, steps: Sequence[int]) -> dict[str, Any]:
    """A run without its rollouts: settings, findings, all rows, and what leads to the steps."""
    told = {
        "run": overview.about(run, {}) | {"path": run.name},
        "health": overview.health(run, {}),
        "rows": {name: _rows(run, name) for name in overview.FILES},
    }
    if steps:
        told["steps"] = reader.steps(run, {}) | {"steps": list(steps), "stored": len(run.steps())}
    return told


def _rows(run: RunFolder, name: str) -> list[str]:
    """All lines of a file."""
    data, start = b"", 0
    while (found := overview.read_lines(run.path / overview.FILES[name], start))[1] > start:
        data, start = data + found[0], found[1]
    return data.decode(errors="replace").splitlines()


def algorithms_of(run: RunFolder, step: int) -> list[str]:
    """Algorithms under which a step is stored, the run's own first."""
    own, tokens = own_name(run.config), int(run.step(step).batch.lengths.sum())
    return [own, *(name for name in FIVE if name != own)] if tokens <= MAX_COMPARED else [own]


def of_step(run: RunFolder, number: int, name: str) -> dict[str, Any]:
    """A step under an algorithm: its summary, all its groups, the table of algorithms and the reasons of tokens."""
    query = {"step": str(number), "as": name}
    told = reader.step(run, query)
    look = looked(run, query)
    own = None if look.own else looked(run, query, own=True)
    groups = [each["group"] for each in told["groups"]]
    found = {
        "step": told,
        "groups": {str(group): reader.group(run, query | {"group": str(group)}) for group in groups},
        "lens": reader.lens(run, {"step": str(number)}) if look.own else None,
        "why": None,
    }
    if int(look.step.batch.lengths.sum()) <= MAX_WORDS:
        found["why"] = _reasons(look, own)
    return found


def _reasons(look: Look, own: Look | None) -> dict[str, Any]:
    """What `/api/why` says of every token. Equal sentences are stored once, and tokens have their numbers."""
    sentences: dict[str, int] = {}
    rows = []
    for row, length in enumerate(look.step.batch.lengths.tolist()):
        rows.append([_reason(look, own, row, token, sentences) for token in range(length)])
    return {"sentences": list(sentences), "rows": rows}


def _reason(look: Look, own: Look | None, row: int, token: int, sentences: dict[str, int]) -> list[int]:
    texts = [
        why(look.step, look.seen, row, token),
        place_in_words(look.step.turns[row], token),
        "" if own is None else why(own.step, own.seen, row, token),
    ]
    return [sentences.setdefault(text, len(sentences)) for text in texts]


def problems_of(steps: Mapping[int, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Where each problem was answered in the stored steps; `steps` are those under the run's own algorithm."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number, told in steps.items():
        means = {each["group"]: each["reward"] for each in told["step"]["groups"]}
        for group in told["groups"].values():
            place = {"step": number, "group": group["group"], "reward": means[group["group"]]}
            found.setdefault(group["problem"], []).append(place | {"rows": len(group["rows"])})
    return found
