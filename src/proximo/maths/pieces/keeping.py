"""Stage 2: which rows train.

Decided on the raw outcome, before any shaping: a length penalty must not make a group of eight
correct answers look mixed. Unscored rows (NaN) never train.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from proximo.maths.arithmetic import answer_of
from proximo.maths.groups import siblings
from proximo.maths.pieces.protocols import KeepProtocol
from proximo.maths.pieces.traits import KeepTraits
from proximo.tensor_types import Bool, Float, Int


@dataclass(frozen=True)
class KeepAll:
    """Every scored row trains."""

    truncated: bool = True
    """False masks completions cut at the limit: they stay in their group's statistics, out of the loss."""
    reads_outcome: ClassVar[bool] = False

    def __call__(self, outcome: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
        return ~torch.isnan(outcome)


@dataclass(frozen=True)
class KeepMixed:
    """Only groups whose outcomes differ train; DAPO's dynamic sampling draws other prompts for the rest."""

    truncated: bool = True
    """False masks completions cut at the limit: they stay in their group's statistics, out of the loss."""
    refills: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def __call__(self, outcome: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
        return ~torch.isnan(outcome) & ~siblings(outcome, group).unanimous


Keep = KeepAll | KeepMixed | KeepProtocol


def left_out(keep: Keep, outcome: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Scored rows that `keep` rejects. An unscored row is for the graders to answer for, not for `keep`."""
    kept = answer_of("keep", keep, keep(outcome, group), outcome.shape)
    return ~kept.bool() & ~torch.isnan(outcome)


def drops(keep: Keep, outcome: Float[Tensor, " B"]) -> bool:
    """Whether one group with these outcomes leaves the step.

    A group without any score is dropped only where another one is sampled in its place.
    """
    group = torch.zeros(len(outcome), dtype=torch.long)
    unscored = bool(torch.isnan(outcome).all())
    kept = answer_of("keep", keep, keep(outcome, group), outcome.shape)
    return not kept.any() and (KeepTraits.read(keep).refills or not unscored)


def trained_mask(keep: Keep, mask: Bool[Tensor, "B T"], truncated: Bool[Tensor, " B"]) -> Bool[Tensor, "B T"]:
    """The mask of the loss: truncated completions leave it when `keep` says so."""
    return mask if KeepTraits.read(keep).truncated else mask & ~truncated.unsqueeze(1)
