"""The metrics of a step, under their public names, without times."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import compress, pairwise

import numpy as np
import torch
from torch import Tensor

from proximo.algorithms import Algorithm
from proximo.learner.critic import value_metrics
from proximo.learner.experts import routing_metrics
from proximo.learner.guard import Update
from proximo.losses.diagnostics import MismatchStats, effective_share
from proximo.losses.objective import rows_of
from proximo.losses.pieces.protocols import ShapeTraits
from proximo.losses.pieces.shaping import KlReward
from proximo.losses.records import LossInputs
from proximo.rl.evaluate import known_mean
from proximo.runs.metric_docs import RENAMED
from proximo.runs.records import Assembled, Collected, num_tokens
from proximo.types import MALFORMED, Completion, Group, Rollout
from proximo.types.batches import Batch, Stats

PER_UPDATE = ("value_clip",)
"""Statistics that are per update, like losses."""
BINS = {"rare": (0.0, 0.1), "unlikely": (0.1, 0.5), "likely": (0.5, 0.9), "sure": (0.9, math.inf)}
"""Names of ranges of the old probability: from the first number on, below the second."""
PERIOD, TIMES = 4, 4
"""Bounds of a loop: a phrase of at most so many tokens, so many times in a row."""


def step_metrics(
    collected: Collected,
    assembled: Assembled | None,
    updates: Sequence[Update],
    learning_rate: float,
    *,
    has_verdict: bool = True,
    has_tools: bool = False,
    is_whole: bool = False,
    shaped: Tensor | None = None,
) -> dict[str, float]:
    """All metrics of a step: of the rollouts first, then of the updates. `is_whole` says whether tokens were drawn from
    the policy's whole distribution; `shaped` as in `rollout_metrics`."""
    metrics = rollout_metrics(collected, has_verdict=has_verdict, has_tools=has_tools, is_whole=is_whole, shaped=shaped)
    metrics |= {"learning_rate": learning_rate, "updates": len(updates)}
    applied = [update for update in updates if update.skipped is None]
    metrics["skipped_updates"] = len(updates) - len(applied)
    if assembled is not None:
        metrics |= {"dead_rows": assembled.dead_rows / max(len(assembled.batch), 1)}
        metrics |= masked_metrics(collected, assembled.batch)
        metrics |= advantage_metrics(assembled.batch) | teacher_metrics(assembled.everyone)
        if assembled.earned is not None:
            metrics |= value_metrics(assembled.batch, assembled.earned)
    if updates:
        assert assembled is not None
        metrics |= update_metrics(applied)
        # The share of tokens that the updates' statistics cover: skipped dead rows are in none of them.
        seen = sum(float(update.stats.totals.get("tokens", 0)) for update in applied)
        tokens = assembled.batch.mask.sum(dim=1)
        metrics["measured"] = seen / max(sum(int(tokens[update.rows].sum()) for update in applied), 1)
        gaps = [gap for gap in (assembled.sampler_gap, updates[0].first_gap) if gap is not None]
        metrics |= mismatch_metrics(gaps[0] if gaps else None)
    return metrics


def masked_metrics(collected: Collected, batch: Batch) -> dict[str, float]:
    """The share of the sampled tokens of groups to train on that no loss reads; empty where there are none."""
    tokens, masked = sum(map(num_tokens, collected.groups)), 0.0
    if tokens:
        masked = 1 - int(batch.mask.sum()) / tokens
    return {"masked": masked} if masked > 0 else {}


def mismatch_metrics(gap: MismatchStats | None) -> dict[str, float]:
    """Mismatch between sampler and learner before the step's first update, with or without a correction; NaN:
    unknown."""
    values = dict.fromkeys((field.name for field in fields(MismatchStats)), math.nan) if gap is None else asdict(gap)
    return {"sampler_gap": values.pop("gap")} | {f"mismatch_{name}": value for name, value in values.items()}


def kl_metrics(kl: float, reward: KlReward | None) -> dict[str, float]:
    """KL of the sampling policy from the reference, and the coefficient of a KL in the reward."""
    coefficient = ShapeTraits.read(reward).coefficient
    return {"reference_kl": kl} | ({} if coefficient is None else {"kl_coefficient": coefficient})


def teacher_metrics(batch: Batch) -> dict[str, float]:
    """Reverse KL of the sampling policy from the teacher, over the sampled tokens of all rows; empty without one."""
    if batch.teacher_logprobs is None or not batch.sampled.any():
        return {}
    return {"teacher_kl": float((batch.old_logprobs - batch.teacher_logprobs)[batch.sampled].mean())}


