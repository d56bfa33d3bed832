"""Comparison of several algorithms on one stored step, in a few numbers each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from proximo.algorithms import Algorithm, explain
from proximo.insight.lens.layout import PLACES
from proximo.insight.lens.lens import StepView, look, step_loss
from proximo.insight.lens.states import TokenState
from proximo.insight.lens.steps import StoredStep
from proximo.insight.lens.turns import turns_of_tokens
from proximo.rl.config import RunConfig
from proximo.system.lines import plain
from proximo.types.tensor_types import Bool, Float

OWN_ALGORITHM = "own"
"""Name of a run's own algorithm if it is not a known one."""
FIVE = ("ppo", "grpo", "dapo", "gspo", "sapo")
PUSHING = (TokenState.OPEN, TokenState.SOFT, TokenState.HELD)


@dataclass(frozen=True)
class ComparedAlgorithm:
    """One algorithm on a step, compared with the run's own; NaN: undefined, such as a share of 0 tokens."""

    name: str
    is_own: bool
    seen: StepView
    rows: Bool[Tensor, " B"]
    """Rows of applied updates; all numbers are over these."""
    policy_loss: float | None
    """Policy loss of the step, as in the metrics: the mean over all updates of all passes."""
    tokens: int
    """Number of tokens that are trained on."""
    pushing: int
    """Number of these with a nonzero advantage."""
    blocked: float
    """Share of the tokens with a nonzero advantage whose gradient is blocked."""
    held_back: float
    """Share of the gradient that the gate stops, for clips and soft gates alike: 1 − the mean share that passes, over
    tokens with a nonzero advantage. Negative if a gate amplifies."""
    closed: int
    """Number of tokens with a gradient under the run's own algorithm that are blocked under this one."""
    opened: int
    """Number of tokens blocked under the run's own algorithm that have a gradient under this one."""
    flips: float
    """Sum of both, as a share of the tokens that the run's own update trains on."""
    positive: float
    """Share of the gradient, Σ|dL/dlogprob|, on tokens with A > 0."""
    negative: float
    thirds: tuple[float, float, float]
    """Share of the gradient on the shortest, middle and longest third of the completions."""
    norm: float
    """Norm of the policy loss's gradient with respect to the log-probs of all tokens."""
    kl: float
    """The KL term's share of the gradient: Σ|dKL/dlogprob| over Σ|dL/dlogprob| + Σ|dKL/dlogprob|."""
    cosines: Mapping[str, float]
    """Cosines between this gradient and each algorithm's, by name; the run's own first."""

    @property
    def cosine(self) -> float:
        """Cosine to the gradient of the run's own algorithm."""
        return next(iter(self.cosines.values()))

    def to_dict(self) -> dict[str, Any]:
        """Fields as JSON values, with None for NaN, and without the tokens."""
        known = {each.name: getattr(self, each.name) for each in fields(self)}
        del known["seen"], known["rows"]
        return {name: plain(value) for name, value in known.items()} | {
            "cosine": plain(self.cosine),
            "notes": list(self.seen.notes),
        }


def own_name(config: RunConfig) -> str:
    """Name of a run's algorithm; one whose numbers change is no named one."""
    card = None if config.schedules is not None else explain.same_as(config.algorithm)
    return OWN_ALGORITHM if card is None else card.name


def chosen(config: RunConfig, names: Sequence[str]) -> dict[str, Algorithm]:
    """The run's own algorithm first, then those with these names. ValueError if a name is unknown."""
    run_name = own_name(config)
    algorithms = {run_name: config.algorithm}
    for name in names:
        card = explain.card(name)
        if card is None and name != run_name:
            known = ", ".join(each.name for each in explain.CARDS)
            raise ValueError(f"no algorithm is called {name!r}; the names are {known}")
        if card is not None:
            algorithms.setdefault(card.name, card.value)
    return algorithms


