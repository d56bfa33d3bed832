"""Which tokens the clip stops on the side that explores, by how likely the old policy found them."""

import math
from collections.abc import Sequence

import torch

from proximo.algorithms import Algorithm
from proximo.learner.guard import Update
from proximo.maths.records import LossInputs
from proximo.maths.rows import rows_of
from proximo.types import Batch

BINS = {"rare": (0.0, 0.1), "unlikely": (0.1, 0.5), "likely": (0.5, 0.9), "sure": (0.9, math.inf)}
"""Names of ranges of the old probability: from the first number on, below the second."""


@torch.no_grad()
def clipping_metrics(algorithm: Algorithm, batch: Batch, updates: Sequence[Update]) -> dict[str, float]:
    """Over the applied updates: the share of tokens with a positive advantage that were blocked, in each range of their
    old probability, and the mean old probability of the blocked ones; NaN where there is none."""
    old, blocked = [], []
    for update in updates:
        run = ~update.logprobs.isnan().any(dim=1) & (update.skipped is None)
        if not run.any():
            continue
        now = {"logprobs": update.logprobs[run], "old_logprobs": update.old_logprobs[run]}
        inputs = LossInputs.of(batch.rows(update.rows[run]), **now, entropy=update.entropy[run])
        rows = rows_of(algorithm, inputs)
        log_ratio = algorithm.ratio(rows.logprobs - rows.anchor_logprobs, rows.mask)
        positive = rows.mask & (rows.advantages > 0)
        old.append(rows.old_logprobs[positive].exp())
        blocked.append((algorithm.gate.through(log_ratio, rows.advantages) == 0)[positive])
    if not old:
        return {}
    probability, is_blocked = torch.cat(old), torch.cat(blocked)
    found = {}
    for name, (low, high) in BINS.items():
        found[f"clip_high/{name}"] = float(is_blocked[(probability >= low) & (probability < high)].float().mean())
    return found | {"clip_high/old_probability": float(probability[is_blocked].mean())}