def advantage_metrics(batch: Batch) -> dict[str, float]:
    """Statistics of the advantages over the trained tokens."""
    advantages = batch.advantages[batch.mask]
    if not len(advantages):
        return {}
    return {
        "advantage": float(advantages.mean()),
        "advantage_std": float(advantages.std(correction=0)),
        "advantage_min": float(advantages.min()),
        "advantage_max": float(advantages.max()),
    }


def rollout_metrics(
    collected: Collected,
    *,
    has_verdict: bool = True,
    has_tools: bool = False,
    is_whole: bool = False,
    shaped: Tensor | None = None,
) -> dict[str, float]:
    """Metrics over everything sampled for this step, dropped groups included. `shaped`: rewards with the algorithm's
    length penalties, of the same completions in order; None: it has none."""
    groups = [*collected.groups, *collected.dropped]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    outcome = torch.tensor([rollout.grade.verdict for rollout in rollouts], dtype=torch.float64)
    reward = torch.tensor([rollout.grade.reward for rollout in rollouts], dtype=torch.float64)
    lengths = torch.tensor([rollout.completion.num_sampled for rollout in rollouts], dtype=torch.float64)
    truncated = sum(rollout.completion.finish == "length" for rollout in rollouts)
    scored = outcome[~outcome.isnan()]
    return part_metrics(rollouts) | {
        **reward_metrics(reward, shaped),
        "outcome": float(scored.mean()) if len(scored) else math.nan,
        "length": float(lengths.mean()),
        **_tails("length", lengths),
        **(length_metrics(rollouts) if has_verdict else {}),
        **loop_metrics(rollouts),
        **entropy_metrics(rollouts, is_whole=is_whole),
        "truncated": truncated / len(rollouts),
        "completions": len(rollouts),
        "unscored": len(outcome) - len(scored),
        "groups": len(collected.groups),
        **group_metrics(groups, has_verdict=has_verdict),
        **(coverage_metrics(groups) if has_verdict else {}),
        "rounds": collected.rounds,
        "sampled_tokens": collected.sampled_tokens,
        "wasted_tokens": collected.wasted_tokens / max(collected.sampled_tokens, 1),
        "carried_groups": len(collected.cursor.carried),
        **source_metrics(groups),
        **turn_metrics(rollouts, has_tools=has_tools),
        **({"passed_over": len(collected.passed_over)} if collected.cursor.rates or collected.passed_over else {}),
        **({"unneeded_prompts": collected.unneeded} if collected.unneeded else {}),
        **selection_metrics(collected),
    }


def reward_metrics(reward: Tensor, shaped: Tensor | None) -> dict[str, float]:
    """The reward that is trained on and, where a penalty has a part in it, what it was before and what that took."""
    is_scored = ~reward.isnan()
    trained = (reward if shaped is None else shaped)[is_scored]
    metrics = {"reward": float(trained.mean()) if len(trained) else math.nan, **_tails("reward", trained)}
    if shaped is None or not len(trained):
        return metrics
    before = reward[is_scored]
    return metrics | {"reward_unshaped": float(before.mean()), "length_penalty": float((trained - before).mean())}


def selection_metrics(collected: Collected) -> dict[str, float]:
    """Groups that would have taught something and are not trained on, and how they differ from the others; empty where
    there are none. Groups with equal rewards, or equal verdicts, which DAPO drops, would not have."""
    lost = [group for group in collected.dropped if not _teaches_nothing(group)]
    expired = len(collected.expired)
    if not lost and not expired:
        return {}
    metrics: dict[str, float] = {"lost_groups": len(lost) + expired, "expired_groups": expired}
    if lost and collected.groups:
        length, outcome = (_means(lost, read) for read in (_length, _verdict))
        kept_length, kept_outcome = (_means(collected.groups, read) for read in (_length, _verdict))
        metrics |= {"longer_lost": length / max(kept_length, 1.0) - 1, "easier_lost": outcome - kept_outcome}
    return metrics


def _teaches_nothing(group: Group) -> bool:
    verdicts = {verdict for rollout in group.rollouts if not math.isnan(verdict := rollout.grade.verdict)}
    return _GroupStatistics.of(group.rollouts).is_dead or len(verdicts) == 1


def _means(groups: Sequence[Group], read: Callable[[Rollout], float]) -> float:
    return known_mean(read(rollout) for group in groups for rollout in group.rollouts)


def _length(rollout: Rollout) -> float:
    return float(rollout.completion.num_sampled)


def _verdict(rollout: Rollout) -> float:
    return rollout.grade.verdict


