"""Stages 4 and 5: which policy a ratio is measured against, and whether it is per token or per sequence.

All ratios are logarithms, aligned with tokens. A sequence-level ratio is repeated at every token of
its row; the weights of stage 10 decide how much it counts. An anchor picks one of the three policies
for which a token's log-prob is known.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from proximo.losses.arithmetic import Mask, Tokens, row_mean, row_sum
from proximo.losses.pieces.protocols import AnchorProtocol, Peers, RatioProtocol

__all__ = [
    "CurrentPolicy",
    "NoRatio",
    "OldPolicy",
    "SamplerPolicy",
    "SequenceProductRatio",
    "SequenceRatio",
    "SequenceTokenRatio",
    "TokenRatio",
]


@dataclass(frozen=True)
class OldPolicy:
    """The learner's policy with the weights that sampled, recomputed by the learner."""

    formula: ClassVar[str] = "π_old"
    peers: ClassVar[Peers] = Peers(
        "recomputed when steps_per_generation or num_iterations make it differ", "recomputed before every update"
    )

    def __call__(self, current: Tokens, old: Tokens, sampler: Tokens | None) -> Tokens:
        return old


@dataclass(frozen=True)
class SamplerPolicy:
    """The sampler's own log-probs: the ratio then also corrects the sampler's mismatch."""

    needs_sampler_logprobs: ClassVar[bool] = True
    formula: ClassVar[str] = "μ"
    peers: ClassVar[Peers] = Peers("none", "rollout_correction.bypass_mode False")

    def __call__(self, current: Tokens, old: Tokens, sampler: Tokens | None) -> Tokens:
        assert sampler is not None
        return sampler


@dataclass(frozen=True)
class CurrentPolicy:
    """The current policy, held constant: every ratio is 1. Correct for a single update per batch."""

    on_policy: ClassVar[bool] = True
    formula: ClassVar[str] = "sg[π]"
    peers: ClassVar[Peers] = Peers("implied by one update per batch", "loss_mode gpg")

    def __call__(self, current: Tokens, old: Tokens, sampler: Tokens | None) -> Tokens:
        return current


Anchor = OldPolicy | SamplerPolicy | CurrentPolicy | AnchorProtocol


@dataclass(frozen=True)
class NoRatio:
    """No importance weight: plain policy gradient."""

    is_constant: ClassVar[bool] = True
    formula: ClassVar[str] = ""
    peers: ClassVar[Peers] = Peers("none", "loss_mode gpg")

    def __call__(self, log_ratio: Tokens, mask: Mask) -> Tokens:
        return torch.zeros_like(log_ratio)


@dataclass(frozen=True)
class TokenRatio:
    """r_t = π(y_t) / π_old(y_t)."""

    formula: ClassVar[str] = "π(y_t) / π_anchor(y_t)"
    peers: ClassVar[Peers] = Peers(
        'importance_sampling_level "token"', "one for each token in every loss_mode but gspo"
    )

    def __call__(self, log_ratio: Tokens, mask: Mask) -> Tokens:
        return log_ratio


@dataclass(frozen=True)
class SequenceRatio:
    """s = (Π_t r_t)^(1/|y|), the geometric mean over sampled tokens. GSPO, equation 7."""

    spans_row: ClassVar[bool] = True
    pools: ClassVar[bool] = True
    length_normalised: ClassVar[bool] = True
    formula: ClassVar[str] = "( Π_t π(y_t) / π_anchor(y_t) )^(1/|y|)"
    peers: ClassVar[Peers] = Peers(
        'importance_sampling_level "sequence" (default "token")', "loss_mode gspo, in its sequence_token form"
    )

    def __call__(self, log_ratio: Tokens, mask: Mask) -> Tokens:
        return row_mean(log_ratio, mask).expand_as(log_ratio)


@dataclass(frozen=True)
class SequenceTokenRatio:
    """The value of the sequence ratio with each token's own gradient: sg[s] · π_t / sg[π_t]. GSPO-token.

    Equal to SequenceRatio in value and gradient if all tokens of a row have the same advantage.
    """

    spans_row: ClassVar[bool] = True
    length_normalised: ClassVar[bool] = True
    formula: ClassVar[str] = "sg[ ( Π_t π(y_t) / π_anchor(y_t) )^(1/|y|) ] · π(y_t) / sg[π(y_t)]"
    peers: ClassVar[Peers] = Peers("none", "loss_mode gspo")

    def __call__(self, log_ratio: Tokens, mask: Mask) -> Tokens:
        # Own minus detached first: the difference is exactly 0, so that the mean loses no digits.
        return (log_ratio - log_ratio.detach()) + row_mean(log_ratio, mask).detach()


@dataclass(frozen=True)
class SequenceProductRatio:
    """Π_t r_t, not normalised by length: the exact ratio of two completions, with a very large variance."""

    max_log: float = 20.0
    """Bound on the absolute value of the summed log-ratio; larger values carry no information."""
    spans_row: ClassVar[bool] = True
    pools: ClassVar[bool] = True
    peers: ClassVar[Peers] = Peers('RLOOTrainer; loss_type "vespo"', "none")

    def __post_init__(self) -> None:
        if self.max_log <= 0:
            raise ValueError(f"ratio.max_log is {self.max_log}: the clamp must leave room around 0, say 20")

    @property
    def formula(self) -> str:
        return f"Π_t π(y_t) / π_anchor(y_t),  its log within ±{self.max_log:g}"

    def __call__(self, log_ratio: Tokens, mask: Mask) -> Tokens:
        return row_sum(log_ratio, mask).clamp(-self.max_log, self.max_log).expand_as(log_ratio)


Ratio = NoRatio | TokenRatio | SequenceRatio | SequenceTokenRatio | SequenceProductRatio | RatioProtocol
