"""Stage 10: the weight of each token in the loss.

A weight per token, not a reduction: computed once over all rows of an optimizer step, so that
`loss = (token_loss * weights).sum()` adds up exactly over micro-batches, packing and devices. All sampled
tokens of a row have the same weight, which `of_rows` computes from the rows' counts of sampled tokens.

Two rules hold for every piece here. A row whose tokens are all masked still counts in the
denominator, and so does a token that `select` or `correct` rejects: weights depend only on the
mask. Weights are float64, so that a float64 loss is exact; the objective casts them down.
Dropped groups and unscored rows are not passed in at all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from proximo.losses.arithmetic import Mask, Tokens, group_index, sum_by_group
from proximo.losses.pieces.protocols import AdvantageTraits, Peers, WeightsProtocol
from proximo.types.tensor_types import Float, Int

__all__ = ["ConstantLength", "PromptMean", "SequenceMean", "SequenceSum", "TokenMean", "token_weights"]


@dataclass(frozen=True)
class _OneForARow:
    def of_rows(self, counts: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Weight of each sampled token of a row."""
        raise NotImplementedError

    def __call__(self, mask: Mask, group: Int[Tensor, " B"]) -> Tokens:
        return token_weights(self, mask, group)


@dataclass(frozen=True)
class TokenMean(_OneForARow):
    """Every sampled token of the step counts the same: 1 / N. DAPO's loss, and PPO's."""

    by_token: ClassVar[bool] = True
    formula: ClassVar[str] = "(1/N) Σ_i Σ_t"
    peers: ClassVar[Peers] = Peers('loss_type "dapo", the default', "loss_agg_mode token-mean, the default")

    def of_rows(self, counts: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        return torch.ones_like(counts) / counts.sum().clamp(min=1)


@dataclass(frozen=True)
class SequenceMean(_OneForARow):
    """Every completion counts the same: 1 / (B · |y|). GRPO's loss, GSPO's and SAPO's."""

    formula: ClassVar[str] = "(1/B) Σ_i (1/|y_i|) Σ_t"
    peers: ClassVar[Peers] = Peers(
        'loss_type "grpo" or "sapo" (default "dapo")', "loss_agg_mode seq-mean-token-mean (default token-mean)"
    )

    def of_rows(self, counts: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        return 1 / (max(len(counts), 1) * counts.clamp(min=1))


@dataclass(frozen=True)
class PromptMean(_OneForARow):
    """Every prompt counts the same, and so does every token of its group: 1 / (P · tokens of the group).

    The literal reading of DAPO's objective, whose denominator is inside the expectation over prompts.
    """

    formula: ClassVar[str] = "(1/P) Σ_prompts (1/tokens of the group) Σ_i Σ_t"
    peers: ClassVar[Peers] = Peers("none", "none")

    def of_rows(self, counts: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        index, num_groups = group_index(group)
        tokens = sum_by_group(counts, index, num_groups).clamp(min=1)
        return 1 / (max(num_groups, 1) * tokens[index])


@dataclass(frozen=True)
class SequenceSum(_OneForARow):
    """The tokens of a completion are summed: 1 / B. A long completion counts more. RLOO, LUSPO."""

    formula: ClassVar[str] = "(1/B) Σ_i Σ_t"
    peers: ClassVar[Peers] = Peers('loss_type "luspo"', "loss_agg_mode seq-mean-token-sum")

    def of_rows(self, counts: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        return torch.ones_like(counts) / max(len(counts), 1)


@dataclass(frozen=True)
class ConstantLength(_OneForARow):
    """Like SequenceSum, divided by a constant length: 1 / (B · length). Dr. GRPO."""

    length: int | None = None
    """Generation budget in tokens. None: the run's completion limit."""
    peers: ClassVar[Peers] = Peers(
        'loss_type "dr_grpo", L = max_completion_length; the std stays unless scale_rewards is "none"',
        "loss_agg_mode seq-mean-token-sum-norm, L = loss_scale_factor or the padded width",
    )

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise ValueError(f"weights.length is {self.length}: give the generation budget, at least 1 token")

    @property
    def formula(self) -> str:
        return f"(1/B) Σ_i (1/{'L' if self.length is None else self.length}) Σ_t"

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


def token_weights(weights: WeightsProtocol, mask: Mask, group: Int[Tensor, " B"]) -> Tokens:
    """The weight of every sampled token of an optimizer step, 0 elsewhere."""
    return mask.double() * weights.of_rows(mask.sum(dim=1).double(), group).unsqueeze(1)
