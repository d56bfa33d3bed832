"""Summary of a step: each completion and each group in a few numbers, and the scales of the token colours."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proximo.insight.lens.layout import TokenLayout
from proximo.insight.lens.states import TokenState, is_blocked
from proximo.insight.lens.threads import computed
from proximo.insight.lens.turns import counted, transcript
from proximo.insight.page.lenses import Kept, Look, label, numbers
from proximo.losses.pieces.protocols import KeepTraits
from proximo.system.memory import return_free_memory
from proximo.types.tensor_types import Float

PREVIEW = 160
"""Maximum characters of a prompt or an answer in a list."""
SAMPLE = 20_000
"""Number of tokens that a scale is computed from."""
MANY = 500_000
"""Tokens of a step that takes so much memory that what was needed to compute it is given back at once."""
SMALLEST = 1e-12
"""Scale if everything is 0."""


@dataclass(frozen=True)
class Summary:
    """The summary of a step."""

    rows: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    ranges: dict[str, list[float | None]]


_summaries: Kept[Summary] = Kept(4)


def summary(look: Look) -> Summary:
    def made() -> Summary:
        layout = look.step.layout
        apart = max(layout.total // (8 * SAMPLE), 1)
        blocks = list(computed(partial(_block, look, apart), layout.blocks(), threads=not layout.is_small))
        rows = _rows(look, {name: torch.cat([each[name] for each, _ in blocks]) for name in blocks[0][0]})
        some = {name: torch.cat([each[name] for _, each in blocks]) for name in blocks[0][1]}
        summarised = Summary(rows, _groups(look, rows), _ranges(some))
        if layout.total > MANY:
            return_free_memory()  # of reading and computing the step, before groups of it are opened
        return summarised

    return _summaries.get(look.step, (look.name, look.number), made)


def _block(look: Look, apart: int, rows: slice) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Numbers of each of some rows, and the values of some of their tokens. All tokens' values at once would take as
    much memory as the step."""
    layout = TokenLayout(look.step.layout.lengths[rows])
    first = int(look.step.layout.starts[rows.start]) if layout.total else 0
    part = slice(first, first + layout.total)
    tokens, each = look.tokens(part), _Each(layout)
    takes = tokens["state"] > TokenState.IDLE
    pushes = takes & (tokens["advantage"] != 0)
    nothing = torch.full((len(layout.lengths),), math.nan)
    reductions = {
        "pushing": each.sum(pushes),
        "blocked": each.sum(pushes & is_blocked(tokens["state"])),
        "advantage_mean": each.mean(tokens["advantage"], takes),
        "ratio_most": each.farthest(tokens["ratio"].log(), takes).exp(),
        "entropy_mean": each.mean(tokens["entropy"]) if "entropy" in tokens else nothing,
        "gap_most": each.farthest(tokens["gap"]),
        "kl_mean": each.mean(tokens["kl"]) if "kl" in tokens else nothing,
    }
    return reductions, {name: values[-first % apart :: apart].clone() for name, values in tokens.items()}


def _rows(look: Look, reductions: dict[str, Tensor]) -> list[dict[str, Any]]:
    step, batch = look.step, look.step.batch
    pushing, blocked = reductions.pop("pushing"), reductions.pop("blocked")
    columns = {"reward": batch.rewards, "outcome": batch.outcome, "blocked_share": blocked / pushing, **reductions}
    values = {name: numbers(tensor) for name, tensor in columns.items()}
    episodes = [counted(turns) for turns in step.turns]
    known = {
        "group": batch.group.tolist(),
        "sibling": step.sibling,
        "fate": step.state,
        "length": batch.sampled_lengths.tolist(),
        "size": batch.lengths.tolist(),
        "replies": [each.replies for each in episodes],
        "failed": [each.failed for each in episodes],
        "truncated": batch.truncated.tolist(),
        "duplicate": _twins(look),
        "pushing": pushing.long().tolist(),
        "blocked": blocked.long().tolist(),
    }
    columns = known | values
    return [{"row": row} | {name: column[row] for name, column in columns.items()} for row in range(len(batch))]


class _Each:
    """Reductions over each row's tokens, which are stored consecutively. NaN is left out."""

    def __init__(self, layout: TokenLayout) -> None:
        self._lengths, self._some = layout.lengths, layout.lengths > 0
        self._starts, self._whole = layout.starts[self._some].numpy(), bool(self._some.all())

    def _reduced(self, over: np.ufunc, values: Tensor) -> Float[Tensor, " B"]:
        result = torch.zeros(len(self._some), dtype=torch.float64)
        if len(self._starts):
            reduced = torch.from_numpy(over.reduceat(values.numpy(), self._starts, dtype=np.float64))
            if self._whole:
                return reduced
            result[self._some] = reduced
        return result

    def sum(self, values: Tensor) -> Float[Tensor, " B"]:
        return self._reduced(np.add, values)

    def mean(self, values: Tensor, where: Tensor | None = None) -> Float[Tensor, " B"]:
        if where is None or bool(where.all()):
            total = self.sum(values)
            if bool(total.isfinite().all()):  # then so is each value
                return total / self._lengths
        known = values.isfinite() if where is None else where & values.isfinite()
        return self.sum(torch.where(known, values, 0.0)) / self.sum(known)

    def farthest(self, values: Tensor, where: Tensor | None = None) -> Float[Tensor, " B"]:
        """The value farthest from 0; NaN if there is none."""
        if where is None or bool(where.all()):
            high, low = self._reduced(np.maximum, values), self._reduced(np.minimum, values)
            if bool((high - low).isfinite().all()):  # then so is each value
                return torch.where(high >= -low, high, low).masked_fill(~self._some, math.nan)
        known = values.isfinite() if where is None else where & values.isfinite()
        values = torch.where(known, values, 0.0)
        high, low = self._reduced(np.maximum, values).clamp(min=0.0), self._reduced(np.minimum, values).clamp(max=0.0)
        return torch.where(high >= -low, high, low).masked_fill(self.sum(known) == 0, math.nan)


