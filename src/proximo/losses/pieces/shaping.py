"""Stage 1: from the task score of a completion to its reward.

A shape adds to the task score or to the tokens' rewards; it never touches the task score itself, on which
`keep` decides which groups train. Length penalties are measured in units of half the distance between what a right
and a wrong answer earn: 1 where those are ±1, as in DAPO's paper, 0.5 where they are 1 and 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import Tensor

from proximo.losses.arithmetic import Mask, Tokens, count_of, sampled
from proximo.losses.pieces.divergences import K1, Divergence
from proximo.losses.pieces.protocols import Peers, ShapeProtocol, ShapeTraits, formula_of
from proximo.types.tensor_types import Float, Int

__all__ = ["AdaptiveKl", "KlReward", "LinearOverlong", "SoftOverlong"]

UNIT = "u = half of what a right answer earns more than a wrong one"
"""1 where rewards are ±1, as in DAPO's paper; 0.5 where they are 0 and 1."""


@dataclass(frozen=True)
class SoftOverlong:
    """0 up to limit − cache tokens, then linear down to −1 unit at the limit, and never below −cap. DAPO, equation 13.

    A unit is half the distance between the rewards of a right and a wrong answer, (1 − (−1))/2 in the paper. So a
    right answer at the limit stays half the distance above a wrong short one, whatever numbers the task gives.
    """

    limit: int | None = None
    """L_max in tokens. None: the run's completion limit."""
    cache: int | None = None
    """L_cache in tokens, over which the penalty grows. None: 20 % of the limit."""
    cap: float | None = 1.0
    """Largest penalty, in units. None: the penalty keeps growing beyond the limit."""
    peers: ClassVar[Peers] = Peers(
        "reward function get_soft_overlong_punishment(max_completion_len, soft_punish_cache), capped too; u is 1",
        "reward manager dapo, overlong_buffer.{len, penalty_factor}; not capped beyond the limit, u is 1",
    )

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"shape.limit is {self.limit}: give the longest completion in tokens")
        if self.cache is not None and not 0 < self.cache <= (self.limit or self.cache):
            raise ValueError(f"shape.cache is {self.cache}: it must lie between 1 and shape.limit ({self.limit})")
        if self.cap is not None and self.cap <= 0:
            raise ValueError(f"shape.cap is {self.cap}: give the largest penalty, say 1, or None")

    @property
    def formula(self) -> str:
        cap = "" if self.cap is None else f", at most {self.cap:g}"
        lengths = f"L = {self.limit or 'completion limit'}, C = {self.cache or 'L/5'}"
        return f"− u · (|y| − L + C)/C where positive{cap};  {lengths}, {UNIT}"

    def __call__(self, lengths: Int[Tensor, " B"], completion_limit: int, unit: float = 1.0) -> Float[Tensor, " B"]:
        """`unit` is half the difference between the rewards of a right and a wrong answer."""
        limit = completion_limit if self.limit is None else self.limit
        cache = max(1, count_of(0.2, limit)) if self.cache is None else self.cache
        penalty = (lengths.double() - (limit - cache)).clamp(min=0) / cache
        return -unit * (penalty if self.cap is None else penalty.clamp(max=self.cap))


@dataclass(frozen=True)
class LinearOverlong:
    """−coefficient for every token beyond the limit, without a bound. A variant of DAPO's penalty in other
    implementations; kept for comparison."""

    coefficient: float = 1e-4
    """Penalty of a token, in the units of `SoftOverlong`: half the distance between right and wrong."""
    limit: int | None = None
    """Limit in tokens. None: the run's completion limit, so that the penalty is always 0."""
    peers: ClassVar[Peers] = Peers("none", "none")

    def __post_init__(self) -> None:
        if self.coefficient <= 0:
            raise ValueError(f"shape.coefficient is {self.coefficient}: use shape=None for no penalty")

    @property
    def formula(self) -> str:
        return f"− u · {self.coefficient:g} · tokens beyond {self.limit or 'the completion limit'};  {UNIT}"

    def __call__(self, lengths: Int[Tensor, " B"], completion_limit: int, unit: float = 1.0) -> Float[Tensor, " B"]:
        limit = completion_limit if self.limit is None else self.limit
        return -unit * self.coefficient * (lengths.double() - limit).clamp(min=0)


@dataclass(frozen=True)
class AdaptiveKl:
    """β ← β·(1 + clip(KL/target − 1, ±0.2)·completions/horizon) after each step. Ziegler et al., 1909.08593."""

    target: float = 6.0
    """Target KL of a completion from the reference, in nats over all its tokens."""
    horizon: int = 10_000
    """Number of completions over which the coefficient may change by a fifth; also the most that one step counts
    for."""

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon < 1:
            raise ValueError(
                f"shape.controller has target {self.target}, horizon {self.horizon}: give nats above 0 and at least "
                "1 completion"
            )

    def __call__(self, coefficient: float, kl: float, completions: int) -> float:
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return coefficient * (1 + error * min(completions / self.horizon, 1.0))


@dataclass(frozen=True)
class KlReward:
    """−coefficient · divergence from the reference at every sampled token, as part of the reward. RLHF's PPO."""

    coefficient: float = 0.05
    """Strength of the term. 0: no term, and no reference model is kept."""
    estimator: Divergence = field(default_factory=K1)
    """Estimator of the KL from sampled tokens."""
    controller: AdaptiveKl | None = None
    """Controller that moves the coefficient towards a target KL after each step. None: it is fixed."""
    per_token: ClassVar[bool] = True
    peers: ClassVar[Peers] = Peers(
        "none in GRPOTrainer; RLOOTrainer's beta", "use_kl_in_reward False, kl_penalty kl, kl_coef 0.001"
    )

    @property
    def formula(self) -> str:
        return f"− {self.coefficient:g} · ({formula_of(self.estimator)}) at every token"

    @property
    def is_off(self) -> bool:
        return self.coefficient == 0

    def __post_init__(self) -> None:
        if self.coefficient < 0:
            raise ValueError(f"shape.coefficient is {self.coefficient}: give 0 or more; a reward pulls, it cannot push")

    def __call__(self, old_logprobs: Tokens, ref_logprobs: Tokens, mask: Mask) -> Tokens:
        """Token rewards, which `proximo.advantages` takes as `token_rewards`."""
        on_policy = torch.zeros_like(old_logprobs)
        return sampled(-self.coefficient * self.estimator(old_logprobs, ref_logprobs, on_policy), mask)


Shape = SoftOverlong | LinearOverlong | KlReward | ShapeProtocol


def kl_reward_of(shapes: Sequence[Shape]) -> KlReward | None:
    """The shape that rewards single tokens, if there is one."""
    matches = [shape for shape in shapes if ShapeTraits.read(shape).per_token]
    return cast(KlReward, matches[0]) if matches else None


def penalties_of(shapes: Sequence[Shape]) -> tuple[ShapeProtocol, ...]:
    """The shapes that add to the reward of a whole completion."""
    return tuple(cast(ShapeProtocol, shape) for shape in shapes if not ShapeTraits.read(shape).per_token)
