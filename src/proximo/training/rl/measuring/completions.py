"""Metrics of what was sampled: lengths of right and wrong completions, loops, coverage against group size."""

import math
from collections.abc import Sequence
from itertools import compress

import numpy as np

from proximo.training.rl.evaluate import known_mean
from proximo.types import Completion, Group, Rollout

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
