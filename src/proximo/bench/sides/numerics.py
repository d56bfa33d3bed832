"""Whether both sides compute the same, which comes before how fast they do."""

import math
from dataclasses import dataclass

import torch

from proximo.bench.sides.ours import Ours
from proximo.training.rl.assemble import assemble

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""By the precision of the pass, relative."""


@dataclass(frozen=True)
class Learned:
    """What one update on the fixed completions amounts to."""

    loss: float
    gradient_norm: float
    """Before clipping."""
    scale: float
    """The mean size of an advantage. At ratios of 1 the loss is their mean, near 0: its gaps are shares of this."""


@dataclass(frozen=True)
class Agreement:
    ours: Learned
    theirs: Learned
    tolerance: float

    @property
    def gap(self) -> float:
        """The larger of the relative differences in loss and in gradient norm; NaN where there is one."""
        loss = abs(self.ours.loss - self.theirs.loss) / self.ours.scale
        norm = abs(self.ours.gradient_norm - self.theirs.gradient_norm) / self.ours.gradient_norm
        return math.nan if math.isnan(loss + norm) else max(loss, norm)

    @property
    def holds(self) -> bool:
        """False where anything is NaN, too."""
        return self.gap <= self.tolerance

    def __str__(self) -> str:
        ours, theirs = self.ours, self.theirs
        return (
            f"loss {ours.loss:.3g} and {theirs.loss:.3g}, gradient norm {ours.gradient_norm:.6g} and "
            f"{theirs.gradient_norm:.6g}: gap {self.gap:.1e}, at most {self.tolerance:.0e}"
        )


def our_update(ours: Ours) -> Learned:
    """Takes the update, as the other side does."""
    batch = assemble(ours.fixed_groups, [], ours.learner, ours.sampling.max_tokens).batch
    scale = float(batch.advantages[batch.mask].abs().mean())
    update = ours.update(ours.fixed_groups)
    return Learned(update.stats.floats()["loss"], update.gradient_norm, scale)
