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
    content = {
        "run": overview.about(run, {}) | {"path": run.name},
        "health": overview.health(run, {}),
        "rows": {name: _rows(run, name) for name in overview.FILES},
    }
    if steps:
        content["steps"] = reader.steps(run, {}) | {"steps": list(steps), "stored": len(run.steps())}
    return content


def _rows(run: RunFolder, name: str) -> list[str]:
    """All lines of a file."""
    data, start = b"", 0
    while (chunk := overview.read_lines(run.path / overview.FILES[name], start))[1] > start:
        data, start = data + chunk[0], chunk[1]
    return data.decode(errors="replace").splitlines()


def algorithms_of(run: RunFolder, step: int) -> list[str]:
    """Algorithms under which a step is stored, the run's own first."""
    first, tokens = own_name(run.config), int(run.step(step).batch.lengths.sum())
    return [first, *(name for name in FIVE if name != first)] if tokens <= MAX_COMPARED else [first]


def of_step(run: RunFolder, number: int, name: str) -> dict[str, Any]:
    """A step under an algorithm: its summary, all its groups, the table of algorithms and the reasons of tokens."""
    query = {"step": str(number), "as": name}
    summary = reader.step(run, query)
    look = looked(run, query)
    run_look = None if look.is_own else looked(run, query, as_run=True)
    groups = [each["group"] for each in summary["groups"]]
    content = {
        "step": summary,
        "groups": {str(group): reader.group(run, query | {"group": str(group)}) for group in groups},
        "lens": reader.lens(run, {"step": str(number)}) if look.is_own else None,
        "why": None,
    }
    if int(look.step.batch.lengths.sum()) <= MAX_WORDS:
        content["why"] = _reasons(look, run_look)
    return content


def _reasons(look: Look, run_look: Look | None) -> dict[str, Any]:
    """The answers of `/api/why` for every token. Equal sentences are stored once, and tokens have their numbers."""
    sentences: dict[str, int] = {}
    rows = []
    for row, length in enumerate(look.step.batch.lengths.tolist()):
        rows.append([_reason(look, run_look, row, token, sentences) for token in range(length)])
    return {"sentences": list(sentences), "rows": rows}


def _reason(look: Look, run_look: Look | None, row: int, token: int, sentences: dict[str, int]) -> list[int]:
    texts = [
        why(look.step, look.seen, row, token),
        place_in_words(look.step.turns[row], token),
        "" if run_look is None else why(run_look.step, run_look.seen, row, token),
    ]
    return [sentences.setdefault(text, len(sentences)) for text in texts]


def problems_of(steps: Mapping[int, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Steps and groups that answered each problem; `steps` are the stored ones under the run's own algorithm."""
    by_problem: dict[str, list[dict[str, Any]]] = {}
    for number, content in steps.items():
        means = {each["group"]: each["reward"] for each in content["step"]["groups"]}
        for group in content["groups"].values():
            entry = {"step": number, "group": group["group"], "reward": means[group["group"]]}
            by_problem.setdefault(group["problem"], []).append(entry | {"rows": len(group["rows"])})
    return by_problem