def compared(
    step: StoredStep, config: RunConfig, algorithms: Mapping[str, Algorithm], *, number: int = -1
) -> list[ComparedAlgorithm]:
    """The run's own algorithm first, then the others, on one pass over the step's data, by default the last.

    Example: compared(run.step(40), run.config, chosen(run.config, FIVE))
    """
    run_name = own_name(config)
    named = {run_name: config.algorithm} | dict(algorithms)
    looks = {name: look(step, algorithm, config, number=number) for name, algorithm in named.items()}
    rows = _applied(step, number)
    thirds = _thirds(step.batch.sampled_lengths, rows)
    tokens = rows[step.layout.row]
    cosines = cosines_of(_products([seen.gradient[tokens] for seen in looks.values()]))
    return [
        ComparedAlgorithm(
            name=name,
            is_own=name == run_name,
            seen=seen,
            rows=rows,
            policy_loss=_step_loss(step, config, named[name], seen, number),
            **_pushes(seen, rows),
            **_flips(seen, looks[run_name], rows),
            **_shares(seen, rows, thirds),
            cosines=dict(zip(looks, cosines[index].tolist(), strict=True)),
        )
        for index, (name, seen) in enumerate(looks.items())
    ]


def remarks(step: StoredStep) -> list[str]:
    """Remarks on why a step has nothing to compare, or less than expected."""
    updates = step.metadata["updates"]
    if not updates:
        return ["the step made no update: all completions were dropped or unscored"]
    if step.is_value_only:
        return ["the step trained only the value model: it has no policy loss"]
    skipped = [
        f"update {number} was skipped ({each['skipped']})" for number, each in enumerate(updates) if each["skipped"]
    ]
    return [f"{line}: its completions are left out of these numbers" for line in skipped]


def token_table(step: StoredStep, views: Sequence[ComparedAlgorithm]) -> pa.Table:
    """A table with one row per token and algorithm."""
    row = step.layout.row
    token = torch.arange(len(row)) - step.layout.starts[row]
    pieces = pa.array([piece for each in step.pieces for piece in each], pa.string())
    names, states = [view.name for view in views], [state.name.lower() for state in TokenState]
    tables = [
        pa.table(
            {
                "algorithm": pa.DictionaryArray.from_arrays(np.full(len(row), number, np.int32), names),
                "row": row.numpy(),
                "token": token.numpy(),
                "piece": pieces,
                **_turn_columns(step),
                "state": pa.DictionaryArray.from_arrays(view.seen.state.int().numpy(), states),
                "advantage": view.seen.advantages.numpy(),
                "weight": view.seen.weights.numpy(),
                "ratio": view.seen.ratio.numpy(),
                "token_ratio": view.seen.token_ratio.numpy(),
                "gate": view.seen.through.numpy(),
                "correction": view.seen.correction.numpy(),
                "gradient": view.seen.gradient.numpy(),
                "kl_gradient": view.seen.kl_gradient.numpy(),
                "extra_gradient": view.seen.extra_gradient.numpy(),
            }
        )
        for number, view in enumerate(views)
    ]
    return pa.concat_tables(tables)


def _turn_columns(step: StoredStep) -> dict[str, pa.Array]:
    """Turn of each token, counted from 0, and its role; none where every completion is a single reply."""
    if not any(step.turns):
        return {}
    pairs = [
        (None, None) if index < 0 else (index, turns[index].role)
        for turns, length in zip(step.turns, step.batch.lengths.tolist(), strict=True)
        for index in turns_of_tokens(turns, length)
    ]
    turn, role = zip(*pairs, strict=True)
    return {"turn": pa.array(turn, pa.int32()), "role": pa.array(role, pa.string())}


def max_flipped(view: ComparedAlgorithm, run_view: ComparedAlgorithm, count: int) -> list[tuple[int, int]]:
    """Tokens (row, token) that flip against the run's own algorithm, sorted by the size of their gradients."""
    closed, opened = _flipped(view.seen, run_view.seen)
    places = ((closed | opened) & view.rows[view.seen.layout.row]).nonzero().squeeze(1)
    size = run_view.seen.gradient[places].abs() + view.seen.gradient[places].abs()
    order = size.argsort(descending=True, stable=True)[:count]
    return [view.seen.layout.token(position) for position in places[order].tolist()]


def _flipped(seen: StepView, run_seen: StepView) -> tuple[Bool[Tensor, " N"], Bool[Tensor, " N"]]:
    """Tokens with a gradient under the run's own algorithm that are blocked under this one, and the reverse."""
    pushing = torch.tensor(PUSHING, dtype=seen.state.dtype)
    return torch.isin(run_seen.state, pushing) & seen.blocked, run_seen.blocked & torch.isin(seen.state, pushing)


