"""Measures of the mismatch between sampler and learner, independent of any correction in stage 8.

Tokens were drawn from the sampler μ; π_old is the learner's policy. Everything here is a function of
log w = log π_old − log μ at the sampled tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.losses.arithmetic import bounded_exp, row_sum
from proximo.types.tensor_types import Bool, Float


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
def mismatch(log_weight: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> MismatchStats | None:
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
