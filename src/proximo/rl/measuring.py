"""Metrics of a step that need more than a mean: lengths by verdict, coverage, loops, and what the clip stopped."""

import math
from collections.abc import Sequence
from itertools import compress

import numpy as np
import torch

from proximo.algorithms import Algorithm
from proximo.learner.guard import Update
from proximo.losses.objective import rows_of
from proximo.losses.records import LossInputs
from proximo.rl.evaluate import known_mean
from proximo.types import Batch, Completion, Group, Rollout

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


PERIOD, TIMES = 4, 4
"""A loop: a phrase of at most so many tokens, so many times in a row."""


def length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean sampled tokens of right and of wrong completions; NaN where there is none."""
    judged = [(rollout.grade.verdict, rollout.completion.num_sampled) for rollout in rollouts]
    return {
        "length_right": known_mean(length for verdict, length in judged if verdict >= 1),
        "length_wrong": known_mean(length for verdict, length in judged if verdict < 1),
    }


def loop_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Share of the completions that repeat a phrase over and over."""
    return {"loops": sum(has_loop(rollout.completion) for rollout in rollouts) / len(rollouts)}


def has_loop(completion: Completion) -> bool:
    """Whether the sampled tokens contain a phrase of up to PERIOD tokens at least TIMES in a row."""
    tokens = np.array(
        list(compress(completion.tokens, completion.sampled)) if completion.sampled else completion.tokens
    )
    for period in range(1, PERIOD + 1):
        needed = period * (TIMES - 1)
        if len(tokens) < needed + period:
            return False
        # Between two places that differ from the token a period before lie as many equal ones as their distance.
        breaks = np.flatnonzero(tokens[period:] != tokens[:-period])
        if np.diff(breaks, prepend=-1, append=len(tokens) - period).max() > needed:
            return True
    return False


def coverage_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Share of the groups that would have a right completion if they were smaller: 2, 4, 8, … completions, of which
    any are as likely. Only groups with that many scored completions count."""
    found: dict[str, list[float]] = {}
    for group in groups:
        verdicts = [verdict for each in group.rollouts if not math.isnan(verdict := each.grade.verdict)]
        size = 2
        while size <= len(verdicts):
            wrong = sum(verdict < 1 for verdict in verdicts)
            none = math.comb(wrong, size) / math.comb(len(verdicts), size)
            found.setdefault(f"solved_by_any/{size}", []).append(1 - none)
            size *= 2
    return {name: known_mean(values) for name, values in found.items()}
