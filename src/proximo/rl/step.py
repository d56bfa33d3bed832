"""One training step: rollouts, updates, and what is logged."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
import torch

from proximo.learner.critic import kl_per_completion
from proximo.learner.guard import Update
from proximo.learner.memory import explaining_memory
from proximo.losses.advantage_inputs import shaped_rewards
from proximo.rl.assemble import assemble, to_batch
from proximo.rl.clock import LEARNER, Clock
from proximo.rl.measuring import clipping_metrics
from proximo.rl.metrics import kl_metrics, step_metrics
from proximo.rl.reward_config import has_verdict
from proximo.rl.run import SAMPLE_LESS, Run
from proximo.runs.evidence import skipped_updates
from proximo.runs.ledger import entries
from proximo.runs.records import Assembled, Collected, DataCursor
from proximo.runs.rollouts import rollout_table
from proximo.types import Batch


def train_step(run: Run, index: int, cursor: DataCursor) -> Collected:
    """One step: rollouts, then updates.

    `index` counts steps from 0, for random numbers and schedules; everything that is shown or stored has the number of
    steps done after it, `index + 1`.
    """
    config, learner, clock, step = run.config, run.learner, Clock(lanes=run.timeline.lanes), index + 1
    version = learner.version
    with run.timeline.lanes.during(LEARNER, "push"):
        sampled_version = run.start_step(index, cursor)
    learner.start_step(sampled_version)
    with run.stop.anywhere():  # nothing has changed before the first update
        with clock.phase("rollout"), explaining_memory(SAMPLE_LESS):
            collected = run.collect(index, cursor, sampled_version)
        clock.split("rollout", "grade", collected.grading_seconds)
        every = config.training.reset_reference_every
        if every is not None and index and index % every == 0:
            learner.policy.reset_reference()
        rate, assembled = learner.set_learning_rate(index, policy_step=index - config.pretrain_steps), None
        if collected.groups:
            with clock.phase("assemble"):
                assembled = assemble(
                    collected.groups,
                    collected.dropped,
                    learner,
                    config.sampling.max_tokens,
                    penalty_unit=config.penalty_unit,
                    outcome_weight=config.rewards.task,
                    teacher=run.teacher,
                    spell=run.spelling,
                )
    updates = []
    if assembled is not None and len(assembled.batch):
        with clock.phase("update"):
            updates = list(_updates(run, assembled, index))
    _tell(run, step, collected, assembled, updates)
    everyone = _shaped(run, collected) if assembled is None else assembled.everyone
    shaped = everyone.rewards if learner.algorithm.length_penalties else None
    metrics = step_metrics(collected, assembled, updates, rate, **_kind(run), shaped=shaped)
    if assembled is not None and index >= config.pretrain_steps:
        metrics |= clipping_metrics(learner.algorithm, assembled.batch, updates)
    kl = None if assembled is None else kl_per_completion(assembled.batch)
    if assembled is not None and kl is not None:
        metrics |= kl_metrics(kl, learner.kl_reward)
        if index >= config.pretrain_steps:  # the coefficient is adapted once the policy is trained
            learner.adapt_kl(kl, len(assembled.batch))
    run.note(step, metrics)
    run.log.ledger(entries(step, cursor, collected, assembled, updates, run.task.size("train")))
    with clock.phase("write"):
        run.log.rollouts(step, _table(run, index, collected, everyone, assembled, updates))
    costs = run.grading.usage.take() | run.grading.episodes.take()
    run.log.timings(step, clock.seconds | {"tokens": collected.sampled_tokens} | costs)
    run.note_times(step, collected, version)
    run.progress.stepped(step, metrics, clock.seconds, collected)
    if config.stop_on is None:  # else the run ends with its best checkpoint
        learner.guard.check()
    run.unscored.check()
    return collected


def _kind(run: Run) -> dict[str, bool]:
    """What decides which metrics a run has."""
    sampling = run.config.sampling
    return {
        "has_verdict": has_verdict(run.task_played),
        "has_tools": bool(getattr(run.config.environment, "tools", ())),
        "is_whole": not sampling.truncates and not sampling.greedy,
    }


def _tell(run: Run, step: int, collected: Collected, assembled: Assembled | None, updates: Sequence[Update]) -> None:
    """Report problems of a step on the console and in the events."""
    run.tell_of_sampler(step)
    if not updates:
        run.log.event(step, "empty_step", _why_empty(collected, assembled))
    notices = run.learner.guard.take_notices()
    if assembled is not None:
        notices += skipped_updates(run.folder, step, assembled.batch, updates)
    lines = run.unscored.look([*collected.groups, *collected.dropped])
    told = [(each.kind, each.message) for each in notices] + [("unscored", line) for line in lines]
    told += [("failed_episodes", line) for line in run.failed_episodes.lines()]
    told += [("judge", line) for line in run.grading.take_notices()]
    for each in filter(None, (run.ahead, run.in_flight)):
        told += each.take_notices()
    for kind, message in told:
        run.log.event(step, kind, message)
        run.progress.warned(step, message)


def _updates(run: Run, assembled: Assembled, index: int) -> Iterator[Update]:
    """The step's updates: only of the value model while it is pre-trained, then of everything."""
    if index >= run.config.pretrain_steps:
        return run.learner.updates(assembled.batch)
    assert assembled.earned is not None
    return run.learner.value_updates(replace(assembled.batch, returns=assembled.earned))


def _shaped(run: Run, collected: Collected) -> Batch:
    """What was sampled in a step without a group to train on, with the rewards that it would have trained on."""
    batch, config = to_batch(collected.dropped), run.config
    penalties = run.learner.algorithm.length_penalties
    return replace(batch, rewards=shaped_rewards(batch, penalties, config.sampling.max_tokens, config.penalty_unit))


def _table(
    run: Run,
    index: int,
    collected: Collected,
    batch: Batch,
    assembled: Assembled | None,
    updates: Sequence[Update],
) -> pa.Table:
    """Table of everything sampled for the step, `batch`, with the old log-probs that the updates used."""
    if assembled is None:
        return rollout_table(batch, run.spelling, trained=torch.empty(0, dtype=torch.long), kept_groups=0)
    trained = assembled.index
    for update in updates:
        used = batch.old_logprobs.index_copy(0, trained[update.rows], update.old_logprobs)
        batch = replace(batch, old_logprobs=used)
    return rollout_table(
        batch,
        run.spelling,
        trained=trained,
        kept_groups=len(collected.groups),
        updates=updates,
        value_only=index < run.config.pretrain_steps,
    )


def _why_empty(collected: Collected, assembled: Assembled | None) -> str:
    if assembled is None and all(math.isnan(outcome) for outcome in collected.outcomes()):
        return "no completion could be scored: look at the grader"
    if assembled is None:
        return (
            f"algorithm.keep dropped all {len(collected.dropped)} groups of {collected.rounds} rounds, as "
            "KeepMixed does with equal outcomes; there was no update: the task is too hard or too easy for this model, "
            "or raise training.refill_rounds"
        )
    return f"{assembled.unscored} completions could not be scored and none is left: check the grader"
