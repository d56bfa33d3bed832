"""Records passed between the stages: the caller's tensors, and what pieces get."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from proximo.losses.arithmetic import Mask, Tokens, row_sum, sampled
from proximo.types.batches import Batch
from proximo.types.tensor_types import Bool, Float, Int

__all__ = ["Candidates", "Credit", "Feedback", "LossInputs", "Rows"]


@dataclass(frozen=True)
class Feedback:
    """Rewards and values of a batch of rollouts: everything that an advantage may use."""

    rewards: Float[Tensor, " B"]
    """Rewards after shaping. NaN: the grader failed, which is not reward 0."""
    group: Int[Tensor, " B"]
    mask: Mask
    values: Tokens | None = None
    """The value model's estimate before token t is consumed."""
    token_rewards: Tokens | None = None
    """Rewards of single tokens (KL in the reward, process steps). NaN: no reward here, which is not reward 0."""
    old_logprobs: Tokens | None = None
    """Log-probs of the policy that sampled."""
    ref_logprobs: Tokens | None = None
    """Log-probs of the reference."""
    teacher_logprobs: Tokens | None = None
    """Log-probs of a teacher, for distillation."""

    @property
    def scored(self) -> Bool[Tensor, " B"]:
        return ~torch.isnan(self.rewards)

    def step_rewards(self) -> Tokens:
        """Token rewards with 0 where there is none."""
        if self.token_rewards is None:
            return torch.zeros_like(self.mask, dtype=self.rewards.dtype)
        return sampled(self.token_rewards.nan_to_num(nan=0.0), self.mask)

    def totals(self) -> Float[Tensor, " B"]:
        """Total reward of each row: task score plus token rewards."""
        return self.rewards + self.step_rewards().sum(dim=1)

    def gap_to(self, name: Literal["ref_logprobs", "teacher_logprobs"], reader: object) -> Tokens:
        """log π_old − log-prob of another model at each sampled token. `reader`: the piece that needs it."""
        other: Tensor | None = getattr(self, name)
        if self.old_logprobs is None or other is None:
            missing = "old_logprobs" if self.old_logprobs is None else name
            raise ValueError(f"{missing} is None, but {reader} reads it: pass one log-prob per token")
        return sampled(self.old_logprobs.to(self.rewards.dtype) - other.to(self.rewards.dtype), self.mask)

    @classmethod
    def summary(cls, parts: Sequence["Feedback"]) -> "Feedback":
        """The rows of all parts, each as one token with the row's sums: all that an advantage by row may read."""

        def sums(name: str) -> Float[Tensor, "B 1"] | None:
            tensors = [getattr(part, name) for part in parts]
            if any(each is None for each in tensors):
                return None
            rows = zip(tensors, parts, strict=True)
            return torch.cat([row_sum(each.to(part.rewards.dtype), part.mask) for each, part in rows])

        return cls(
            rewards=torch.cat([part.rewards for part in parts]),
            group=torch.cat([part.group for part in parts]),
            mask=torch.cat([torch.ones_like(part.mask[:, :1]) for part in parts]),
            token_rewards=torch.cat([part.step_rewards().sum(dim=1, keepdim=True) for part in parts]),
            **{name: sums(name) for name in ("old_logprobs", "ref_logprobs", "teacher_logprobs")},
        )


@dataclass(frozen=True)
class Credit:
    """Advantage of each token, and the value model's targets if there is one."""

    advantages: Tokens
    returns: Tokens | None = None


@dataclass(frozen=True)
class Candidates:
    """Numbers that a selection of tokens may depend on; none of it has a gradient."""

    logprobs: Tokens
    rollout_logprobs: Tokens
    """The sampler's log-probs if known, otherwise the anchor's."""
    advantages: Tokens
    through: Tokens
    entropy: Tokens | None
    mask: Mask


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

    logprobs: Tokens
    """Log-probs of the current policy; only these and `entropy` have a gradient."""
    anchor_logprobs: Tokens
    old_logprobs: Tokens
    rollout_logprobs: Tokens | None
    ref_logprobs: Tokens | None
    advantages: Tokens
    entropy: Tokens | None
    outcome: Float[Tensor, " B"] | None
    mask: Mask
    """Sampled tokens of scored rows."""
    scored: Bool[Tensor, " B"]
    group: Int[Tensor, " B"]
