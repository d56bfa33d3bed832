"""Objectives on ranked pairs: preference optimisation and reward models.

Each returns one loss per pair; the caller weights and adds them.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from proximo.losses.arithmetic import group_index
from proximo.types.batches import to_device
from proximo.types.tensor_types import Float, Int

__all__ = ["BradleyTerry", "Dpo", "Ipo"]


@dataclass(frozen=True)
class Dpo:
    """−log σ(beta · margin), margin = how much more the policy moved towards the chosen completion than towards the
    rejected one."""

    beta: float = 0.1
    """Strength of the implicit KL to the reference: smaller values let the policy move further."""
    label_smoothing: float = 0.0
    """Assumed share of pairs that are ranked the wrong way round."""
    averages: ClassVar[bool] = False
    """True if a completion's log-prob is a mean over its tokens instead of a sum."""

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"beta is {self.beta}: it must be positive, say 0.1")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing is {self.label_smoothing}: it must lie from 0 to below 0.5")

    def __call__(self, chosen: Float[Tensor, " N"], rejected: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Takes log π − log π_ref of each completion, summed over its tokens."""
        logit = self.beta * (chosen - rejected)
        return -(1 - self.label_smoothing) * logsigmoid(logit) - self.label_smoothing * logsigmoid(-logit)


@dataclass(frozen=True)
class Ipo:
    """(margin − 1/(2·beta))²: a finite target for the margin.

    Takes log π − log π_ref of each completion: averaged over its tokens in the form that the authors
    confirmed, summed in other implementations.
    """

    beta: float = 0.1
    """Strength of the implicit KL to the reference: the target margin is 1/(2·beta)."""
    averages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"beta is {self.beta}: it must be positive, say 0.1")

    def __call__(self, chosen: Float[Tensor, " N"], rejected: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        return (chosen - rejected - 1 / (2 * self.beta)).square()


@dataclass(frozen=True)
class BradleyTerry:
    """−log σ(chosen − rejected − margin) + centring · (chosen + rejected)²."""

    centring: float = 0.0
    """Strength of the term that keeps scores near 0; without it only differences matter. 0.01 is usual."""

    def __post_init__(self) -> None:
        if self.centring < 0:
            raise ValueError(f"centring is {self.centring}: it cannot be negative")

    def __call__(
        self, chosen: Float[Tensor, " N"], rejected: Float[Tensor, " N"], margin: Float[Tensor, " N"] | None = None
    ) -> Float[Tensor, " N"]:
        gap = chosen - rejected if margin is None else chosen - rejected - margin
        return -logsigmoid(gap) + self.centring * (chosen + rejected).square()


@dataclass(frozen=True)
class Pairs:
    """Pairs of rows of the same group, with weights."""

    chosen: Int[Tensor, " N"]
    rejected: Int[Tensor, " N"]
    weights: Float[Tensor, " N"]
    """Weights that add up to 1 in each group, so that a prompt counts once however many completions it has."""

    def to(self, device: torch.device) -> "Pairs":
        return Pairs(*(to_device(part, device) for part in (self.chosen, self.rejected, self.weights)))


def ranked_pairs(group: Int[Tensor, " B"]) -> Pairs:
    """All pairs of each group. Rows of a group must be in order, best first, but need not be adjacent."""
    chosen, rejected = (group[:, None] == group).triu(diagonal=1).nonzero(as_tuple=True)
    index, num_groups = group_index(group)
    counts = torch.bincount(index[chosen], minlength=num_groups)
    return Pairs(chosen, rejected, 1 / counts[index[chosen]].double())


def pair_accuracy(gap: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """1 where the chosen row scores higher, 0 where it scores lower, ½ for equal scores."""
    return (gap > 0).to(gap.dtype) + (gap == 0).to(gap.dtype) / 2


def calibration_error(gap: Float[Tensor, " N"], weights: Float[Tensor, " N"], bins: int = 10) -> Float[Tensor, ""]:
    """Expected calibration error: the mean distance between confidence and accuracy over equal bins of confidence.

    A gap is chosen − rejected. Confidence is σ(|gap|), the model's probability for the row that it prefers,
    so the bins divide ½ to 1.
    """
    confidence = gap.abs().sigmoid()
    number = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    # A bin's share times |its mean confidence − its accuracy|: the bin's own weight cancels.
    distance = torch.zeros(bins, dtype=gap.dtype, device=gap.device)
    distance.index_add_(0, number, weights.to(gap.dtype) * (confidence - pair_accuracy(gap)))
    return distance.abs().sum() / weights.sum().to(gap.dtype)
