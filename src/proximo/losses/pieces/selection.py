"""Stage 7: tokens or completions that the update leaves out or holds near the old policy.

`choose` names the tokens to act on, `apply` acts on their losses. The covariance and entropy pieces
rank a token among all tokens of the optimizer step (`step_wide`), so they choose once for the step,
before the micro-batches. Whatever is dropped keeps its place in the denominator. A piece that gives a gradient of its
own, also to tokens whose advantage is 0, says so (`teaches_alone`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from proximo.losses.arithmetic import Mask, Tokens, count_below, count_of, row_mean
from proximo.losses.pieces.protocols import GateTraits, Peers, SelectionProtocol
from proximo.losses.records import Candidates
from proximo.types.tensor_types import Float, Int

__all__ = ["ClipCovariance", "KlCovariance", "OffPolicyMask", "TopEntropy"]


@dataclass(frozen=True)
class ClipCovariance:
    """Drops a few random tokens whose covariance of advantage and log-prob lies in (low, high). Clip-Cov."""

    share: float = 2e-4
    """Share of the step's sampled tokens, rounded down as in the authors' code; at least one token."""
    low: float = 1.0
    """Covariance above which tokens may be dropped."""
    high: float = 5.0
    """Covariance below which tokens may be dropped."""
    step_wide: ClassVar[bool] = True
    peers: ClassVar[Peers] = Peers("none", "loss_mode clip_cov, clip_cov_ratio 2e-4, clip_cov_{lb,ub} 1 and 5")

    def __post_init__(self) -> None:
        _check_share(self.share)

    @property
    def formula(self) -> str:
        where = f"those with covariance of A and log π in ({self.low:g}, {self.high:g})"
        return f"{self.share:g} of the tokens, drawn from {where}"

    def choose(self, candidates: Candidates, generator: torch.Generator | None) -> Mask:
        covariance = token_covariance(candidates)
        # A token the clip already blocks has no gradient to drop.
        is_open = candidates.through[candidates.mask] > 0
        eligible = (is_open & (covariance > self.low) & (covariance < self.high)).nonzero().squeeze(1)
        device = "cpu" if generator is None else generator.device
        order = torch.randperm(len(eligible), generator=generator, device=device).to(eligible.device)
        count = max(1, count_below(self.share, int(candidates.mask.sum())))
        return _at(eligible[order[:count]], candidates.mask)

    def apply(self, losses: Tokens, log_ratio: Tokens, chosen: Mask) -> Tokens:
        return losses.masked_fill(chosen, 0.0)


@dataclass(frozen=True)
class KlCovariance:
    """Adds coefficient · |log r| to the tokens of highest covariance, holding them near the old policy. KL-Cov."""

    share: float = 2e-3
    """Share of the step's sampled tokens, rounded down as in the authors' code; at least one token."""
    coefficient: float = 1.0
    """Strength of the term."""
    step_wide: ClassVar[bool] = True
    teaches_alone: ClassVar[bool] = True
    peers: ClassVar[Peers] = Peers("none", "loss_mode kl_cov, kl_cov_ratio 2e-4, ppo_kl_coef 0.1")

    def __post_init__(self) -> None:
        _check_share(self.share)

    @property
    def formula(self) -> str:
        where = f"the {self.share:g} of tokens with the highest covariance of A and log π"
        return f"freedom for {where}: − {self.coefficient:g}·|log ρ| there"

    def remarks(self, algorithm: Any) -> Iterator[str]:
        if GateTraits.read(algorithm.gate).clips:
            yield f"select KlCovariance with gate {algorithm.gate}: KL-Cov is defined without a clip, on Unclipped()"

    def choose(self, candidates: Candidates, generator: torch.Generator | None) -> Mask:
        count = max(1, count_below(self.share, int(candidates.mask.sum())))
        return _highest(token_covariance(candidates), count, candidates.mask)

    def apply(self, losses: Tokens, log_ratio: Tokens, chosen: Mask) -> Tokens:
        return torch.where(chosen, losses + self.coefficient * log_ratio.abs(), losses)


@dataclass(frozen=True)
class TopEntropy:
    """Keeps only the given share of tokens, those with the highest entropy."""

    share: float = 0.2
    """Share of the tokens that is kept."""
    step_wide: ClassVar[bool] = True
    needs_entropy: ClassVar[bool] = True
    peers: ClassVar[Peers] = Peers("top_entropy_quantile 1.0 (off)", "none")

    def __post_init__(self) -> None:
        _check_share(self.share)

    @property
    def formula(self) -> str:
        return f"all but the {self.share:g} of tokens with the highest entropy"

    def choose(self, candidates: Candidates, generator: torch.Generator | None) -> Mask:
        if candidates.entropy is None:
            raise ValueError("entropy is None: TopEntropy needs the entropy of each token's distribution")
        count = max(1, count_of(self.share, int(candidates.mask.sum())))
        return candidates.mask & ~_highest(candidates.entropy[candidates.mask], count, candidates.mask)

    def apply(self, losses: Tokens, log_ratio: Tokens, chosen: Mask) -> Tokens:
        return losses.masked_fill(chosen, 0.0)


@dataclass(frozen=True)
class OffPolicyMask:
    """Drops a completion with A < 0 that the policy has moved away from: mean(log μ − log π) > threshold."""

    threshold: float = 0.1
    """Largest mean log-ratio, in nats per token, of a completion that is kept."""
    step_wide: ClassVar[bool] = False
    peers: ClassVar[Peers] = Peers("off_policy_mask_threshold None", "none")

    def __post_init__(self) -> None:
        if self.threshold <= 0:
            raise ValueError(f"select.threshold is {self.threshold}: give the largest drift allowed, say 0.1")

    @property
    def formula(self) -> str:
        return f"completions with A < 0 and mean log μ/π above {self.threshold:g}"

    def choose(self, candidates: Candidates, generator: torch.Generator | None) -> Mask:
        drift = row_mean(candidates.rollout_logprobs - candidates.logprobs, candidates.mask)
        return candidates.mask & (candidates.advantages < 0) & (drift > self.threshold)

    def apply(self, losses: Tokens, log_ratio: Tokens, chosen: Mask) -> Tokens:
        return losses.masked_fill(chosen, 0.0)


Selection = ClipCovariance | KlCovariance | TopEntropy | OffPolicyMask | SelectionProtocol


def token_covariance(candidates: Candidates) -> Float[Tensor, " N"]:
    """(A − mean A)·(log π − mean log π) of each sampled token, in order; means over the step."""
    advantages, logprobs = candidates.advantages[candidates.mask], candidates.logprobs[candidates.mask]
    if not len(advantages):
        return advantages
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def _highest(values: Float[Tensor, " N"], count: int, mask: Mask) -> Mask:
    """True at the sampled tokens with the highest values."""
    return _at(values.topk(min(count, len(values))).indices, mask)


def _at(positions: Int[Tensor, " K"], mask: Mask) -> Mask:
    """True at these positions among the sampled tokens; padding is not counted."""
    is_chosen = torch.zeros_like(mask[mask])
    is_chosen[positions] = True
    return torch.zeros_like(mask).masked_scatter(mask, is_chosen)


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"select.share is {share}: give a share of the step's tokens, above 0 and at most 1")
