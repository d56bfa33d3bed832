"""How far the sampler is from the learner, in numbers: the same whether or not stage 8 repairs it.

The tokens were drawn from the sampler μ; the learner gives them π_old. Everything here is a function of
log w = log π_old − log μ at the sampled tokens, and of nothing that a correction would do to it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.maths.arithmetic import bounded_exp, row_sum
from proximo.tensor_types import Bool, Float


@dataclass(frozen=True)
class MismatchStats:
    """Over the sampled tokens of some completions; all of it is at rest (0, or 1 for a ratio) where μ is π_old."""

    gap: float
    """Mean |log w|."""
    kl: float
    """KL(μ‖π_old) per token, estimated by w − 1 − log w (k3): never negative, little noise."""
    kl_k1: float
    """The same, estimated by −log w (k1): noisy, and below 0 by chance. Far from `kl`: w has rare, large values."""
    ratio_mean: float
    """Mean w: 1 in expectation, for any μ that can say all that π_old can."""
    ratio_max: float
    ess: float
    """(Σw)² / (N·Σw²): the share of the tokens that reweighting by w would leave in effect."""
    sequence_spread: float
    """Standard deviation of log Π_t w_t over the completions: what a weight of whole completions has to span."""


@torch.no_grad()
def mismatch(log_weight: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> MismatchStats | None:
    """None where nothing was sampled."""
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
    """Effective sample size over sample size, of weights with these moments; 0 where every weight is 0."""
    return mean**2 / mean_square if mean_square else 0.0
