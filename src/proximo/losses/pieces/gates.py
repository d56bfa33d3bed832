"""Stage 6: the gate bounds how far one token may push the policy.

Every gate takes the same four tensors and returns the loss of each token, minimised. A gate in ratio
form differentiates through the ratio; one in score form holds the ratio constant and differentiates
log π. On-policy all have the same gradient; their values differ.

`through` is the share of the importance-weighted gradient r·A that passes the gate: 1 unchanged,
0 blocked. Optional members of a gate are in `GateTraits`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from proximo.losses.arithmetic import Mask, Tokens, bounded_exp, row_mean
from proximo.losses.pieces.protocols import GateProtocol, Peers, RatioTraits
from proximo.types.tensor_types import Float

__all__ = ["CappedScore", "Clip", "GammaScore", "GeometricClip", "Reinforce", "SoftGate", "Unclipped"]


@dataclass(frozen=True)
class Clip:
    """min(r·A, clip(r, 1−low, 1+high)·A), and for A < 0 at least dual·A. PPO, equation 7."""

    low: float = 0.2
    """Lower clip width: ratios are clipped at 1 − low."""
    high: float = 0.2
    """Upper clip width: ratios are clipped at 1 + high."""
    dual: float | None = None
    """Dual clip: bounds the loss of tokens with A < 0 and a very large ratio. None: unbounded, as in the papers."""
    peers: ClassVar[Peers] = Peers(
        "epsilon 0.2, epsilon_high None (= epsilon), delta None",
        "clip_ratio_low 0.2, clip_ratio_high 0.2; with loss_mode vanilla also clip_ratio_c 3.0: a dual clip is on "
        "by default",
    )

    def __post_init__(self) -> None:
        if self.low < 0 or self.high < 0:
            raise ValueError(f"gate.low {self.low}, gate.high {self.high}: widths of the clip cannot be negative")
        if self.dual is not None and self.dual <= 1 + self.high:
            raise ValueError(f"gate.dual is {self.dual}: the dual clip must lie above 1 + high = {1 + self.high}")

    @property
    def formula(self) -> str:
        inner = f"min( ρ·A, clip(ρ, {1 - self.low:g}, {1 + self.high:g})·A )"
        return inner if self.dual is None else f"max( {inner}, {self.dual:g}·A if A < 0 )"

    def peers_in(self, algorithm: Any) -> Peers:
        """Peers on a ratio that is a mean over a row: they hold both in one loss of theirs."""
        if not RatioTraits.read(algorithm.ratio).length_normalised:
            return self.peers
        return Peers(
            "epsilon 0.2 unless set, epsilon_high None (= epsilon), delta None: GSPO's widths must be given",
            "clip_ratio_low 0.2, clip_ratio_high 0.2 unless set; no dual clip: clip_ratio_c is not read",
        )

    @property
    def band(self) -> tuple[float, float]:
        return 1 - self.low, 1 + self.high

    @property
    def width(self) -> float:
        return min(self.low, self.high)

    def lens_edge(self, ratio: float, advantage: float) -> tuple[float, str] | None:
        if self.dual is not None and advantage < 0 and ratio > self.dual:
            return self.dual, "the dual clip"
        return (self.band[1], "the upper clip bound") if advantage > 0 else (self.band[0], "the lower clip bound")

    def __call__(self, log_ratio: Tokens, logprobs: Tokens, advantages: Tokens, mask: Mask) -> Tokens:
        ratio = bounded_exp(log_ratio)
        gain = torch.minimum(ratio * advantages, ratio.clamp(*self.band) * advantages)
        if self.dual is not None:
            gain = torch.where(advantages < 0, torch.maximum(gain, self.dual * advantages), gain)
        return -gain

    def through(self, log_ratio: Tokens, advantages: Tokens) -> Tokens:
        ratio = bounded_exp(log_ratio)
        lowest, highest = self.band
        blocked = ((advantages > 0) & (ratio > highest)) | ((advantages < 0) & (ratio < lowest))
        if self.dual is not None:
            blocked |= (advantages < 0) & (ratio > self.dual)
        return (~blocked).to(log_ratio.dtype)


@dataclass(frozen=True)
class SoftGate:
    """(4/τ)·σ(τ(r−1))·A with τ = tau_pos for A > 0, else tau_neg. SAPO.

    The gradient is A·r·sech²(τ(r−1)/2): full at r = 1, fading on both sides. The factor 4/τ ensures that;
    without it (normalised False) the on-policy gradient is τ/4 of the usual one.
    """

    tau_pos: float = 1.0
    """Temperature for A > 0."""
    tau_neg: float = 1.05
    """Temperature for A ≤ 0. Larger than tau_pos in the paper, so that these tokens fade faster."""
    normalised: bool = True
    """True to multiply by 4/τ, which makes the gradient at r = 1 the usual one."""
    fades: ClassVar[bool] = True
    peers: ClassVar[Peers] = Peers(
        'loss_type "sapo", sapo_temperature_pos 1.0, sapo_temperature_neg 1.05',
        "loss_mode sapo, actor.tau_pos 1.0, actor.tau_neg 1.05",
    )
    metrics: ClassVar[Mapping[str, str]] = {
        "sapo_gap": "difference between a completion's mean soft gate and the gate of its sequence ratio"
    }

    def __post_init__(self) -> None:
        if self.tau_pos <= 0 or self.tau_neg <= 0:
            raise ValueError(f"gate.tau_pos {self.tau_pos}, gate.tau_neg {self.tau_neg}: temperatures must be positive")

    @property
    def formula(self) -> str:
        factor = "(4/τ)·" if self.normalised else ""
        return f"{factor}σ( τ(ρ − 1) ) · A,  τ = {self.tau_pos:g} if A > 0 else {self.tau_neg:g}"

    def remarks(self, algorithm: Any) -> Iterator[str]:
        if self.tau_neg < self.tau_pos:
            yield f"gate {self}: tau_neg below tau_pos lets negative tokens push further, which SAPO found unstable"

    def lens_manner(self, advantage: float) -> str:
        return f"at temperature {self.tau_pos if advantage > 0 else self.tau_neg:g}"

    def statistics(self, log_ratio: Tokens, advantages: Tokens, mask: Mask) -> Mapping[str, Tokens]:
        return {"sapo_gap": self.sequence_gap(log_ratio, advantages, mask)}

    def __call__(self, log_ratio: Tokens, logprobs: Tokens, advantages: Tokens, mask: Mask) -> Tokens:
        tau = self._tau(advantages)
        scale = 4 / tau if self.normalised else 1.0
        return -scale * torch.sigmoid(tau * (bounded_exp(log_ratio) - 1)) * advantages

    def through(self, log_ratio: Tokens, advantages: Tokens) -> Tokens:
        tau = self._tau(advantages)
        opening = torch.sigmoid(tau * (bounded_exp(log_ratio) - 1))
        return (4.0 if self.normalised else tau) * opening * (1 - opening)

    def sequence_gap(self, log_ratio: Tokens, advantages: Tokens, mask: Mask) -> Tokens:
        """|mean over the row of sech²(τ(r−1)/2) − sech²(τ·z̄/2)|, z̄ the mean of z = log r: repeated at every token.

        SAPO's paper reads its gate as a soft gate on GSPO's sequence ratio e^z̄. The distance is at most
        τ²/4 · (Var(r) + |(r̄−1)² − z̄²|), r̄ the mean of r; no multiple of Var(z) alone bounds it. Hence this number.
        """
        tau = self._tau(advantages)
        real = sech_squared(tau * (bounded_exp(log_ratio) - 1) / 2)
        pooled = sech_squared(tau * row_mean(log_ratio, mask) / 2)
        return row_mean(real - pooled, mask).abs().expand_as(log_ratio)

    def _tau(self, advantages: Tokens) -> Tokens:
        return torch.where(
            advantages > 0,
            torch.full_like(advantages, self.tau_pos),
            torch.full_like(advantages, self.tau_neg),
        )


def sech_squared(values: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """1/cosh², without the overflow of cosh."""
    return 1 - values.tanh().square()


@dataclass(frozen=True)
class Unclipped:
    """r·A: the plain importance-sampled objective without any clipping. KL-Cov."""

    formula: ClassVar[str] = "ρ · A"
    peers: ClassVar[Peers] = Peers("none", "loss_mode kl_cov")

    def __call__(self, log_ratio: Tokens, logprobs: Tokens, advantages: Tokens, mask: Mask) -> Tokens:
        return -bounded_exp(log_ratio) * advantages

    def through(self, log_ratio: Tokens, advantages: Tokens) -> Tokens:
        return torch.ones_like(log_ratio)


@dataclass(frozen=True)
class GeometricClip:
    """Clips each token's log-ratio on the side that its advantage pushes to, then takes the geometric mean. GMPO.

    Not a clipped sequence ratio, where the mean comes first. Widths are in log space: e^-low to e^high.
    """

    low: float = 0.4
    """Lower clip width of the log-ratio."""
    high: float = 0.4
    """Upper clip width of the log-ratio."""
    pools: ClassVar[bool] = True
    peers: ClassVar[Peers] = Peers("experimental GMPO trainer", "loss_mode geo_mean: a plain mean per micro-batch")

    def __post_init__(self) -> None:
        if self.low < 0 or self.high < 0:
            raise ValueError(f"gate.low {self.low}, gate.high {self.high}: widths of the clip cannot be negative")

    @property
    def formula(self) -> str:
        highest, lowest = math.exp(self.high), math.exp(-self.low)
        return f"( Π_t ρ clipped at {highest:.4g} if A > 0, at {lowest:.4g} else )^(1/|y|) · A"

    @property
    def band(self) -> tuple[float, float]:
        return math.exp(-self.low), math.exp(self.high)

    def __call__(self, log_ratio: Tokens, logprobs: Tokens, advantages: Tokens, mask: Mask) -> Tokens:
        clipped = torch.where(advantages > 0, log_ratio.clamp(max=self.high), log_ratio.clamp(min=-self.low))
        return -bounded_exp(row_mean(clipped, mask)) * advantages

    def through(self, log_ratio: Tokens, advantages: Tokens) -> Tokens:
        blocked = ((advantages > 0) & (log_ratio > self.high)) | ((advantages < 0) & (log_ratio < -self.low))
        return (~blocked).to(log_ratio.dtype)


@dataclass(frozen=True)
class Reinforce:
    """A·log π: the score function, without a ratio. REINFORCE, RLOO, GPG."""

    score_form: ClassVar[bool] = True
    ignores_ratio: ClassVar[bool] = True
    formula: ClassVar[str] = "A · log π"
    peers: ClassVar[Peers] = Peers("none", "loss_mode gpg")

    def __call__(self, log_ratio: Tokens, logprobs: Tokens, advantages: Tokens, mask: Mask) -> Tokens:
        return -advantages * logprobs

    def through(self, log_ratio: Tokens, advantages: Tokens) -> Tokens:
        return torch.ones_like(log_ratio)


@dataclass(frozen=True)
class CappedScore:
    """sg[clip(r, 1−low, 1+high)]·A·log π: the weight is capped, and every token keeps a gradient. CISPO."""

    high: float = 4.0
    """Upper width: the ratio is capped at 1 + high, as in the paper."""
    low: float | None = None
    """Lower width: the ratio is at least 1 − low. None: no lower bound, as in the paper."""
    score_form: ClassVar[bool] = True
    peers: ClassVar[Peers] = Peers(
        'loss_type "cispo": epsilon_high is the cap itself, 1 + our high',
        "loss_mode cispo: two-sided, 0.2 and 0.2 by default",
    )

    def __post_init__(self) -> None:
        if self.high < 0 or (self.low is not None and self.low < 0):
            raise ValueError(f"gate.low {self.low}, gate.high {self.high}: widths of the cap cannot be negative")

    @property
    def formula(self) -> str:
        lowest = 0 if self.low is None else 1 - self.low
        return f"sg[ clip(ρ, {lowest:g}, {1 + self.high:g}) ] · A · log π"

    @property
    def band(self) -> tuple[float, float]:
        return (0.0 if self.low is None else 1 - self.low), 1 + self.high

    def __call__(self, log_ratio: Tokens, logprobs: Tokens, advantages: Tokens, mask: Mask) -> Tokens:
        return -bounded_exp(log_ratio).clamp(*self.band).detach() * advantages * logprobs

    def through(self, log_ratio: Tokens, advantages: Tokens) -> Tokens:
        ratio = bounded_exp(log_ratio)
        return ratio.clamp(*self.band) / ratio


@dataclass(frozen=True)
class GammaScore:
    """sg[φ(w)]·A·log π with φ(w) = e^rate · w^power · e^(−rate·w), on the product ratio. VESPO."""

    power_pos: float = 2.0
    """Power of w for A ≥ 0."""
    rate_pos: float = 3.0
    """Rate of decay in w for A ≥ 0."""
    power_neg: float = 3.0
    """Power of w for A < 0."""
    rate_neg: float = 2.0
    """Rate of decay in w for A < 0."""
    score_form: ClassVar[bool] = True
    fades: ClassVar[bool] = True
    weighs_rows: ClassVar[bool] = True
    peers: ClassVar[Peers] = Peers('loss_type "vespo", vespo_{k,lambda}_{pos,neg}', "none")

    def __post_init__(self) -> None:
        if min(self.power_pos, self.rate_pos, self.power_neg, self.rate_neg) <= 0:
            raise ValueError(f"gate: powers and rates of {self} must all be positive")

    @property
    def formula(self) -> str:
        positive, negative = f"{self.power_pos:g}, {self.rate_pos:g}", f"{self.power_neg:g}, {self.rate_neg:g}"
        return f"sg[ e^λ·ρ^k·e^(−λρ) ] · A · log π,  (k, λ) = ({positive}) if A ≥ 0 else ({negative})"

    def contradictions(self, algorithm: Any) -> Iterator[str]:
        ratio = RatioTraits.read(algorithm.ratio)
        if not ratio.pools or ratio.length_normalised:
            yield f"gate {self} weighs whole completions: use ratio=SequenceProductRatio(), not {algorithm.ratio}"

    def __call__(self, log_ratio: Tokens, logprobs: Tokens, advantages: Tokens, mask: Mask) -> Tokens:
        return -self._log_weight(log_ratio, advantages).exp().detach() * advantages * logprobs

    def through(self, log_ratio: Tokens, advantages: Tokens) -> Tokens:
        return (self._log_weight(log_ratio, advantages) - log_ratio).exp()

    def _log_weight(self, log_ratio: Tokens, advantages: Tokens) -> Tokens:
        ratio = bounded_exp(log_ratio)
        positive = self.rate_pos + self.power_pos * log_ratio - self.rate_pos * ratio
        negative = self.rate_neg + self.power_neg * log_ratio - self.rate_neg * ratio
        return torch.where(advantages >= 0, positive, negative)


Gate = Clip | SoftGate | Unclipped | GeometricClip | Reinforce | CappedScore | GammaScore | GateProtocol
