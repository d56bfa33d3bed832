"""From groups to a batch of tensors: shape rewards, assign advantages, leave out rows that do not train.

Advantages are computed over the whole rollout batch, dropped groups included; only then do rows leave.
Log-probs that the algorithm does not need are not computed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from struct import pack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proximo.learner.learner import Learner
from proximo.learner.passes import Passes
from proximo.losses.advantage_inputs import feedback_in, returns_to_go, shaped_rewards, trained_rows
from proximo.losses.pieces.credit import assign
from proximo.losses.pieces.filters import trained_mask
from proximo.losses.pieces.protocols import AdvantageTraits
from proximo.models.model_types import PreTrainedModel
from proximo.rl.turn_rewards import Spell, at_their_turns, step_rewards, turn_rewards
from proximo.runs.records import Assembled
from proximo.types import Batch, Completion, Group
from proximo.types.tensor_types import Bool, Float, Int


def assemble(
    groups: Sequence[Group],
    dropped: Sequence[Group],
    learner: Learner,
    completion_limit: int,
    *,
    penalty_unit: float = 1.0,
    outcome_weight: float = 1.0,
    teacher: PreTrainedModel | None = None,
    spell: Spell | None = None,
) -> Assembled:
    """Everything that the updates of one step read. `penalty_unit`: see `RunConfig.penalty_unit`. `outcome_weight`:
    weight of the outcome, which turns may have earned, in the reward. `spell`: the text of each token, to find the ends
    of graded steps."""
    algorithm, kl_reward = learner.algorithm, learner.kl_reward
    everyone = to_batch([*groups, *dropped], spell)
    is_kept = everyone.group < len(groups)
    # Credit over all rows needs every row's values or divergences; otherwise only rows that train are scored.
    advantage = AdvantageTraits.read(algorithm.advantage)
    score_all = advantage.needs_values or bool(advantage.all_needs) or kl_reward is not None
    scored_rows = (is_kept | score_all).nonzero().squeeze(1)
    batch, gap = learner.prepare(everyone, scored_rows)
    if teacher is not None:
        batch = with_teacher(batch, scored_rows, teacher, learner)

    penalties = algorithm.length_penalties
    batch = replace(batch, rewards=shaped_rewards(batch, penalties, completion_limit, penalty_unit))
    feedback = at_their_turns(feedback_in(batch, kl_reward), batch, outcome_weight, algorithm.advantage)
    credit = assign(algorithm.advantage, feedback)
    earned = returns_to_go(algorithm.advantage, feedback) if batch.values is not None else None
    batch = replace(
        batch,
        advantages=credit.advantages,
        returns=credit.returns,
        mask=trained_mask(algorithm.keep, batch.mask, batch.truncated),
    )
    is_scored = ~torch.isnan(batch.rewards)
    index = (is_kept & trained_rows(algorithm.keep, batch)).nonzero().squeeze(1)
    trains = batch.rows(index)
    return Assembled(
        batch=trains,
        everyone=batch,
        index=index,
        unscored=int((is_kept & ~is_scored).sum()),
        dead_rows=int(is_dead(trains).sum()),
        sampler_gap=gap,
        earned=None if earned is None else earned[index],
    )


def with_teacher(batch: Batch, index: Int[Tensor, " M"], teacher: PreTrainedModel, learner: Learner) -> Batch:
    """The batch with the teacher's log-probs of the rows in `index`."""

    def score(passes: Passes, rows: Batch) -> Tensor:
        return replace(passes, router_logits=False).without_gradient(teacher, rows).logprobs  # it may have no routers

    found = learner.logprobs_under(score, batch.rows(index))
    return replace(batch, teacher_logprobs=torch.zeros_like(batch.old_logprobs).index_copy(0, index, found))


def is_dead(batch: Batch) -> Bool[Tensor, " B"]:
    """Rows whose advantages are all 0: only a KL or an extra term can have a gradient."""
    return (batch.advantages == 0).all(dim=1)


def _filled(where: Bool[Tensor, "B T"], rows: Iterable[Sequence[Any]], code: str, dtype: Any) -> Tensor:
    """Numbers in rows of different lengths as a tensor, which has 0 elsewhere. `code` is struct's for their type: while
    Python's numbers are packed a GPU is idle, and nothing packs them faster."""
    found = np.zeros(where.shape, dtype)
    found[where.numpy()] = np.frombuffer(b"".join(pack(f"{len(row)}{code}", *row) for row in rows), dtype)
    return torch.from_numpy(found)


def _is_sampled(where: Bool[Tensor, "B T"], completions: Sequence[Completion]) -> Bool[Tensor, "B T"]:
    if not any(each.sampled for each in completions):
        return where
    rows = (each.sampled or (True,) * len(each.tokens) for each in completions)
    return _filled(where, rows, "?", np.bool_)


def _entropy(where: Bool[Tensor, "B T"], completions: Sequence[Completion]) -> Float[Tensor, "B T"]:
    """NaN for completions whose sampler does not record it."""
    if not any(each.entropies for each in completions):
        return torch.zeros(where.shape, dtype=torch.float32).masked_fill(where, math.nan)
    rows = (each.entropies or (math.nan,) * len(each.tokens) for each in completions)
    return _filled(where, rows, "f", np.float32)


def to_batch(groups: Sequence[Group], spell: Spell | None = None) -> Batch:
    """The tensors of the groups' completions, before rewards and advantages are computed."""
    rollouts = [(number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    completions = [rollout.completion for _, rollout in rollouts]
    lengths = torch.tensor([len(completion.tokens) for completion in completions])
    shape = (len(rollouts), max(1, int(lengths.max())))
    where = torch.arange(shape[1]) < lengths.unsqueeze(1)
    is_sampled = _is_sampled(where, completions)
    tokens = _filled(where, (each.tokens for each in completions), "q", np.int64)
    logprobs = _filled(where, (each.logprobs for each in completions), "f", np.float32).masked_fill(~is_sampled, 0.0)
    entropy = _entropy(where, completions).masked_fill(~is_sampled, 0.0)
    outcome = torch.tensor([rollout.grade.verdict for _, rollout in rollouts], dtype=torch.float64)
    rewards = torch.tensor([rollout.grade.reward for _, rollout in rollouts], dtype=torch.float64)
    return Batch(
        prompts=tuple(group.prompt_tokens for group in groups),
        tokens=tokens,
        lengths=lengths,
        sampled=is_sampled,
        mask=is_sampled,
        group=torch.tensor([number for number, _ in rollouts]),
        outcome=outcome,
        rewards=rewards,
        truncated=torch.tensor([completion.finish == "length" for completion in completions]),
        version=torch.tensor([completion.version for completion in completions]),
        rollout_logprobs=logprobs,
        rollout_entropy=entropy,
        old_logprobs=logprobs,
        advantages=torch.zeros(shape, dtype=torch.float64),
        groups=tuple(groups),
        turn_rewards=turn_rewards(shape, completions),
        step_rewards=step_rewards(shape, [rollout for _, rollout in rollouts], spell),
        sibling=torch.tensor([number for group in groups for number in range(len(group.rollouts))]),
    )
