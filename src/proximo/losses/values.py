"""How good a value model is, compared with the returns that completions really earned.

Returns are rewards to go, not the value model's targets, which contain its own estimates and flatter it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.losses.groups import siblings
from proximo.types.tensor_types import Bool, Float, Int


def explained_variance(
    values: Float[Tensor, "B T"], returns: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """1 − Var(return − value)/Var(return) over sampled tokens: 1 is perfect, 0 no better than a constant."""
    known, earned = values[mask].double(), returns[mask].double()
    spread = earned.var(correction=0)
    unexplained = (earned - known).var(correction=0)
    return torch.where(spread > 0, 1 - unexplained / spread, torch.nan)


def error_by_position(
    values: Float[Tensor, "B T"], returns: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], parts: int = 4
) -> Float[Tensor, " K"]:
    """Root mean squared error in each equal part of a completion, first to last; NaN if a part has no token."""
    place = (mask.cumsum(dim=1) - 1).clamp(min=0)
    part = (place * parts // mask.sum(dim=1, keepdim=True).clamp(min=1))[mask]
    squares = (values - returns)[mask].double().square()
    total = torch.zeros(parts, dtype=torch.double, device=mask.device).index_add_(0, part, squares)
    count = torch.zeros_like(total).index_add_(0, part, torch.ones_like(squares))
    return (total / count).sqrt()


@dataclass(frozen=True)
class Baselines:
    """Mean squared errors against the returns, over the sampled tokens of rows that have a sibling."""

    value: Float[Tensor, ""]
    """Error of the value model's estimate at each token."""
    group: Float[Tensor, ""]
    """Error of the mean return of the siblings without the row itself: the baseline of RLOO, and of GRPO made
    unbiased."""


def compare_baselines(
    values: Float[Tensor, "B T"], returns: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], group: Int[Tensor, " B"]
) -> Baselines:
    """Compares the value model with the group baseline on the same rollouts; NaN without siblings."""
    first = mask & (mask.cumsum(dim=1) == 1)
    totals = torch.where(first, returns.double(), 0.0).sum(dim=1)
    totals = totals.masked_fill(~mask.any(dim=1), torch.nan)  # a row without a token has no return to compare
    rows = siblings(totals, group)
    others = totals - rows.deviation * rows.count / (rows.count - 1).clamp(min=1)
    counted = mask & (rows.count > 1).unsqueeze(1)
    by_value = (returns - values)[counted].double().square().mean()
    by_group = (returns - others.unsqueeze(1))[counted].double().square().mean()
    return Baselines(by_value, by_group)