def _step_loss(step: StoredStep, config: RunConfig, algorithm: Algorithm, seen: StepView, number: int) -> float | None:
    """Loss over all passes, one of which has already been computed."""
    known = number % step.passes if step.passes else 0
    passes = range(step.passes)
    return step_loss(step, [seen if each == known else look(step, algorithm, config, number=each) for each in passes])


def _applied(step: StoredStep, number: int) -> Bool[Tensor, " B"]:
    """Rows of the pass's applied updates; a skipped one may have numbers that are not finite."""
    used = torch.zeros(len(step.batch), dtype=torch.bool)
    if step.passes:
        for update, details in enumerate(step.metadata["updates"]):
            if details["skipped"] is None and not details["value_only"]:
                used |= step.updates[number] == update
    return used


def _pushes(seen: StepView, rows: Bool[Tensor, " B"]) -> dict[str, Any]:
    takes = seen.takes_part & rows[seen.layout.row]
    pushing = takes & (seen.advantages != 0)
    passed = torch.where(seen.blocked, 0.0, seen.through.double())[pushing]
    return {
        "tokens": int(takes.sum()),
        "pushing": int(pushing.sum()),
        "blocked": _ratio(int((seen.blocked & pushing).sum()), int(pushing.sum())),
        "held_back": 1 - float(passed.mean()) if len(passed) else math.nan,
    }


def _flips(seen: StepView, run_seen: StepView, rows: Bool[Tensor, " B"]) -> dict[str, Any]:
    tokens = rows[seen.layout.row]
    closed, opened = (int(flips[tokens].sum()) for flips in _flipped(seen, run_seen))
    trained = int(run_seen.takes_part[tokens].sum())
    return {"closed": closed, "opened": opened, "flips": _ratio(closed + opened, trained)}


def _shares(seen: StepView, rows: Bool[Tensor, " B"], thirds: Float[Tensor, "B 3"]) -> dict[str, Any]:
    """Distribution of the gradient."""
    counted = rows[seen.layout.row]
    size = torch.where(counted, seen.gradient, 0.0).double().abs()
    total = float(size.sum())
    kl = float(torch.where(counted, seen.kl_gradient, 0.0).double().abs().sum())
    of_rows = thirds.new_zeros(len(rows)).index_add_(0, seen.layout.row, size)
    short, middle, long = (of_rows.unsqueeze(1) * thirds).sum(0).tolist()
    return {
        "positive": _ratio(float(size[seen.advantages > 0].sum()), total),
        "negative": _ratio(float(size[seen.advantages < 0].sum()), total),
        "thirds": (_ratio(short, total), _ratio(middle, total), _ratio(long, total)),
        "norm": float(size.square().sum().sqrt()),
        "kl": _ratio(kl, total + kl),
    }


def _thirds(lengths: Tensor, rows: Bool[Tensor, " B"]) -> Float[Tensor, "B 3"]:
    """Share of each row that belongs to the shortest, middle and longest third of the counted rows.

    Rows of equal length are treated equally: if a third ends among them, each is split between both thirds.
    """
    shares = torch.zeros(len(lengths), 3, dtype=torch.float64)
    count = int(rows.sum())
    edges = [count * part / 3 for part in range(4)]
    start = 0
    for length in lengths[rows].unique().tolist():
        alike = rows & (lengths == length)
        end = start + int(alike.sum())
        overlap = [max(min(end, high) - max(start, low), 0.0) for low, high in pairwise(edges)]
        shares[alike] = torch.tensor(overlap, dtype=torch.float64) / (end - start)
        start = end
    return shares


def _products(gradients: Sequence[Float[Tensor, " N"]]) -> Float[Tensor, "A A"]:
    """Dot products of all pairs of gradients, in float64, in chunks of tokens."""
    products = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for stretch in zip(*(each.split(PLACES) for each in gradients), strict=True):
        part = torch.stack(stretch).double()
        products += part @ part.T
    return products


def cosines_of(products: Float[Tensor, "A A"]) -> Float[Tensor, "A A"]:
    """Cosines from the dot products of all pairs; NaN if one of the gradients is 0."""
    norms = products.diagonal().sqrt()
    cosines = (products / norms.outer(norms)).clamp(-1.0, 1.0)  # 0 / 0 is NaN, as it should be
    return cosines.where(~torch.eye(len(norms), dtype=torch.bool) | norms.eq(0), 1.0)


def _ratio(part: float | int, whole: float | int) -> float:
    return part / whole if whole else math.nan
