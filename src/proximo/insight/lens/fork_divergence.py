"""The point where a fork parts from its parent: the first update that differs, and the first draw that does.

A fork begins with its parent's weights, data cursor and random numbers, so that its first step has the same prompts and
draws. Its first update is another; from then on the same random numbers choose other tokens.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from proximo.insight.folder import RunFolder
from proximo.runs.files import METRICS
from proximo.runs.forking import parent_of
from proximo.runs.rollout_files import read_columns

BEFORE, MAX_PIECE = 80, 80
"""Maximum characters shown before the first differing token, and of the token itself."""
COLUMNS = ("problem", "group", "sibling", "prompt")

Rows = dict[tuple[str, int, int], dict[str, Any]]
"""Completions of a step by problem, number among its siblings, and how often the problem was drawn before in it."""


@dataclass(frozen=True)
class Token:
    """A token that was drawn: its text, its position in the rollouts, and the log-prob with which it was drawn."""

    text: str
    logprob: float | None
    group: int
    row: int
    """Row of the step's file."""


@dataclass(frozen=True)
class Draws:
    """The first step for which a fork drew something else than its parent."""

    step: int
    same_prompts: int
    """Prompts that both drew."""
    prompts: int
    """Prompts of the fork."""
    same: int
    """Completions that are equal, token by token."""
    completions: int
    """Completions of the fork to prompts that both drew."""
    problem: str
    """Problem of the first completion that differs; empty if no prompt is the same."""
    prompt: str
    before: str
    """End of what both wrote."""
    token: int
    """Index of the first token that differs."""
    ours: Token | None
    """The fork's; None where its completion ends before."""
    theirs: Token | None
    """The parent's."""


@dataclass(frozen=True)
class Parting:
    """Point where a fork parts from its parent."""

    at: int
    """Step after which the fork begins."""
    until: int
    """Last step that both have done."""
    update: int | None
    """First step whose metrics differ; None: none does."""
    metrics: tuple[str, ...]
    """Names of the metrics that differ there."""
    draws: Draws | None
    """First step whose prompts or draws differ; None: none that both have stored."""


def fork_point(run: RunFolder, other: RunFolder) -> int | None:
    """The step after which a run was forked from another; None if it was not."""
    origin = parent_of(run.path.resolve(), run.record)
    return origin[1] if origin is not None and origin[0] == other.path.resolve() else None


def parting(fork: RunFolder, parent: RunFolder) -> Parting:
    """Compare a fork with its parent, step by step from where it begins; ValueError where it is not that run's."""
    if (at := fork_point(fork, parent)) is None:
        raise ValueError(f"{fork.name} is no fork of {parent.name}: its run.json says where it comes from")
    ours, theirs = (
        {row["step"]: row for row in run.rows(METRICS) if row.get("step", -1) > at and "outcome" in row}
        for run in (fork, parent)
    )
    shared = sorted(ours.keys() & theirs.keys())
    other = next((step for step in shared if ours[step] != theirs[step]), None)
    names = () if other is None else tuple(_differing(ours[other], theirs[other]))
    return Parting(at, shared[-1] if shared else at, other, names, _first_draws(fork, parent, shared))


