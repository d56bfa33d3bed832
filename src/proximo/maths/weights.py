"""Stage 10: what one token counts for.

A weight per token, not a reduction: computed once over all rows of an optimizer step, so that
`loss = (token_loss * weights).sum()` adds up exactly over micro-batches, packing and devices.

Two rules hold for every piece here. A row whose tokens are all masked trained on nothing but keeps
its place in the denominator, and so does a token that `select` or `correct` rejects: weights see
the mask only. Weights are float64, so that a float64 loss is exact; the objective casts them down.
What left the batch (dropped groups, unscored rows) is not passed in at all.
"""

from dataclasses import dataclass

from torch import Tensor

from proximo.maths.groups import group_index, sum_by_group
from proximo.shapes import Bool, Float, Int


@dataclass(frozen=True)
class TokenMean:
    """Every sampled token of the step counts the same: 1 / N. DAPO's loss, and PPO's."""

    def __call__(self, mask: Bool[Tensor, "B T"], group: Int[Tensor, " B"]) -> Float[Tensor, "B T"]:
        weights = mask.double()
        return weights / weights.sum().clamp(min=1)


@dataclass(frozen=True)
class SequenceMean:
    """Every completion counts the same: 1 / (B · |y|). GRPO's loss, GSPO's and SAPO's."""

    def __call__(self, mask: Bool[Tensor, "B T"], group: Int[Tensor, " B"]) -> Float[Tensor, "B T"]:
        weights = mask.double()
        return weights / (max(len(mask), 1) * weights.sum(dim=1, keepdim=True).clamp(min=1))


@dataclass(frozen=True)
class PromptMean:
    """Every prompt counts the same, each token of its group alike: 1 / (P · tokens of the group).

    The literal reading of DAPO's objective, whose denominator stands inside the expectation over prompts.
    """

    def __call__(self, mask: Bool[Tensor, "B T"], group: Int[Tensor, " B"]) -> Float[Tensor, "B T"]:
        weights = mask.double()
        index, num_groups = group_index(group)
        tokens = sum_by_group(weights.sum(dim=1), index, num_groups).clamp(min=1)
        return weights / (max(num_groups, 1) * tokens[index].unsqueeze(1))


@dataclass(frozen=True)
class SequenceSum:
    """The tokens of a completion add up: 1 / B. A long completion counts for more. RLOO, LUSPO."""

    def __call__(self, mask: Bool[Tensor, "B T"], group: Int[Tensor, " B"]) -> Float[Tensor, "B T"]:
        return mask.double() / max(len(mask), 1)


@dataclass(frozen=True)
class ConstantLength:
    """As SequenceSum, divided by a length that no completion can influence: 1 / (B · length). Dr. GRPO."""

    length: int | None = None
    """The generation budget in tokens. None takes the run's completion limit."""

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise ValueError(f"weights.length is {self.length}: give the generation budget, at least 1 token")

    def __call__(self, mask: Bool[Tensor, "B T"], group: Int[Tensor, " B"]) -> Float[Tensor, "B T"]:
        if self.length is None:
            raise ValueError(
                "weights.length is None, and outside a run there is no completion limit to take: "
                "use replace(algorithm, weights=ConstantLength(length))"
            )
        return mask.double() / (max(len(mask), 1) * self.length)


Weights = TokenMean | SequenceMean | PromptMean | SequenceSum | ConstantLength
