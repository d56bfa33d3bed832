"""Stage 8: corrections for a sampler whose probabilities differ from the learner's.

w = π_old/μ compares the learner's old policy with the sampler's own distribution. Each piece turns
log w into a constant factor per token for the policy term only. Factor 0 rejects a token, which
still counts in the denominator.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from proximo.losses.arithmetic import Mask, Tokens, bounded_exp, row_mean, row_sum
from proximo.losses.pieces.protocols import CorrectionProtocol, Peers
from proximo.types.tensor_types import Float

__all__ = ["GeometricRejection", "IcePop", "SequenceMasked", "SequenceTruncated", "TokenTruncated"]


def _check_range(name: str, low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ValueError(f"correct: {name} keeps weights from {low} to {high}: give 0 ≤ low < high")


def _check_cap(name: str, cap: float) -> None:
    if cap <= 0:
        raise ValueError(f"correct.cap is {cap}: {name} needs a positive cap, say 2")


@dataclass(frozen=True)
class TokenTruncated:
    """min(w_t, cap): truncated importance sampling per token (TIS)."""

    cap: float = 2.0
    """Largest weight of a token."""
    peers: ClassVar[Peers] = Peers(
        'vllm_importance_sampling_mode "token_truncate"', "rollout_correction.rollout_is token, threshold 2.0"
    )

    def __post_init__(self) -> None:
        _check_cap("TokenTruncated", self.cap)

    @property
    def formula(self) -> str:
        return f"min( π_old/μ, {self.cap:g} )"

    def __call__(self, log_weight: Tokens, mask: Mask) -> Tokens:
        return bounded_exp(log_weight).clamp(max=self.cap)


@dataclass(frozen=True)
class SequenceTruncated:
    """min(Π_t w_t, cap): one truncated weight for the whole completion."""

    cap: float = 2.0
    """Largest weight of a completion."""
    reads: ClassVar[Literal["product"]] = "product"
    peers: ClassVar[Peers] = Peers(
        'vllm_importance_sampling_mode "sequence_truncate"', "rollout_correction.rollout_is sequence, threshold 2.0"
    )

    def __post_init__(self) -> None:
        _check_cap("SequenceTruncated", self.cap)

    @property
    def formula(self) -> str:
        return f"min( Π_t π_old/μ, {self.cap:g} )"

    def __call__(self, log_weight: Tokens, mask: Mask) -> Tokens:
        return bounded_exp(row_sum(log_weight, mask)).clamp(max=self.cap).expand_as(log_weight)


@dataclass(frozen=True)
class SequenceMasked:
    """Π_t w_t if it lies in [low, high], otherwise 0: masked importance sampling (MIS)."""

    low: float = 0.5
    """Smallest weight that is kept."""
    high: float = 2.0
    """Largest weight that is kept."""
    reads: ClassVar[Literal["product"]] = "product"
    peers: ClassVar[Peers] = Peers(
        'vllm_importance_sampling_mode "sequence_mask", on by default with vLLM: at most 3, no lower bound',
        "rollout_correction.rollout_rs seq_sum_k1; rejected tokens leave the denominator",
    )

    def __post_init__(self) -> None:
        _check_range("SequenceMasked", self.low, self.high)

    @property
    def formula(self) -> str:
        return f"Π_t π_old/μ within [{self.low:g}, {self.high:g}], else 0"

    def __call__(self, log_weight: Tokens, mask: Mask) -> Tokens:
        return _inside(bounded_exp(row_sum(log_weight, mask)), self.low, self.high).expand_as(log_weight)


@dataclass(frozen=True)
class IcePop:
    """w_t if it lies in [low, high], otherwise 0: tokens with too large a mismatch are left out."""

    low: float = 0.5
    """Smallest weight that is kept."""
    high: float = 5.0
    """Largest weight that is kept."""
    peers: ClassVar[Peers] = Peers(
        'vllm_importance_sampling_mode "token_mask"',
        "rollout_correction.rollout_rs token_k1; rejected tokens leave the denominator",
    )

    def __post_init__(self) -> None:
        _check_range("IcePop", self.low, self.high)

    @property
    def formula(self) -> str:
        return f"π_old/μ within [{self.low:g}, {self.high:g}], else 0"

    def __call__(self, log_weight: Tokens, mask: Mask) -> Tokens:
        return _inside(bounded_exp(log_weight), self.low, self.high)


@dataclass(frozen=True)
class GeometricRejection:
    """1 if the geometric mean of the row's w_t lies in [low, high], otherwise 0: completions are kept or rejected."""

    low: float = 0.999
    """Smallest mean weight of a completion that is kept."""
    high: float = 1.001
    """Largest mean weight of a completion that is kept."""
    reads: ClassVar[Literal["mean"]] = "mean"
    peers: ClassVar[Peers] = Peers(
        "none", "rollout_correction.rollout_rs seq_mean_k1; rejected tokens leave the denominator"
    )

    def __post_init__(self) -> None:
        _check_range("GeometricRejection", self.low, self.high)

    @property
    def formula(self) -> str:
        return f"1 if ( Π_t π_old/μ )^(1/|y|) is within [{self.low:g}, {self.high:g}], else 0"

    def __call__(self, log_weight: Tokens, mask: Mask) -> Tokens:
        mean = bounded_exp(row_mean(log_weight, mask))
        return ((mean >= self.low) & (mean <= self.high)).to(log_weight.dtype).expand_as(log_weight)


def _inside(weight: Float[Tensor, "B K"], low: float, high: float) -> Float[Tensor, "B K"]:
    return torch.where((weight >= low) & (weight <= high), weight, torch.zeros_like(weight))


Correction = TokenTruncated | SequenceTruncated | SequenceMasked | IcePop | GeometricRejection | CorrectionProtocol
