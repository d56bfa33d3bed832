"""The plan of a step whose rows come in parts of different widths, without padding all rows to the longest.

`token_terms` looks at single rows, so each part goes through it alone with its own plan, as micro-batches do.
"""

from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

from proximo.maths.objective import Plan, candidates
from proximo.maths.pieces.extras import PositiveNll
from proximo.maths.pieces.selection import Candidates
from proximo.maths.rows import Objective, Rows
from proximo.tensor_types import Float


@torch.no_grad()
def plan_parts(
    algorithm: Objective,
    parts: Sequence[Rows],
    places: Sequence[Tensor],
    generator: torch.Generator | None = None,
) -> list[Plan]:
    """The plan of each part, as `plan_step` makes it of all rows at once.

    `places`, aligned with each part's tokens, number the step's tokens in their order, so that a random choice falls
    on the same tokens.
    """
    counts = torch.cat([rows.mask.sum(dim=1) for rows in parts]).double()
    scored, group = (torch.cat([getattr(rows, name) for rows in parts]) for name in ("scored", "group"))
    weights = torch.zeros_like(counts)
    weights[scored] = algorithm.weights.of_rows(counts[scored], group[scored])
    chosen = nll_weights = repeat(None)
    if algorithm.select is not None and algorithm.select.step_wide:
        chosen = _chosen(algorithm, parts, places, generator)
    for extra in algorithm.extras:
        if isinstance(extra, PositiveNll):
            outcome = torch.cat([rows.outcome for rows in parts if rows.outcome is not None])
            nll_weights = _at_tokens(extra.of_rows(counts, outcome), parts)
    return [Plan(*each) for each in zip(_at_tokens(weights, parts), chosen, nll_weights, strict=False)]


def _at_tokens(of_rows: Float[Tensor, " B"], parts: Sequence[Rows]) -> list[Tensor]:
    pieces = of_rows.split([len(rows.mask) for rows in parts])
    return [rows.mask.double() * piece.unsqueeze(1) for rows, piece in zip(parts, pieces, strict=True)]


def _chosen(
    algorithm: Objective,
    parts: Sequence[Rows],
    places: Sequence[Tensor],
    generator: torch.Generator | None,
) -> list[Tensor]:
    """A choice among all sampled tokens, in their order, as one row."""
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
        mask=torch.ones(1, len(order), dtype=torch.bool),
    )
    choice = torch.zeros(len(order), dtype=torch.bool)
    choice[order] = algorithm.select.choose(together, generator).squeeze(0)
    pieces = choice.split([int(rows.mask.sum()) for rows in parts])
    return [
        torch.zeros_like(rows.mask).masked_scatter(rows.mask, piece) for rows, piece in zip(parts, pieces, strict=True)
    ]