def _differing(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def _first_draws(fork: RunFolder, parent: RunFolder, steps: Sequence[int]) -> Draws | None:
    for step in steps:
        ours, theirs = _rows(fork, step), _rows(parent, step)
        if ours is None or theirs is None:
            return None
        both = ours.keys() & theirs.keys()
        # A run that sampled more, to refill a step, has drawn nothing else.
        if both and (both in (ours.keys(), theirs.keys())) and all(_same(ours[key], theirs[key]) for key in both):
            continue
        return _draws(fork, parent, step, ours, theirs)
    return None


def _same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return np.array_equal(ours["tokens"], theirs["tokens"])


def _draws(fork: RunFolder, parent: RunFolder, step: int, ours: Rows, theirs: Rows) -> Draws:
    both = [key for key in ours if key in theirs]
    other = [key for key in both if not _same(ours[key], theirs[key])]
    prompts = {(problem, time) for problem, _, time in ours}
    counts = {
        "step": step,
        "same_prompts": len({(problem, time) for problem, _, time in both}),
        "prompts": len(prompts),
        "same": len(both) - len(other),
        "completions": len(both),
    }
    if not other:  # other prompts
        return Draws(**counts, problem="", prompt="", before="", token=0, ours=None, theirs=None)
    mine, its = ours[other[0]], theirs[other[0]]
    pairs = zip(mine["tokens"], its["tokens"], strict=False)
    ends = min(len(mine["tokens"]), len(its["tokens"]))
    token = next((index for index, (one, two) in enumerate(pairs) if one != two), ends)
    before, drawn = _token(fork, step, mine, token)
    return Draws(
        **counts,
        problem=mine["problem"],
        prompt=mine["prompt"][-BEFORE:],
        before=before,
        token=token,
        ours=drawn,
        theirs=_token(parent, step, its, token)[1],
    )


def _token(run: RunFolder, step: int, row: dict[str, Any], token: int) -> tuple[str, Token | None]:
    """The end of the text before a token, and the token; None where the completion has ended."""
    read = read_columns(run.step_file(step), ["pieces", "rollout_logprobs"])
    stored = read.slice(row["row"], 1).to_pylist()[0]
    pieces, logprobs = stored["pieces"], stored["rollout_logprobs"]
    before = "".join(pieces[:token])[-BEFORE:]
    if token >= len(pieces):
        return before, None
    return before, Token(pieces[token][:MAX_PIECE], logprobs[token], row["group"], row["row"])


def _rows(run: RunFolder, step: int) -> Rows | None:
    """The completions of a step; None if it is not stored, or damaged."""
    try:
        read = read_columns(run.step_file(step), [*COLUMNS, "tokens"])
        tokens, drawn = read.column("tokens").combine_chunks(), read.drop_columns(["tokens"]).to_pylist()
        values, ends = tokens.values.to_numpy(zero_copy_only=False), tokens.offsets.to_numpy().tolist()
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return None
    before: Counter[tuple[str, int]] = Counter()
    rows: Rows = {}
    for index, row in enumerate(drawn):
        key = (row["problem"], row["sibling"])
        rows[*key, before[key]] = row | {"row": index, "tokens": values[ends[index] : ends[index + 1]]}
        before[key] += 1
    return rows


def parting_in_words(divergence: Parting, fork: str, parent: str) -> list[str]:
    """Sentences on where they part."""
    if divergence.update is None and divergence.draws is None:
        if divergence.until == divergence.at:
            return [f"{fork} begins after step {divergence.at} of {parent}; no step after it is done in both yet."]
        return [
            f"{fork} and {parent} are equal from step {divergence.at + 1} to {divergence.until}, in draws and updates."
        ]
    lines = []
    if divergence.update is not None:
        metrics = divergence.metrics
        some = ", ".join(metrics[:4]) + (f" and {len(metrics) - 4} more" if len(metrics) > 4 else "")
        lines.append(f"Step {divergence.update} is the first whose numbers differ: {some}.")
    if divergence.draws is None:
        return [*lines, f"Prompts and draws are the same up to step {divergence.until}."]
    return lines + _draws_in_words(divergence.draws, divergence.at, fork, parent)


def _draws_in_words(draws: Draws, at: int, fork: str, parent: str) -> list[str]:
    same = f"Up to step {draws.step - 1} all prompts and draws are the same. " if draws.step > at + 1 else ""
    lines = [
        f"{same}Step {draws.step} has {draws.same_prompts} of {draws.prompts} prompts in common, and to these "
        f"{draws.same} of {draws.completions} completions."
    ]
    if draws.problem:
        lines.append(
            f"The first other draw is token {draws.token + 1} of a completion to {draws.prompt!r}, after "
            f"{draws.before!r}: {parent} drew {_quoted(draws.theirs)}, {fork} {_quoted(draws.ours)}."
        )
    return lines


def _quoted(token: Token | None) -> str:
    if token is None:
        return "nothing more"
    return f"{token.text!r}" + (f" (log-prob {token.logprob:.2f})" if token.logprob is not None else "")