def turn_metrics(rollouts: Sequence[Rollout], *, has_tools: bool) -> dict[str, float]:
    """Replies, calls and what failed, of episodes with several turns; empty for others."""
    episodes = [rollout.completion.turns for rollout in rollouts if rollout.completion.turns]
    if not episodes:
        return {}
    replies = [[turn.text for turn in turns if turn.role == "assistant"] for turns in episodes]
    later = [one == other for texts in replies for one, other in pairwise(texts)]
    metrics = {
        "turns": known_mean(map(float, map(len, replies))),
        "failed_episodes": known_mean(float(bool(turns[-1].failed)) for turns in episodes),
    }
    metrics |= {"repeated_turns": known_mean(map(float, later))} if later else {}
    calls = [turn.failed for turns in episodes for turn in turns if turn.role == "tool"]
    if not has_tools:
        return metrics
    metrics["calls"] = len(calls) / len(episodes)
    if calls:
        metrics["failed_calls"] = known_mean(float(bool(failed)) for failed in calls)
        metrics["malformed_calls"] = known_mean(float(failed == MALFORMED) for failed in calls)
    return metrics


def source_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Outcome, accuracy and counts of each source; empty where the task has one."""
    verdicts: dict[str, list[float]] = {}
    for group in groups:
        if group.problem.source:
            verdicts.setdefault(group.problem.source, []).extend(rollout.grade.verdict for rollout in group.rollouts)
    metrics = {}
    for name, outcomes in sorted(verdicts.items()):
        scored = [outcome for outcome in outcomes if not math.isnan(outcome)]
        metrics |= {
            f"sources/{name}/outcome": known_mean(scored),
            f"sources/{name}/accuracy": known_mean(float(outcome >= 1) for outcome in scored),
            f"sources/{name}/completions": len(outcomes),
            f"sources/{name}/unscored": len(outcomes) - len(scored),
        }
    return metrics


def group_metrics(groups: Sequence[Group], *, has_verdict: bool = True) -> dict[str, float]:
    """Metrics of groups. A group without scores is dead, and neither solved nor unsolved; if the task gives no verdict,
    so that task scores are scores on any scale, no group is solved or unsolved."""
    seen = [_GroupStatistics.of(group.rollouts) for group in groups]
    judged = [group for group in seen if has_verdict and group.solved is not None]
    dead_solved = sum(group.is_dead and group.solved == 1 for group in judged) / len(seen)
    return {
        "dead_groups": sum(group.is_dead for group in seen) / len(seen),
        "dead_solved": dead_solved if has_verdict else math.nan,
        "solved_by_all": known_mean(float(group.solved == 1) for group in judged),
        "solved_by_any": known_mean(float(group.solved != 0) for group in judged),
        "reward_spread": known_mean(group.spread for group in seen),
        "duplicates": known_mean(group.duplicates for group in seen),
        "duplicates_unsolved": known_mean(group.duplicates for group in judged if group.solved != 1),
    }


@dataclass(frozen=True)
class _GroupStatistics:
    """Statistics of one group."""

    is_dead: bool
    """True if all known rewards are equal, or none is known."""
    solved: float | None
    """Share of the scored completions with a task score of at least 1; None if none is scored."""
    spread: float
    """Standard deviation of the known rewards; NaN if there are none."""
    duplicates: float
    """Share of pairs of completions that are identical token by token: 1/k on average for k equally likely answers,
    whatever the size of the group. NaN for a single completion."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> "_GroupStatistics":
        rewards = [reward for rollout in rollouts if not math.isnan(reward := rollout.grade.reward)]
        outcomes = [outcome for rollout in rollouts if not math.isnan(outcome := rollout.grade.verdict)]
        mean, pairs = known_mean(rewards), math.comb(len(rollouts), 2)
        equal = sum(math.comb(times, 2) for times in Counter(row.completion.tokens for row in rollouts).values())
        return cls(
            is_dead=not rewards or max(rewards) == min(rewards),
            solved=sum(outcome >= 1 for outcome in outcomes) / len(outcomes) if outcomes else None,
            spread=math.sqrt(known_mean((reward - mean) ** 2 for reward in rewards)),
            duplicates=equal / pairs if pairs else math.nan,
        )


def entropy_metrics(rollouts: Sequence[Rollout], *, is_whole: bool) -> dict[str, float]:
    """Mean entropy of the sampling policy over all sampled tokens. Where a sampler does not record it, the mean of
    −log p, whose expectation it is if tokens are drawn from the whole distribution; empty if they are not."""
    completions = [rollout.completion for rollout in rollouts]
    known = [value for completion in completions for value in _sampled(completion, completion.entropies)]
    tokens = sum(completion.num_sampled for completion in completions)
    if len(known) != tokens and is_whole:
        known = [-value for completion in completions for value in _sampled(completion, completion.logprobs)]
    return {"entropy": math.fsum(known) / tokens} if tokens and len(known) == tokens else {}


