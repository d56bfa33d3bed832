"""Masked sums, bounded exponentials, checks, and statistics of each row's group.

Tokens that the policy did not sample may hold anything (padding, -inf, NaN), so values pass
through `sampled` before any arithmetic: a masked NaN must not reach the loss or its gradient.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.types.tensor_types import Bool, Float, Int

Tokens = Float[Tensor, "B T"]
"""A number for each token."""
Mask = Bool[Tensor, "B T"]
"""True at some of the tokens."""
MAX_LOG = 80.0
"""exp(80) is 5.5e34: still finite in float32, and so is a product with an advantage and a weight."""


def count_of(share: float, total: int) -> int:
    """A share of a count, rounded to the nearest whole number, halves down. 0.29 of 100 is 29, 0.2 of 8 is 2.

    The product is rounded first: 0.29 * 100 is 28.999999999999996.
    """
    return math.ceil(round(share * total, 9) - 0.5)


def count_below(share: float, total: int) -> int:
    """A share of a count, rounded down: 0.29 of 100 is 29, 0.2 of 8 is 1."""
    return math.floor(round(share * total, 9))


def bounded_exp(exponent: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """exp that cannot overflow float32; exact for every log-ratio up to ±80."""
    return exponent.clamp(-MAX_LOG, MAX_LOG).exp()


def sampled(values: Tokens, mask: Mask) -> Tokens:
    """The values at sampled tokens, exactly 0 elsewhere."""
    return torch.where(mask, values, torch.zeros_like(values))


def row_sum(values: Tokens, mask: Mask) -> Float[Tensor, "B 1"]:
    """Sum over the sampled tokens of each row."""
    return sampled(values, mask).sum(dim=1, keepdim=True)


def row_mean(values: Tokens, mask: Mask) -> Float[Tensor, "B 1"]:
    """Mean over the sampled tokens of each row; 0 for a row without sampled tokens."""
    return row_sum(values, mask) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def at_least_float32(values: Tensor) -> Tensor:
    """Values in at least float32, which differences of log-probs need; bf16 and fp16 are converted."""
    return values if values.dtype == torch.float64 else values.float()


def sampled_mask(mask: Tensor) -> Mask:
    """The mask as booleans; numbers other than 0 and 1 are refused."""
    if mask.ndim != 2:
        raise ValueError(f"mask has shape {tuple(mask.shape)}: it must be [rows, positions]")
    if mask.dtype == torch.bool:
        return mask
    as_bool = mask != 0
    if not torch.equal(as_bool.to(mask.dtype), mask):
        raise ValueError(f"mask ({mask.dtype}) holds values other than 0 and 1: scale the loss by `weights`, not by it")
    return as_bool


def answer_of(stage: str, piece: object, answer: object, shape: torch.Size) -> Tensor:
    """A piece's result, checked to have the right shape: a smaller tensor would be broadcast silently."""
    if not isinstance(answer, Tensor) or answer.shape != shape:
        given = f"a tensor of shape {tuple(answer.shape)}" if isinstance(answer, Tensor) else f"{answer!r}"
        raise ValueError(
            f"{stage} {type(piece).__name__} returned {given}: it must return a tensor of shape {tuple(shape)}"
        )
    return answer


def check_shape(name: str, tensor: Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape:
        hint = f"; for one number per row pass {name}[:, None].expand_as(mask)" if tensor.shape == shape[:1] else ""
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the mask requires {tuple(shape)}{hint}")


@dataclass(frozen=True)
class Siblings:
    """Statistics over the scored rows of each row's group; every field is aligned with rows."""

    count: Float[Tensor, " B"]
    mean: Float[Tensor, " B"]
    deviation: Float[Tensor, " B"]
    """Each row's own value minus its group's mean; 0 for an unscored row."""
    square_sum: Float[Tensor, " B"]
    """Sum of the squared deviations in the group."""
    unanimous: Bool[Tensor, " B"]
    """True where all scored values are equal, tested by max == min, since rounding may leave a standard deviation of
    1e-17."""


def group_index(group: Int[Tensor, " B"]) -> tuple[Int[Tensor, " B"], int]:
    """Labels renumbered to 0..P-1, and P."""
    labels, index = torch.unique(group, return_inverse=True)
    return index, len(labels)


def sum_by_group(values: Float[Tensor, " B"], index: Int[Tensor, " B"], num_groups: int) -> Float[Tensor, " P"]:
    return values.new_zeros(num_groups).index_add_(0, index, values)


def siblings(values: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Siblings:
    """Group statistics of `values`, with NaN rows left out."""
    index, num_groups = group_index(group)
    scored = ~torch.isnan(values)
    known = torch.where(scored, values, torch.zeros_like(values))

    count = sum_by_group(scored.to(values.dtype), index, num_groups)
    mean = sum_by_group(known, index, num_groups) / count.clamp(min=1)
    deviation = torch.where(scored, known - mean[index], torch.zeros_like(known))
    square_sum = sum_by_group(deviation.square(), index, num_groups)

    infinity = torch.full_like(mean, torch.inf)
    highest = torch.scatter_reduce(-infinity, 0, index[scored], values[scored], "amax")
    lowest = torch.scatter_reduce(infinity, 0, index[scored], values[scored], "amin")
    return Siblings(
        count=count[index],
        mean=mean[index],
        deviation=deviation,
        square_sum=square_sum[index],
        unanimous=(highest <= lowest)[index],
    )
