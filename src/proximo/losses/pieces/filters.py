"""Stage 2: which rows train.

Decided by the raw task score, before any shaping: a length penalty must not make a group of eight
correct answers look mixed. Unscored rows (NaN) never train.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from proximo.losses.arithmetic import Mask, answer_of, siblings
from proximo.losses.pieces.protocols import KeepProtocol, KeepTraits, Peers
from proximo.types.tensor_types import Bool, Float, Int

__all__ = ["KeepAll", "KeepCorrect", "KeepMixed", "trained_mask"]


@dataclass(frozen=True)
class KeepAll:
    """Every scored row trains."""

    truncated: bool = True
    """True if completions cut at the limit are in the loss; they count in their group's statistics either way."""
    reads_outcome: ClassVar[bool] = False
    peers: ClassVar[Peers] = Peers(
        "the default; mask_truncated_completions False", "the default; no mask for truncated completions"
    )

    @property
    def formula(self) -> str:
        return f"all groups{_cut(self.truncated)}"

    def __call__(self, outcome: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
        return ~torch.isnan(outcome)


@dataclass(frozen=True)
class KeepMixed:
    """Train only groups whose task scores differ; DAPO's dynamic sampling draws other prompts for the rest."""

    truncated: bool = True
    """True if completions cut at the limit are in the loss; they count in their group's statistics either way."""
    refills: ClassVar[bool] = True
    compares: ClassVar[bool] = True
    peers: ClassVar[Peers] = Peers(
        "none: dead groups stay, in the denominator too",
        "filter_groups.{enable False, metric}: drops std == 0, refills with new prompts",
    )

    @property
    def formula(self) -> str:
        return f"groups with both right and wrong task scores{_cut(self.truncated)}"

    def __call__(self, outcome: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
        return ~torch.isnan(outcome) & ~siblings(outcome, group).unanimous


@dataclass(frozen=True)
class KeepCorrect:
    """Train only correct completions: rejection sampling."""

    above: float = 0.0
    """Task scores above this count as correct; 0 fits task scores of 0 and 1, and of −1 and 1."""
    truncated: bool = True
    """True if completions cut at the limit are in the loss."""
    peers: ClassVar[Peers] = Peers("none on the loop; filter a dataset for SFTTrainer", "none on the loop")

    @property
    def formula(self) -> str:
        return f"completions with a task score above {self.above:g}{_cut(self.truncated)}"

    def __call__(self, outcome: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
        return outcome > self.above  # never true of NaN


Keep = KeepAll | KeepMixed | KeepCorrect | KeepProtocol


def _cut(truncated: bool) -> str:
    return "" if truncated else ", truncated completions masked"


def left_out(keep: Keep, outcome: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Scored rows that `keep` rejects; unscored rows are the graders' failure and do not count here."""
    kept = answer_of("keep", keep, keep(outcome, group), outcome.shape)
    return ~kept.bool() & ~torch.isnan(outcome)


def drops(keep: Keep, outcome: Float[Tensor, " B"]) -> bool:
    """True if a group with these task scores is dropped from the step.

    A group without any score is dropped only if another one is sampled in its place.
    """
    group = torch.zeros(len(outcome), dtype=torch.long)
    unscored = bool(torch.isnan(outcome).all())
    kept = answer_of("keep", keep, keep(outcome, group), outcome.shape)
    return not kept.any() and (KeepTraits.read(keep).refills or not unscored)


def trained_mask(keep: Keep, mask: Mask, truncated: Bool[Tensor, " B"]) -> Mask:
    """The mask of the loss, without truncated completions if `keep` excludes them."""
    return mask if KeepTraits.read(keep).truncated else mask & ~truncated.unsqueeze(1)
