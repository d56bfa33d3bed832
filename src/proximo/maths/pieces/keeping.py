"""Stage 2: which rows train.

Decided on the raw outcome, before any shaping: a length penalty must not make a group of eight
correct answers look mixed. Unscored rows (NaN) never train.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.maths.groups import siblings
from proximo.tensor_types import Bool, Float, Int


@dataclass(frozen=True)
class KeepAll:
    """Every scored row trains."""

    truncated: bool = True
    """False masks completions cut at the limit: they stay in their group's statistics, out of the loss."""

    def __call__(self, outcome: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
        return ~torch.isnan(outcome)


@dataclass(frozen=True)
class KeepMixed:
    """Only groups whose outcomes differ train; DAPO's dynamic sampling draws other prompts for the rest."""

    truncated: bool = True
    """False masks completions cut at the limit: they stay in their group's statistics, out of the loss."""

    def __call__(self, outcome: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
        return ~torch.isnan(outcome) & ~siblings(outcome, group).unanimous


Keep = KeepAll | KeepMixed


def trained_mask(keep: Keep, mask: Bool[Tensor, "B T"], truncated: Bool[Tensor, " B"]) -> Bool[Tensor, "B T"]:
    """The mask of the loss: truncated completions leave it when `keep` says so."""
    return mask if keep.truncated else mask & ~truncated.unsqueeze(1)
