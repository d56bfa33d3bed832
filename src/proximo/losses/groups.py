"""Statistics of each row's group.

Rows of a group need not be neighbours, and group labels may be any integers. A row whose reward is
NaN is unscored and left out of all statistics.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.types.tensor_types import Bool, Float, Int


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
    """Whether all scored values are equal, tested by max == min, since rounding may leave a standard deviation of
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
