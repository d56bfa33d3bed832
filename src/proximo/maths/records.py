"""The records that flow between the stages: what a caller passes, and what a piece gets to see."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from proximo.maths.arithmetic import sampled
from proximo.tensor_types import Bool, Float, Int
from proximo.types import Batch


@dataclass(frozen=True)
class Feedback:
    """What came back for a batch of rollouts: everything an advantage may be made of."""

    rewards: Float[Tensor, " B"]
    """After shaping. NaN: the grader failed; never to be read as 0."""
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
        """What a row earned in all, outcome and tokens together."""
        return self.rewards + self.step_rewards().sum(dim=1)


@dataclass(frozen=True)
class Credit:
    """One advantage per token, and what a value model should have predicted where there is one."""

    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"] | None = None


@dataclass(frozen=True)
class Candidates:
    """What a choice of tokens may depend on. No gradient flows through any of it."""

    logprobs: Float[Tensor, "B T"]
    rollout_logprobs: Float[Tensor, "B T"]
    """The sampler's own where it gave them, else the anchor's."""
    advantages: Float[Tensor, "B T"]
    through: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"] | None
    mask: Bool[Tensor, "B T"]


@dataclass(frozen=True)
class LossInputs:
    """The tensors of one call of the loss, as the caller has them: [B, T] unless stated otherwise."""

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
        """A batch's own tensors, and in their place or beside them the given ones."""
        names = ("old_logprobs", "advantages", "mask", "group", "ref_logprobs", "rollout_logprobs", "outcome")
        return cls(**({name: getattr(batch, name) for name in names} | tensors))


@dataclass(frozen=True)
class Rows:
    """The rows of one call: float32 at least, constants detached, exactly 0 off the mask."""

    logprobs: Float[Tensor, "B T"]
    """The only tensor here with a gradient, apart from `entropy`."""
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
