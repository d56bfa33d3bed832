"""Stage 10: what one token counts for.

A weight per token, not a reduction: computed once over all rows of an optimizer step, so that
`loss = (token_loss * weights).sum()` adds up exactly over micro-batches, packing and devices. All sampled
tokens of a row weigh the same: `of_rows` says how much, from the rows' counts of sampled tokens alone.

Two rules hold for every piece here. A row whose tokens are all masked trained on nothing but keeps
its place in the denominator, and so does a token that `select` or `correct` rejects: weights see
the mask only. Weights are float64, so that a float64 loss is exact; the objective casts them down.
What left the batch (dropped groups, unscored rows) is not passed in at all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from proximo.maths.groups import group_index, sum_by_group
from proximo.maths.pieces.protocols import WeightsProtocol
from proximo.maths.pieces.traits import AdvantageTraits
from proximo.tensor_types import Bool, Float, Int


@dataclass(frozen=True)
class _OneForARow:
    def of_rows(self, counts: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        """The weight of each sampled token of a row."""
        raise NotImplementedError

    def __call__(self, mask: Bool[Tensor, "B T"], group: Int[Tensor, " B"]) -> Float[Tensor, "B T"]:
        return token_weights(self, mask, group)


@dataclass(frozen=True)
class TokenMean(_OneForARow):
    """Every sampled token of the step counts the same: 1 / N. DAPO's loss, and PPO's."""

    by_token: ClassVar[bool] = True

    def of_rows(self, counts: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        return torch.ones_like(counts) / counts.sum().clamp(min=1)


@dataclass(frozen=True)
class SequenceMean(_OneForARow):
    """Every completion counts the same: 1 / (B · |y|). GRPO's loss, GSPO's and SAPO's."""

    def of_rows(self, counts: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        return 1 / (max(len(counts), 1) * counts.clamp(min=1))


@dataclass(frozen=True)
class PromptMean(_OneForARow):
    """Every prompt counts the same, each token of its group alike: 1 / (P · tokens of the group).

    The literal reading of DAPO's objective, whose denominator stands inside the expectation over prompts.
    """

    def of_rows(self, counts: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        index, num_groups = group_index(group)
        tokens = sum_by_group(counts, index, num_groups).clamp(min=1)
        return 1 / (max(num_groups, 1) * tokens[index])


@dataclass(frozen=True)
class SequenceSum(_OneForARow):
    """The tokens of a completion add up: 1 / B. A long completion counts for more. RLOO, LUSPO."""

    def of_rows(self, counts: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        return torch.ones_like(counts) / max(len(counts), 1)


@dataclass(frozen=True)
class ConstantLength(_OneForARow):
    """As SequenceSum, divided by a length that no completion can influence: 1 / (B · length). Dr. GRPO."""

    length: int | None = None
    """The generation budget in tokens. None takes the run's completion limit."""

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise ValueError(f"weights.length is {self.length}: give the generation budget, at least 1 token")

    def with_limit(self, completion_limit: int) -> "ConstantLength":
        return replace(self, length=completion_limit) if self.length is None else self

    def remarks(self, algorithm: Any) -> Iterator[str]:
        if AdvantageTraits.read(algorithm.advantage).by_group_std:
            yield (
                f"weights ConstantLength with advantage {type(algorithm.advantage).__name__}: Dr. GRPO drops the std "
                "too, use GroupCentred()"
            )

    def of_rows(self, counts: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        if self.length is None:
            raise ValueError(
                "weights.length is None, and outside a run there is no completion limit to take: "
                "use replace(algorithm, weights=ConstantLength(length))"
            )
        return torch.ones_like(counts) / (max(len(counts), 1) * self.length)


Weights = TokenMean | SequenceMean | PromptMean | SequenceSum | ConstantLength | WeightsProtocol


def token_weights(
    weights: WeightsProtocol, mask: Bool[Tensor, "B T"], group: Int[Tensor, " B"]
) -> Float[Tensor, "B T"]:
    """The weight of every sampled token of an optimizer step, 0 elsewhere."""
    return mask.double() * weights.of_rows(mask.sum(dim=1).double(), group).unsqueeze(1)
