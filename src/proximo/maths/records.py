"""Records passed between the stages: the caller's tensors, and what pieces get."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from proximo.maths.arithmetic import sampled
from proximo.tensor_types import Bool, Float, Int
from proximo.types import Batch


@dataclass(frozen=True)
class Feedback:
    """Rewards and values of a batch of rollouts: everything that an advantage may use."""

    rewards: Float[Tensor, " B"]
    """Rewards after shaping. NaN: the grader failed, which is not reward 0."""
    group: Int[Tensor, " B"]
    mask: Bool[Tensor, "B T"]
    values: Float[Tensor, "B T"] | None = None
    """The value model's estimate before token t is consumed."""
    token_rewards: Float[Tensor, "B T"] | None = None
    """Rewards of single tokens (KL in the reward, process steps). NaN: no reward here, which is not reward 0."""

    @property
    def scored(self) -> Bool[Tensor, " B"]:
        return ~torch.isnan(self.rewards)

    def step_rewards(self) -> Float[Tensor, "B T"]:
        """Token rewards with 0 where there is none."""
        if self.token_rewards is None:
            return torch.zeros_like(self.mask, dtype=self.rewards.dtype)
        return sampled(self.token_rewards.nan_to_num(nan=0.0), self.mask)

    def totals(self) -> Float[Tensor, " B"]:
        """Total reward of each row: outcome plus token rewards."""
        return self.rewards + self.step_rewards().sum(dim=1)


@dataclass(frozen=True)
class Credit:
    """Advantage of each token, and the value model's targets if there is one."""

    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"] | None = None


@dataclass(frozen=True)
class Candidates:
    """What a selection of tokens may depend on; none of it has a gradient."""

    logprobs: Float[Tensor, "B T"]
    rollout_logprobs: Float[Tensor, "B T"]
    """The sampler's log-probs if known, otherwise the anchor's."""
    advantages: Float[Tensor, "B T"]
    through: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"] | None
    mask: Bool[Tensor, "B T"]


@dataclass(frozen=True)
class LossInputs:
    """The caller's tensors for one call of the loss: [B, T] unless stated otherwise."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    group: Tensor
    """[B]"""
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    outcome: Tensor | None = None
    """[B]"""

    @classmethod
    def of(cls, batch: Batch, **tensors: Any) -> "LossInputs":
        """The tensors of a batch, with the given ones added or replaced."""
        names = ("old_logprobs", "advantages", "mask", "group", "ref_logprobs", "rollout_logprobs", "outcome")
        return cls(**({name: getattr(batch, name) for name in names} | tensors))


@dataclass(frozen=True)
class Rows:
    """Checked tensors of one call: at least float32, constants detached, exactly 0 outside the mask."""

    logprobs: Float[Tensor, "B T"]
    """Log-probs of the current policy; only these and `entropy` have a gradient."""
    anchor_logprobs: Float[Tensor, "B T"]
    old_logprobs: Float[Tensor, "B T"]
    rollout_logprobs: Float[Tensor, "B T"] | None
    ref_logprobs: Float[Tensor, "B T"] | None
    advantages: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"] | None
    outcome: Float[Tensor, " B"] | None
    mask: Bool[Tensor, "B T"]
    """Sampled tokens of scored rows."""
    scored: Bool[Tensor, " B"]
    group: Int[Tensor, " B"]
