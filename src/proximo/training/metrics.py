"""One row of numbers for a step, under names that users know. Times are not among them."""

import math
from collections.abc import Sequence

import torch

from proximo.training.assemble import Assembled
from proximo.training.collect import Collected
from proximo.training.learner import Update
from proximo.types import Stats

RENAMED = {
    "ref_kl": "kl",
    "blocked_positive": "clip_high",
    "blocked_negative": "clip_low",
    "unscored": None,
    "rows": None,
    "tokens": None,
    "ratio_squared": None,
}
"""Statistics of the loss that go by another name in the metrics, or are counted elsewhere."""


def step_metrics(
    collected: Collected, assembled: Assembled | None, updates: Sequence[Update], learning_rate: float
) -> dict[str, float]:
    """Rollouts first, then what the updates saw."""
    metrics = rollout_metrics(collected) | {"learning_rate": learning_rate, "updates": len(updates)}
    if assembled is not None:
        metrics |= {
            "dead_rows": assembled.dead_rows / max(len(assembled.batch), 1),
            "advantage_std": float(assembled.batch.advantages[assembled.batch.mask].std())
            if len(assembled.batch)
            else 0.0,
        }
    if updates:
        assert assembled is not None
        metrics |= update_metrics(updates)
        # Dead rows that were skipped are in no statistic of the updates: the share of tokens those speak for.
        seen = sum(float(update.stats.totals.get("tokens", 0)) for update in updates)
        tokens = assembled.batch.mask.sum(dim=1)
        metrics["measured"] = seen / max(sum(int(tokens[update.rows].sum()) for update in updates), 1)
        gaps = [gap for gap in (assembled.sampler_gap, updates[0].first_gap) if gap is not None]
        metrics["sampler_gap"] = gaps[0] if gaps else math.nan
    return metrics


def rollout_metrics(collected: Collected) -> dict[str, float]:
    """Over everything that was sampled for this step, dropped groups included."""
    groups = [*collected.groups, *collected.dropped]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    outcome = torch.tensor([rollout.grade.verdict for rollout in rollouts], dtype=torch.float64)
    reward = torch.tensor([rollout.grade.reward for rollout in rollouts], dtype=torch.float64)
    lengths = torch.tensor([len(rollout.completion.tokens) for rollout in rollouts], dtype=torch.float64)
    truncated = sum(rollout.completion.finish == "length" for rollout in rollouts)
    scored = outcome[~outcome.isnan()]
    return {
        "reward": float(reward[~reward.isnan()].mean()) if len(scored) else math.nan,
        "outcome": float(scored.mean()) if len(scored) else math.nan,
        "length": float(lengths.mean()),
        "truncated": truncated / len(rollouts),
        "unscored": len(outcome) - len(scored),
        "groups": len(collected.groups),
        "dead_groups": sum(_is_dead(group.rollouts) for group in groups) / len(groups),
        "rounds": collected.rounds,
        "sampled_tokens": collected.sampled_tokens,
        "wasted_tokens": collected.wasted_tokens / max(collected.sampled_tokens, 1),
        "carried_groups": len(collected.frontier.carried),
    }


def _is_dead(rollouts) -> bool:
    known = [rollout.grade.reward for rollout in rollouts if not math.isnan(rollout.grade.reward)]
    return not known or max(known) == min(known)


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Over all updates of the step: token means, losses per update, the largest of the largest."""
    stats = Stats()
    for update in updates:
        stats = stats + update.stats
    norms = [update.gradient_norm for update in updates]
    gradients = {"gradient_norm": sum(norms) / len(norms), "gradient_norm_max": max(norms)}
    if not stats.totals:  # every row was dead
        return gradients
    floats = stats.floats()
    ess = floats["ratio"] ** 2 / floats["ratio_squared"] if floats["ratio_squared"] else math.nan
    spread = math.sqrt(max(floats["ratio_squared"] - floats["ratio"] ** 2, 0.0))
    losses = {name: value / len(updates) for name, value in floats.items() if name.endswith("loss")}
    rest = {name: value for name, value in floats.items() if not name.endswith("loss")}
    named = {RENAMED.get(name, name): value for name, value in rest.items()}
    known = {name: value for name, value in named.items() if name is not None}
    return known | losses | gradients | {"ess": ess, "ratio_spread": spread}
