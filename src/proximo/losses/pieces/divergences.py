"""Stage 9: distance to the reference policy, estimated from the sampled tokens.

With x = log π_ref − log π, which estimator decides what its gradient pulls on (on-policy expectation):

    K1          −x              nothing: its expected gradient is 0, so it is for rewards, not losses
    K2          x²/2            ∇KL(π‖π_ref)
    K3          e^x − x − 1     ∇KL(π_ref‖π), the forward divergence, though its value estimates the reverse
    UnbiasedK3  r·(e^x − x − 1) ∇KL(π‖π_ref): value and gradient both
"""

from dataclasses import dataclass, field
from typing import ClassVar

from proximo.losses.arithmetic import Tokens, bounded_exp
from proximo.losses.pieces.protocols import DivergenceProtocol, Peers

__all__ = ["K1", "K2", "K3", "KlLoss", "UnbiasedK3"]


@dataclass(frozen=True)
class K1:
    """log π − log π_ref."""

    pulls: ClassVar[bool] = False
    formula: ClassVar[str] = "log π − log π_ref"

    def __call__(self, logprobs: Tokens, ref_logprobs: Tokens, log_ratio: Tokens) -> Tokens:
        return logprobs - ref_logprobs


@dataclass(frozen=True)
class K2:
    """½(log π − log π_ref)²."""

    formula: ClassVar[str] = "½ (log π − log π_ref)²"

    def __call__(self, logprobs: Tokens, ref_logprobs: Tokens, log_ratio: Tokens) -> Tokens:
        return (logprobs - ref_logprobs).square() / 2


@dataclass(frozen=True)
class K3:
    """π_ref/π − log(π_ref/π) − 1. GRPO's, DeepSeekMath equation 4."""

    formula: ClassVar[str] = "π_ref/π − log(π_ref/π) − 1"

    def __call__(self, logprobs: Tokens, ref_logprobs: Tokens, log_ratio: Tokens) -> Tokens:
        gap = ref_logprobs - logprobs
        return bounded_exp(gap) - gap - 1


@dataclass(frozen=True)
class UnbiasedK3:
    """r·K3 with the token's own ratio r = π/π_old, which makes the gradient that of KL(π‖π_ref)."""

    formula: ClassVar[str] = "π/π_old · ( π_ref/π − log(π_ref/π) − 1 )"

    def __call__(self, logprobs: Tokens, ref_logprobs: Tokens, log_ratio: Tokens) -> Tokens:
        gap = ref_logprobs - logprobs
        # r·e^x as one exponential: their product may overflow where neither factor does.
        return bounded_exp(log_ratio + gap) - bounded_exp(log_ratio) * (gap + 1)


Divergence = K1 | K2 | K3 | UnbiasedK3 | DivergenceProtocol


@dataclass(frozen=True)
class KlLoss:
    """coefficient · divergence added to each token's loss: weighted like it, but never corrected for mismatch."""

    coefficient: float = 0.04
    """Strength of the term. 0: no term, and no reference model is kept."""
    estimator: Divergence = field(default_factory=K3)
    """Estimator of the KL from sampled tokens."""
    peers: ClassVar[Peers] = Peers(
        "beta 0.0; use_bias_correction_kl True, which is UnbiasedK3",
        "use_kl_loss False, kl_loss_coef 0.001, kl_loss_type low_var_kl (K3 within ±10)",
    )

    def __post_init__(self) -> None:
        if self.coefficient < 0:
            raise ValueError(f"kl.coefficient is {self.coefficient}: give 0 or more; below 0 it pushes away")

    def __call__(self, logprobs: Tokens, ref_logprobs: Tokens, log_ratio: Tokens) -> Tokens:
        return self.coefficient * self.estimator(logprobs, ref_logprobs, log_ratio)
