"""Weights and token selections, computed once over all rows of an optimizer step, before its micro-batches.

Rows may come in parts of different widths, so that not everything is padded to the longest; the lens uses this.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.losses.arithmetic import answer_of
from proximo.losses.inputs import Objective
from proximo.losses.pieces.extras import terms_of
from proximo.losses.pieces.protocols import ExtraTraits
from proximo.losses.records import Candidates, Rows
from proximo.types import to_device
from proximo.types.tensor_types import Bool, Float, Int


@dataclass(frozen=True)
class Plan:
    """Weights and selections over all rows of an optimizer step, so that micro-batches add up exactly."""

    weights: Float[Tensor, "B T"]
    selected: Bool[Tensor, "B T"] | None = None
    """Tokens that a step-wide `select` acts on."""
    extra_weights: tuple[Float[Tensor, "B T"] | None, ...] = ()
    """Weights of each extra term, in order; None: it uses `weights`."""

    def rows(self, index: Int[Tensor, " M"] | slice) -> "Plan":
        """The slice that belongs to some rows of the step."""
        return Plan(
            weights=self.weights[index],
            selected=None if self.selected is None else self.selected[index],
            extra_weights=tuple(None if each is None else each[index] for each in self.extra_weights),
        )

    def to(self, device: torch.device) -> "Plan":
        return Plan(
            weights=to_device(self.weights, device),
            selected=None if self.selected is None else to_device(self.selected, device),
            extra_weights=tuple(None if each is None else to_device(each, device) for each in self.extra_weights),
        )


def plan_step(algorithm: Objective, rows: Rows, generator: torch.Generator | None = None) -> Plan:
    """Weights and selections over all rows of an optimizer step, before its micro-batches."""
    places = torch.arange(rows.mask.numel(), device=rows.mask.device).view_as(rows.mask)
    return next(plan_parts(algorithm, [rows], [places], generator))


@torch.no_grad()
def plan_parts(
    algorithm: Objective,
    parts: Sequence[Rows],
    places: Sequence[Tensor],
    generator: torch.Generator | None = None,
) -> Iterator[Plan]:
    """The plan of each part of a step, as `plan_step` makes it of all rows at once. `parts` may be made when they are
    asked for: of each only its mask and what its rows have is kept, unless the selection is of the whole step.

    `places`, aligned with each part's tokens, number the step's tokens in order, so that a random selection takes
    the same tokens.
    """
    known = [(rows.mask, rows.scored, rows.group, rows.outcome) for rows in parts]
    masks = [mask for mask, *_ in known]
    counts = torch.cat([mask.sum(dim=1) for mask in masks]).double()
    scored, group = torch.cat([each for _, each, _, _ in known]), torch.cat([each for _, _, each, _ in known])
    outcomes = [outcome for *_, outcome in known if outcome is not None]
    outcome = torch.cat(outcomes) if outcomes else None
    weights = torch.zeros_like(counts)
    own = algorithm.weights.of_rows(counts[scored], group[scored])
    weights[scored] = answer_of("weights", algorithm.weights, own, counts[scored].shape)
    selected: Sequence[Tensor | None] = [None] * len(parts)
    if algorithm.select is not None and algorithm.select.step_wide:
        selected = _selected(algorithm, list(parts), places, generator)
    extra_weights: list[Sequence[Tensor | None]] = []
    for extra in terms_of(algorithm.extras):
        own = ExtraTraits.read(extra).row_weights
        extra_weights.append([None] * len(parts) if own is None else [*_at_tokens(own(counts, outcome, group), masks)])
    for number, spread in enumerate(_at_tokens(weights, masks)):
        yield Plan(spread, selected[number], tuple(each[number] for each in extra_weights))


@torch.no_grad()
def candidates(algorithm: Objective, rows: Rows) -> Candidates:
    """What stage 7 may read from these rows."""
    log_ratio = algorithm.ratio(rows.logprobs - rows.anchor_logprobs, rows.mask)
    sampler = rows.anchor_logprobs if rows.rollout_logprobs is None else rows.rollout_logprobs
    return Candidates(
        logprobs=rows.logprobs,
        rollout_logprobs=sampler,
        advantages=rows.advantages,
        through=algorithm.gate.through(log_ratio, rows.advantages),
        entropy=rows.entropy,
        mask=rows.mask,
    )


def _at_tokens(of_rows: Float[Tensor, " B"], masks: Sequence[Tensor]) -> Iterator[Tensor]:
    """One part after the other: those of a large step together would be twice as large as its log-probs."""
    for mask, piece in zip(masks, of_rows.split([len(mask) for mask in masks]), strict=True):
        yield mask.double() * piece.unsqueeze(1)


def _selected(
    algorithm: Objective,
    parts: Sequence[Rows],
    places: Sequence[Tensor],
    generator: torch.Generator | None,
) -> list[Tensor]:
    """The selection among all sampled tokens of the step, in order, as one row."""
    assert algorithm.select is not None
    found = [candidates(algorithm, rows) for rows in parts]
    order = torch.cat([place[rows.mask] for place, rows in zip(places, parts, strict=True)]).argsort()

    def in_order(tensors: Sequence[Tensor]) -> Float[Tensor, "1 N"]:
        flat = torch.cat([tensor[rows.mask] for tensor, rows in zip(tensors, parts, strict=True)])
        return flat[order].unsqueeze(0)

    together = Candidates(
        logprobs=in_order([each.logprobs for each in found]),
        rollout_logprobs=in_order([each.rollout_logprobs for each in found]),
        advantages=in_order([each.advantages for each in found]),
        through=in_order([each.through for each in found]),
        entropy=None
        if found[0].entropy is None
        else in_order([each.entropy for each in found if each.entropy is not None]),
        mask=torch.ones(1, len(order), dtype=torch.bool, device=order.device),
    )
    choice = torch.zeros(len(order), dtype=torch.bool, device=order.device)
    choice[order] = algorithm.select.choose(together, generator).squeeze(0)
    pieces = choice.split([int(rows.mask.sum()) for rows in parts])
    return [
        torch.zeros_like(rows.mask).masked_scatter(rows.mask, piece) for rows, piece in zip(parts, pieces, strict=True)
    ]