def _sampled(completion: Completion, values: Sequence[float]) -> Iterable[float]:
    """Values of the tokens that the policy sampled."""
    return compress(values, completion.sampled) if completion.sampled else values


def _tails(name: str, values: Tensor) -> dict[str, float]:
    """The 10th and the 90th percentile."""
    if not len(values):
        return {f"{name}_p10": math.nan, f"{name}_p90": math.nan}
    low, high = torch.quantile(values, torch.tensor([0.1, 0.9], dtype=values.dtype)).tolist()
    return {f"{name}_p10": low, f"{name}_p90": high}


def part_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The mean of each part of the reward, weight included, over the completions that have it."""
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.grade.parts.items():
            parts.setdefault(name, []).append(value)
    known = {name: [value for value in values if not math.isnan(value)] for name, values in parts.items()}
    return {f"rewards/{name}": sum(values) / len(values) if values else math.nan for name, values in known.items()}


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Metrics over all applied updates of the step: token means, losses per update, maxima."""
    if not updates:
        return {}
    stats = Stats()
    for update in updates:
        stats = stats + update.stats
    norms = [update.gradient_norm for update in updates]
    gradients = {"gradient_norm": sum(norms) / len(norms), "gradient_norm_max": max(norms)}
    value_norms = [update.value_gradient_norm for update in updates if update.value_gradient_norm is not None]
    if value_norms:
        gradients["value_gradient_norm"] = sum(value_norms) / len(value_norms)
    floats = stats.floats()
    if "ratio" not in floats:  # every row was dead, or only the value model trained
        return gradients | {name: value / len(updates) for name, value in floats.items()}
    shares = {"ess": effective_share(floats["ratio"], floats["ratio_squared"])}
    if "correction" in floats:
        shares["correction_ess"] = effective_share(floats["correction"], floats["correction_squared"])
    spread = math.sqrt(max(floats["ratio_squared"] - floats["ratio"] ** 2, 0.0))
    # A list, since the order of a set differs between processes.
    per_update = [name for name in floats if name.endswith("loss") or name in PER_UPDATE]
    losses = {name: floats[name] / len(updates) for name in per_update}
    rest = {name: value for name, value in floats.items() if name not in per_update}
    named = {RENAMED.get(name, name): value for name, value in rest.items()}
    known = {name: value for name, value in named.items() if name is not None}
    return known | losses | gradients | shares | routing_metrics(stats) | {"ratio_spread": spread}


# What needs more than a mean: lengths by verdict, coverage, loops, and what the clip stopped


@torch.no_grad()
def clipping_metrics(algorithm: Algorithm, batch: Batch, updates: Sequence[Update]) -> dict[str, float]:
    """Share of the applied updates' tokens with a positive advantage that were blocked, in each range of their old
    probability, and the mean old probability of the blocked ones; NaN where there is none."""
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
    shares = {}
    for name, (low, high) in BINS.items():
        shares[f"clip_high/{name}"] = float(is_blocked[(probability >= low) & (probability < high)].float().mean())
    return shares | {"clip_high/old_probability": float(probability[is_blocked].mean())}


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
    """Tell whether the sampled tokens contain a phrase of up to PERIOD tokens at least TIMES in a row."""
    tokens = np.array(
        list(compress(completion.tokens, completion.sampled)) if completion.sampled else completion.tokens
    )
    for period in range(1, PERIOD + 1):
        needed = period * (TIMES - 1)
        if len(tokens) < needed + period:
            return False
        # So many places in a row have one whose number is a multiple of their number.
        if not (tokens[period + needed - 1 :: needed] == tokens[needed - 1 : -period : needed]).any():
            continue
        # Between two places that differ from the token a period before lie as many equal ones as their distance.
        breaks = np.flatnonzero(tokens[period:] != tokens[:-period])
        if np.diff(breaks, prepend=-1, append=len(tokens) - period).max() > needed:
            return True
    return False


def coverage_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Share of the groups that would have a right completion if they were smaller: 2, 4, 8, … completions, of which
    any are as likely. Only groups with that many scored completions count."""
    chances: dict[str, list[float]] = {}
    for group in groups:
        verdicts = [verdict for rollout in group.rollouts if not math.isnan(verdict := rollout.grade.verdict)]
        size = 2
        while size <= len(verdicts):
            wrong = sum(verdict < 1 for verdict in verdicts)
            none = math.comb(wrong, size) / math.comb(len(verdicts), size)
            chances.setdefault(f"solved_by_any/{size}", []).append(1 - none)
            size *= 2
    return {name: known_mean(values) for name, values in chances.items()}
