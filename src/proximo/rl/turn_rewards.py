"""Rewards of single turns and of single steps, for advantages that look at tokens."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from proximo.losses.pieces.protocols import AdvantageTraits
from proximo.losses.records import Feedback
from proximo.types import Batch, Completion, Rollout
from proximo.types.tensor_types import Float

Spell = Callable[[Sequence[int]], list[str]]
"""The text of each token of a completion."""


def turn_rewards(shape: tuple[int, int], completions: Sequence[Completion]) -> Float[Tensor, "B T"] | None:
    """What each turn earned, at its last token; None where no turn earned anything."""
    places = [
        (row, turn.end - 1, turn.reward)
        for row, completion in enumerate(completions)
        for turn in completion.turns
        if turn.reward and turn.end
    ]
    if not places:
        return None
    found = torch.zeros(shape, dtype=torch.float64)
    rows, columns, rewards = zip(*places, strict=True)
    found[list(rows), list(columns)] = torch.tensor(rewards, dtype=torch.float64)
    return found


def step_rewards(
    shape: tuple[int, int], rollouts: Sequence[Rollout], spell: Spell | None
) -> Float[Tensor, "B T"] | None:
    """The reward of each step at the token that ends it, NaN elsewhere; None where no completion was graded so.

    Two steps that end within one token are rewarded there together.
    """
    if spell is None or not any(rollout.grade.steps for rollout in rollouts):
        return None
    found = torch.full(shape, math.nan, dtype=torch.float64)
    for row, rollout in enumerate(rollouts):
        if not rollout.grade.steps:
            continue
        # A completion's text is its last reply.
        turns, tokens = rollout.completion.turns, rollout.completion.tokens
        first = turns[-2].end if len(turns) > 1 else 0
        ends = list(accumulate(map(len, spell(tokens[first:]))))
        for end, reward in rollout.grade.steps:
            place = first + min(bisect_left(ends, end), len(ends) - 1)
            known = found[row, place]
            found[row, place] = reward if known.isnan() else known + reward
    return found


def at_their_turns(feedback: Feedback, batch: Batch, weight: float, advantage: object) -> Feedback:
    """Feedback in which a turn's reward comes with the turn, instead of with all others after the last token; for an
    advantage of graded steps, their rewards and nothing else.

    A completion's sum stays the same up to rounding; so for advantages of whole completions nothing is moved, since
    equal rewards must stay equal to the last bit. `weight` is the weight of the environment's outcome in the reward.
    """
    traits = AdvantageTraits.read(advantage)
    if traits.needs_step_rewards:
        unknown = torch.full_like(batch.advantages, torch.nan)
        return replace(feedback, token_rewards=unknown if batch.step_rewards is None else batch.step_rewards)
    if batch.turn_rewards is None or not traits.per_token:
        return feedback
    mask = feedback.mask
    earned = (weight * batch.turn_rewards).to(feedback.rewards.dtype).masked_fill(~feedback.scored.unsqueeze(1), 0.0)
    order = mask.cumsum(dim=1)
    is_last = mask & (order == order[:, -1:])
    moved = earned - is_last * earned.sum(dim=1, keepdim=True)
    known = feedback.token_rewards
    return replace(feedback, token_rewards=moved if known is None else known + moved)
