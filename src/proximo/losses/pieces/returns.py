"""Sums and next values along the sampled tokens of a row, for returns, GAE and whitening."""

from collections.abc import Sequence

import torch
from torch import Tensor

from proximo.losses.arithmetic import sampled
from proximo.losses.records import Feedback
from proximo.types.tensor_types import Bool, Float


def earned(feedback: Feedback) -> Float[Tensor, "B T"]:
    """Token rewards with the outcome on the last sampled token of each row."""
    order = feedback.mask.cumsum(dim=1)
    is_last = feedback.mask & (order == order[:, -1:])
    return feedback.step_rewards() + sampled(feedback.rewards.unsqueeze(1).expand(is_last.shape), is_last)


def backward_sums(
    values: Float[Tensor, "B T"], factor: Float[Tensor, " B"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """x_t + factor · (the sum at the next sampled token); 0 outside the mask."""
    total = torch.zeros_like(factor)
    sums = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        total = torch.where(mask[:, t], values[:, t] + factor * total, total)
        sums[:, t] = total
    return sampled(sums, mask)


def next_sampled(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The value at the next sampled token of the row; 0 after the last one."""
    upcoming = torch.zeros_like(values[:, 0]) if values.shape[1] else values.new_zeros(len(values))
    following = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        following[:, t] = upcoming
        upcoming = torch.where(mask[:, t], values[:, t], upcoming)
    return following


def whiten(values: Float[Tensor, " N"], epsilon: float) -> Float[Tensor, " N"]:
    """Mean 0 and unbiased variance 1; exactly 0 if all values are equal."""
    if len(values) < 2 or values.max() == values.min():
        return torch.zeros_like(values)
    return (values - values.mean()) * torch.rsqrt(values.var(correction=1) + epsilon)


def scattered(values: Sequence[Tensor], where: Sequence[Tensor], found: Float[Tensor, " N"]) -> list[Tensor]:
    """Parts of a batch, [B, T] each, with the values `found` over all parts written to the positions `where`."""
    pieces = found.split([int(each.sum()) for each in where])
    return [each.masked_scatter(*into) for each, *into in zip(values, where, pieces, strict=True)]
