"""Check, before their times are taken, that both sides compute the same numbers."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from proximo.rl.assemble import assemble
from proximo_lab.bench.sides.ours import Ours

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Relative tolerance, by precision."""


@dataclass(frozen=True)
class Learned:
    """Loss and gradient norm of one update on the fixed completions."""

    loss: float
    gradient_norm: float
    """Gradient norm before clipping."""
    scale: float
    """Mean absolute advantage. At ratios of 1 the loss is near 0, so its differences are relative to this."""


@dataclass(frozen=True)
class Agreement:
    ours: Learned
    theirs: Learned
    tolerance: float

    @property
    def gap(self) -> float:
        """The larger of the relative differences in loss and gradient norm; NaN if either is NaN."""
        loss = abs(self.ours.loss - self.theirs.loss) / self.ours.scale
        norm = abs(self.ours.gradient_norm - self.theirs.gradient_norm) / self.ours.gradient_norm
        return math.nan if math.isnan(loss + norm) else max(loss, norm)

    @property
    def holds(self) -> bool:
        """True if both sides agree; False if anything is NaN."""
        return self.gap <= self.tolerance

    @property
    def numbers(self) -> dict[str, Any]:
        """Numbers that were compared, for the JSON file."""
        return {"ours": vars(self.ours), "theirs": vars(self.theirs), "gap": self.gap}

    def __str__(self) -> str:
        ours, theirs = self.ours, self.theirs
        return (
            f"loss {ours.loss:.3g} and {theirs.loss:.3g}, gradient norm {ours.gradient_norm:.6g} and "
            f"{theirs.gradient_norm:.6g}: gap {self.gap:.1e}, at most {self.tolerance:.0e}"
        )


def our_update(ours: Ours) -> Learned:
    """Make the update, as the other side does."""
    batch = assemble(ours.fixed_groups, [], ours.learner, ours.sampling.max_tokens).batch
    scale = float(batch.advantages[batch.mask].abs().mean())
    update = ours.update(ours.fixed_groups)
    return Learned(update.stats.floats()["loss"], update.gradient_norm, scale)
