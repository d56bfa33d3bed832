"""Rewards of single turns, for advantages that look at tokens."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from proximo.maths.pieces.traits import AdvantageTraits
from proximo.maths.records import Feedback
from proximo.tensor_types import Float
from proximo.types import Batch, Completion


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


def at_their_turns(feedback: Feedback, batch: Batch, weight: float, advantage: object) -> Feedback:
    """Feedback in which a turn's reward comes with the turn, instead of with all others after the last token.

    A completion's sum stays the same up to rounding; so for advantages of whole completions nothing is moved, since
    equal rewards must stay equal to the last bit. `weight` is the weight of the environment's outcome in the reward.
    """
    if batch.turn_rewards is None or not AdvantageTraits.read(advantage).per_token:
        return feedback
    mask = feedback.mask
    earned = (weight * batch.turn_rewards).to(feedback.rewards.dtype).masked_fill(~feedback.scored.unsqueeze(1), 0.0)
    order = mask.cumsum(dim=1)
    is_last = mask & (order == order[:, -1:])
    moved = earned - is_last * earned.sum(dim=1, keepdim=True)
    known = feedback.token_rewards
    return replace(feedback, token_rewards=moved if known is None else known + moved)
