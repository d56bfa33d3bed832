"""Make a batch of tensors from groups: shape rewards, assign advantages, leave out rows that do not train.

Advantages are computed over the whole rollout batch, dropped groups included; only then do rows leave.
Log-probs that the algorithm does not need are not computed.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from struct import pack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proximo.learner.learner import Learner
from proximo.learner.passes import Passes
from proximo.losses.advantage_inputs import feedback_in, returns_to_go, shaped_rewards, trained_rows
from proximo.losses.pieces.credit import Advantage, assign
from proximo.losses.pieces.filters import trained_mask
from proximo.losses.pieces.protocols import AdvantageTraits
from proximo.losses.records import Credit, Feedback
from proximo.models.model_types import PreTrainedModel
from proximo.runs.records import Assembled
from proximo.system.phases import phase
from proximo.types import Completion, Group, Rollout
from proximo.types.batches import Batch
from proximo.types.tensor_types import Bool, Float, Int

Spell = Callable[[Sequence[int]], list[str]]
"""The text of each token of a completion."""


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
    """Build what the updates of a step read. `penalty_unit`: see `RunConfig.penalty_unit`. `outcome_weight`: weight of
    the task score, which turns may have earned, in the reward. `spell`: the text of each token, to find the ends of
    graded steps."""
    algorithm, kl_reward = learner.algorithm, learner.kl_reward
    with phase("rows to tensors"):
        everyone = to_batch([*groups, *dropped], spell)
    is_kept = everyone.group < len(groups)
    # Credit over all rows needs every row's values or divergences; otherwise only rows that train are scored.
    advantage = AdvantageTraits.read(algorithm.advantage)
    score_all = advantage.needs_values or bool(advantage.all_needs) or kl_reward is not None
    scored_rows = (is_kept | score_all).nonzero().squeeze(1)
    batch, gap = learner.prepare(everyone, scored_rows)
    if teacher is not None:
        with phase("teacher's log-probs"):
            batch = with_teacher(batch, scored_rows, teacher, learner)

    penalties = algorithm.length_penalties
    batch = replace(batch, rewards=shaped_rewards(batch, penalties, completion_limit, penalty_unit))
    feedback = at_their_turns(feedback_in(batch, kl_reward), batch, outcome_weight, algorithm.advantage)
    credit = credited(algorithm.advantage, feedback, everyone.groups)
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


def credited(advantage: Advantage, feedback: Feedback, groups: Sequence[Group]) -> Credit:
    """Credit of all rows, in which siblings are compared sample by sample, however many rows each has. An advantage for
    single tokens looks at each row by itself."""
    numbers = [group.first_rows for group in groups]
    starts = accumulate(map(len, numbers), initial=0)
    first = torch.tensor([start + row for start, rows in zip(starts, numbers, strict=False) for row in rows])
    samples, of_row = first.unique(return_inverse=True)
    if len(samples) == len(first) or AdvantageTraits.read(advantage).per_token:
        return assign(advantage, feedback)
    rows = Feedback.summary([feedback])

    def sums(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.new_zeros((len(samples), 1)).index_add(0, of_row, values)

    alone = Feedback(
        rewards=rows.rewards[samples],
        group=rows.group[samples],
        mask=rows.mask[samples],
        token_rewards=sums(rows.token_rewards),
        old_logprobs=sums(rows.old_logprobs),
        ref_logprobs=sums(rows.ref_logprobs),
        teacher_logprobs=sums(rows.teacher_logprobs),
    )
    by_row = assign(advantage, alone).advantages[of_row]
    return Credit(torch.where(feedback.mask | by_row.isnan(), by_row, 0.0))


def with_teacher(batch: Batch, index: Int[Tensor, " M"], teacher: PreTrainedModel, learner: Learner) -> Batch:
    """The batch with the teacher's log-probs of the rows in `index`."""

    def score(passes: Passes, rows: Batch) -> Tensor:
        return replace(passes, router_logits=False).without_gradient(teacher, rows).logprobs  # it may have no routers

    logprobs = learner.logprobs_under(score, batch.rows(index))
    return replace(batch, teacher_logprobs=torch.zeros_like(batch.old_logprobs).index_copy(0, index, logprobs))


def is_dead(batch: Batch) -> Bool[Tensor, " B"]:
    """Rows whose advantages are all 0: only a KL or an extra term can have a gradient."""
    return (batch.advantages == 0).all(dim=1)


def _filled(where: Bool[Tensor, "B T"], rows: Iterable[Sequence[Any]], code: str, dtype: Any) -> Tensor:
    """Numbers in rows of different lengths as a tensor, which has 0 elsewhere. `code` is struct's for their type: while
    Python's numbers are packed a GPU is idle, and nothing packs them faster."""
    array = np.zeros(where.shape, dtype)
    array[where.numpy()] = np.frombuffer(b"".join(pack(f"{len(row)}{code}", *row) for row in rows), dtype)
    return torch.from_numpy(array)