def _groups(look: Look, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    members: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        members[row["group"]].append(row)
    return [_group(look, number, inside) for number, inside in sorted(members.items())]


def _group(look: Look, number: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    first, step = int(rows[0]["row"]), look.step
    scored = [row["reward"] for row in rows if row["reward"] is not None]
    pushing = sum(row["pushing"] for row in rows)
    fate, why = _fate(look, rows, scored)
    return {
        "group": number,
        "problem": step.problem[first][:PREVIEW],
        "prompt": _end(step.prompt[first]),
        "answer": step.answer[first][:PREVIEW],
        "fate": fate,
        "why": why,
        "reward": sum(scored) / len(scored) if scored else None,
        "blocked_share": sum(row["blocked"] for row in rows) / pushing if pushing else None,
    }


def _end(text: str) -> str:
    """The end of a prompt, since prompts often begin alike."""
    return text if len(text) <= PREVIEW else f"…{text[-PREVIEW:]}"


def _fate(look: Look, rows: list[dict[str, Any]], scored: list[float]) -> tuple[str, str]:
    """The fate of a group under the algorithm, and the reason if it has no gradient."""
    equal = f": every reward is {scored[0]:g}" if scored and max(scored) == min(scored) else ""
    if not scored:
        return "unscored", "unscored: no grader could judge it"
    if all(row["fate"] != "trained" for row in rows):
        return "dropped", f"dropped before training{equal}"
    slices = [look.step.layout.of(row["row"]) for row in rows]
    if not any((look.seen.state[places] > TokenState.IDLE).any() for places in slices):
        return "dropped", _left_out(look, rows, equal)
    if not any(look.seen.advantages[places].any() for places in slices):
        return "dead", f"no signal{equal or ': every advantage is 0'}"
    missing = len(rows) - len(scored)
    return "trained", f"{missing} unscored" if missing else ""


def _left_out(look: Look, rows: list[dict[str, Any]], equal: str) -> str:
    """Reason why no token of a group is in an update."""
    if look.step.is_value_only or not look.step.passes:
        return "no update of the policy"
    if not KeepTraits.read(look.seen.algorithm.keep).truncated and all(
        row["truncated"] for row in rows if row["fate"] == "trained"
    ):
        return "all completions are truncated and left out of the loss"
    return f"dropped{equal}" if look.is_own else f"{label(look.name)} would drop it{equal}"


def _ranges(tokens: Mapping[str, Tensor]) -> dict[str, list[float | None]]:
    """The scale of each channel over the whole step, so that groups can be compared; it covers nearly all values."""
    takes = tokens["state"] > TokenState.IDLE

    def size(name: str, part: float = 0.98) -> float | None:
        return _quantile(tokens[name].abs()[takes], part)

    stretch = _quantile(tokens["ratio"].log().abs()[takes], 0.99)
    deepest = _quantile(-tokens["current"], 0.98)
    ranges = {
        "advantage": _both(size("advantage", 1.0)),
        "ratio": [None, None] if stretch is None else [math.exp(-stretch), math.exp(stretch)],
        "gradient": _both(size("gradient")),
        "entropy": [0.0, _quantile(tokens["entropy"], 0.98) if "entropy" in tokens else None],
        "logprob": [None if deepest is None else -deepest, 0.0],
        "gap": _both(_quantile(tokens["gap"].abs(), 0.98)),
        "kl": [0.0, _quantile(tokens["kl"], 0.98) if "kl" in tokens else None],
    }
    return {name: pair if None not in pair else [None, None] for name, pair in ranges.items()}


def _both(value: float | None) -> list[float | None]:
    return [None if value is None else -value, value]


def _quantile(values: Float[Tensor, " N"], part: float) -> float | None:
    """A quantile of the non-negative values; the largest value if nearly all are 0."""
    values = values[values.isfinite()].double()
    if not values.numel():
        return None
    few = values[:: max(values.numel() // SAMPLE, 1)]
    return float(few.quantile(part)) or float(values.max()) or SMALLEST


def _twins(look: Look) -> list[int | None]:
    """The twin of each row: another row of its group with the same completion, if any."""
    rows: dict[tuple[int, str], list[int]] = defaultdict(list)
    groups, sibling = look.step.batch.group.tolist(), look.step.sibling
    texts = [transcript(turns) or text for turns, text in zip(look.step.turns, look.step.text, strict=True)]
    for row, text in enumerate(texts):
        rows[groups[row], text].append(sibling[row])
    twins = []
    for row, text in enumerate(texts):
        others = [each for each in rows[groups[row], text] if each != sibling[row]]
        twins.append(others[0] if others else None)
    return twins
