"""Stages 1 to 3, shared by training and the lens: shape rewards, keep rows, assign advantages.

Advantages are computed over the whole rollout batch, dropped groups included; rows are removed afterwards.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from proximo.losses.arithmetic import answer_of, at_least_float32, check_shape, sampled_mask
from proximo.losses.pieces.credit import Advantage, ReturnToGo, assign
from proximo.losses.pieces.filters import Keep, left_out
from proximo.losses.pieces.protocols import AdvantageTraits, ShapeProtocol
from proximo.losses.pieces.shaping import KlReward
from proximo.losses.records import Feedback
from proximo.types.batches import Batch
from proximo.types.tensor_types import Bool, Float

__all__ = ["advantages"]


def shaped_rewards(
    batch: Batch, penalties: Sequence[ShapeProtocol], completion_limit: int, penalty_unit: float
) -> Float[Tensor, " B"]:
    """Stage 1: the graders' rewards plus the length penalties."""
    rewards = batch.rewards
    for penalty in penalties:
        answer = penalty(batch.sampled_lengths, completion_limit, penalty_unit)
        rewards = rewards + answer_of("shape", penalty, answer, rewards.shape).to(rewards.dtype)
    return rewards


def trained_rows(keep: Keep, batch: Batch) -> Bool[Tensor, " B"]:
    """Stage 2: the scored rows without those that `keep` rejects, by their task scores before any shaping."""
    return ~torch.isnan(batch.rewards) & ~left_out(keep, batch.outcome, batch.group)


def feedback_in(batch: Batch, kl_reward: KlReward | None) -> Feedback:
    """Stage 3's input from a batch with shaped rewards; token rewards only if there are reference log-probs."""
    token_rewards = None
    if kl_reward is not None and batch.ref_logprobs is not None:
        answer = kl_reward(batch.old_logprobs, batch.ref_logprobs, batch.mask)
        token_rewards = answer_of("shape", kl_reward, answer, batch.mask.shape)
    others = {name: getattr(batch, name) for name in ("old_logprobs", "ref_logprobs", "teacher_logprobs")}
    return feedback_of(batch.rewards, batch.group, batch.mask, batch.values, token_rewards, **others)


@torch.no_grad()
def returns_to_go(advantage: Advantage, feedback: Feedback) -> Tensor:
    """The actual return from each token on, with the advantage's discount: what a value model should predict."""
    discount = AdvantageTraits.read(advantage).discount
    return assign(ReturnToGo(discount), feedback).advantages


@runtime_checkable
class Credited(Protocol):
    """The part of an algorithm that decides advantages."""

    @property
    def advantage(self) -> Advantage: ...


@torch.no_grad()
def advantages(
    algorithm: Credited,
    *,
    rewards: Tensor,
    group: Tensor,
    mask: Tensor,
    values: Tensor | None = None,
    token_rewards: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    teacher_logprobs: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Advantages of a whole rollout batch, one per token, and the value model's targets where there is one.

    `rewards` and `group` are [B], the rest [B, T]. `rewards` are after shaping, `token_rewards` are added
    to them; log-probs are for an advantage that reads them. A NaN reward marks an unscored completion: its row comes
    back as NaN, and `policy_loss` then leaves it out of every term and denominator.
    """
    others = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs, "teacher_logprobs": teacher_logprobs}
    feedback = feedback_of(rewards, group, mask, values, token_rewards, **others)
    credit = assign(algorithm.advantage, feedback)
    return credit.advantages, credit.returns


def feedback_of(
    rewards: Tensor,
    group: Tensor,
    mask: Tensor,
    values: Tensor | None,
    token_rewards: Tensor | None,
    **logprobs: Tensor | None,
) -> Feedback:
    """Check what a caller passed. `logprobs`: of the policy that sampled and of other models, by their names in
    `Feedback`."""
    mask = sampled_mask(mask)
    check_shape("rewards", rewards, mask.shape[:1])
    check_shape("group", group, mask.shape[:1])
    for name, tensor in {"values": values, "token_rewards": token_rewards, **logprobs}.items():
        if tensor is not None:
            check_shape(name, tensor, mask.shape)
    rewards = at_least_float32(rewards)
    return Feedback(
        rewards=rewards,
        group=group,
        mask=mask,
        values=None if values is None else values.to(rewards.dtype),
        token_rewards=None if token_rewards is None else token_rewards.to(rewards.dtype),
        **logprobs,
    )