def _is_sampled(where: Bool[Tensor, "B T"], completions: Sequence[Completion]) -> Bool[Tensor, "B T"]:
    if not any(completion.sampled for completion in completions):
        return where
    rows = (completion.sampled or (True,) * len(completion.tokens) for completion in completions)
    return _filled(where, rows, "?", np.bool_)


def _entropy(where: Bool[Tensor, "B T"], completions: Sequence[Completion]) -> Float[Tensor, "B T"]:
    """Entropy of each token; NaN for completions whose sampler does not record it."""
    if not any(completion.entropies for completion in completions):
        return torch.zeros(where.shape, dtype=torch.float32).masked_fill(where, math.nan)
    rows = (completion.entropies or (math.nan,) * len(completion.tokens) for completion in completions)
    return _filled(where, rows, "f", np.float32)


def to_batch(groups: Sequence[Group], spell: Spell | None = None) -> Batch:
    """The tensors of the groups' completions, before rewards and advantages are computed."""
    rollouts = [(number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    completions = [rollout.completion for _, rollout in rollouts]
    lengths = torch.tensor([len(completion.tokens) for completion in completions])
    shape = (len(rollouts), max(1, int(lengths.max())))
    where = torch.arange(shape[1]) < lengths.unsqueeze(1)
    is_sampled = _is_sampled(where, completions)
    tokens = _filled(where, (row.tokens for row in completions), "q", np.int64)
    logprobs = _filled(where, (row.logprobs for row in completions), "f", np.float32).masked_fill(~is_sampled, 0.0)
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


# Rewards of single turns and of single steps, for advantages that look at tokens


def turn_rewards(shape: tuple[int, int], completions: Sequence[Completion]) -> Float[Tensor, "B T"] | None:
    """Reward of each turn, at its last token; None where no turn earned anything."""
    earned = [
        (row, turn.end - 1, turn.reward)
        for row, completion in enumerate(completions)
        for turn in completion.turns
        if turn.reward and turn.end
    ]
    if not earned:
        return None
    table = torch.zeros(shape, dtype=torch.float64)
    rows, columns, rewards = zip(*earned, strict=True)
    table[list(rows), list(columns)] = torch.tensor(rewards, dtype=torch.float64)
    return table


def step_rewards(
    shape: tuple[int, int], rollouts: Sequence[Rollout], spell: Spell | None
) -> Float[Tensor, "B T"] | None:
    """The reward of each step at the token that ends it, NaN elsewhere; None where no completion was graded so.

    Two steps that end within one token are rewarded there together.
    """
    if spell is None or not any(rollout.grade.steps for rollout in rollouts):
        return None
    table = torch.full(shape, math.nan, dtype=torch.float64)
    for row, rollout in enumerate(rollouts):
        if not rollout.grade.steps:
            continue
        # A completion's text is its last reply.
        turns, tokens = rollout.completion.turns, rollout.completion.tokens
        first = turns[-2].end if len(turns) > 1 else 0
        ends = list(accumulate(map(len, spell(tokens[first:]))))
        for end, reward in rollout.grade.steps:
            column = first + min(bisect_left(ends, end), len(ends) - 1)
            known = table[row, column]
            table[row, column] = reward if known.isnan() else known + reward
    return table


def at_their_turns(feedback: Feedback, batch: Batch, weight: float, advantage: object) -> Feedback:
    """Feedback in which a turn's reward comes with the turn, instead of with all others after the last token; for an
    advantage of graded steps, their rewards and nothing else.

    A completion's sum stays the same up to rounding; so for advantages of whole completions nothing is moved, since
    equal rewards must stay equal to the last bit. `weight` is the weight of the environment's task score in the reward.
    """
    traits = AdvantageTraits.read(advantage)
    if traits.needs_step_rewards:
        unknown = torch.full_like(batch.advantages, torch.nan)
        return replace(feedback, token_rewards=unknown if batch.step_rewards is None else batch.step_rewards)
    if batch.turn_rewards is None or not traits.per_token:
        return feedback
    mask = feedback.mask
    earned = (weight * batch.turn_rewards).to(feedback.rewards.dtype).masked_fill(~feedback.scored.unsqueeze(1), 0.0)
    order = mask.cumsum(dim=1)
    is_last = mask & (order == order[:, -1:])
    moved = earned - is_last * earned.sum(dim=1, keepdim=True)
    known = feedback.token_rewards
    return replace(feedback, token_rewards=moved if known is None else known + moved)
