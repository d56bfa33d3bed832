"""Measures that no loss reads: how far the sampler is from the learner, and how good a value model is.

Mismatch is a function of log w = log π_old − log μ at the sampled tokens, independent of any correction in stage 8:
tokens were drawn from the sampler μ; π_old is the learner's policy. A value model is compared with the returns that
completions really earned: rewards to go, not the value model's targets, which contain its own estimates and flatter it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.losses.arithmetic import Mask, Tokens, bounded_exp, row_sum, siblings
from proximo.types.tensor_types import Float, Int


@dataclass(frozen=True)
class MismatchStats:
    """Statistics over the sampled tokens; if μ equals π_old, all are 0, and ratios and `ess` are 1."""

    gap: float
    """Mean |log w|."""
    kl: float
    """KL(μ‖π_old) per token, estimated by w − 1 − log w (k3): never negative, little noise."""
    kl_k1: float
    """The same, estimated by −log w (k1): noisy, and may be negative. If it is far from `kl`, w has rare, large
    values."""
    ratio_mean: float
    """Mean w: 1 in expectation if μ gives every token that π_old can sample a positive probability."""
    ratio_max: float
    ess: float
    """(Σw)² / (N·Σw²): effective sample size under weights w, as a share of the tokens."""
    sequence_spread: float
    """Standard deviation of log Π_t w_t over completions: the spread of a sequence-level weight."""


@torch.no_grad()
def mismatch(log_weight: Tokens, mask: Mask) -> MismatchStats | None:
    """Mismatch statistics; None if nothing was sampled."""
    if not mask.any():
        return None
    tokens = log_weight[mask].double()
    ratio = bounded_exp(tokens)
    sequences = row_sum(log_weight.double(), mask)[mask.any(dim=1)]
    return MismatchStats(
        gap=float(tokens.abs().mean()),
        kl=float((ratio - 1 - tokens).mean()),
        kl_k1=float(-tokens.mean()),
        ratio_mean=float(ratio.mean()),
        ratio_max=float(ratio.max()),
        ess=effective_share(float(ratio.mean()), float(ratio.square().mean())),
        sequence_spread=float(sequences.std(correction=0)),
    )


def effective_share(mean: float, mean_square: float) -> float:
    """Effective sample size over sample size for weights with these moments; 0 if all weights are 0."""
    return mean**2 / mean_square if mean_square else 0.0


def explained_variance(values: Tokens, returns: Tokens, mask: Mask) -> Float[Tensor, ""]:
    """1 − Var(return − value)/Var(return) over sampled tokens: 1 is perfect, 0 no better than a constant."""
    known, earned = values[mask].double(), returns[mask].double()
    spread = earned.var(correction=0)
    unexplained = (earned - known).var(correction=0)
    return torch.where(spread > 0, 1 - unexplained / spread, torch.nan)


def error_by_position(values: Tokens, returns: Tokens, mask: Mask, parts: int = 4) -> Float[Tensor, " K"]:
    """Root mean squared error in each equal part of a completion, first to last; NaN if a part has no token."""
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    part = (position * parts // mask.sum(dim=1, keepdim=True).clamp(min=1))[mask]
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


def compare_baselines(values: Tokens, returns: Tokens, mask: Mask, group: Int[Tensor, " B"]) -> Baselines:
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
