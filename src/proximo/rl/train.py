"""The loop: collect, assemble, update, write; evaluate and save in between.

`train` is a run from its first step, or from its newest checkpoint, to its result; `train_step` is one step of it.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pyarrow as pa
import torch

from proximo.config import toml
from proximo.data.rows import forget_rows
from proximo.learner.critic import kl_per_completion
from proximo.learner.guard import Update
from proximo.learner.learner import Learner
from proximo.losses.advantage_inputs import shaped_rewards
from proximo.models.out_of_memory import explaining_memory
from proximo.rl.assemble import assemble, to_batch
from proximo.rl.clock import LEARNER, Clock
from proximo.rl.config import RunConfig
from proximo.rl.evaluate import since_best
from proximo.rl.metrics import clipping_metrics, kl_metrics, step_metrics
from proximo.rl.preflight.preflight import skipped_line
from proximo.rl.result import RunResult, at_best, early_end, is_last, refuse_fewer_steps, result_of
from proximo.rl.reward_config import has_verdict
from proximo.rl.rollouts import collect
from proximo.rl.run import SAMPLE_LESS, Run
from proximo.runs.checkpointer import Checkpointer
from proximo.runs.evidence import skipped_updates
from proximo.runs.ledger import entries
from proximo.runs.records import Answered, Assembled, Collected, DataCursor, Evaluation
from proximo.runs.rollouts import rollout_table
from proximo.runs.session import RunSession, open_session
from proximo.runs.signals import Stopped
from proximo.runs.state import RunState
from proximo.system.phases import phased
from proximo.tasks.sources.mixture import data_remarks
from proximo.types.batches import Batch


def train(run: Run, session: RunSession | None = None, *, ends: Callable[[], bool] = lambda: False) -> RunResult:
    """Train a run; resumes if the run folder has a checkpoint.

    `session`: the folder, where it has been taken already; its config must be the run's. `ends` is asked after each
    step whether the run ends there: it is saved and evaluated as after its last step.
    """
    config, ended = run.config, ""
    with ExitStack() as until:
        session = session or until.enter_context(open_session(run.folder, toml.dumps(config)))
        session.refuse_other_config(toml.dumps(config))
        if session.result is not None:
            return RunResult.from_dict(session.result, run.folder, run.task, config.seed)
        run.log = session.log
        forget_rows()
        until.enter_context(run.working())
        saves = Checkpointer(config.checkpoints, run.parts, run.tokenizer, run.log, run.progress.warned)
        state = _started(run, session, saves)
        try:
            while not is_last(config, state):
                state = _between_steps(run, saves, state)
                if (reason := _reason_to_end(run, state)) is not None:
                    saves.save(state, last=True)
                    run.monitor.notify(state.step, "early_end", reason)
                    ended = reason
                    break
                collected = train_step(run, state.step, state.cursor)
                state = saves.snapshot(state.after_step(collected))
                if ends():
                    saves.save(state, last=True)
                    break
            saves.save_if_due(state, last=is_last(config, state))
            after, answers = _evaluated(run, state.step)
        except Stopped:
            saves.save(state, last=is_last(config, state), again=False)
            raise
        result = _result(run, saves, state, after, answers, ended)
        run.log.settle()
        session.finish(result.to_dict())
        return result


def train_step(run: Run, index: int, cursor: DataCursor) -> Collected:
    """One step: rollouts, then updates.

    `index` counts steps from 0, for random numbers and schedules; everything that is shown or stored has the number of
    steps done after it, `index + 1`.
    """
    learner, clock, version = run.learner, Clock(lanes=run.timeline.lanes), run.learner.version
    with run.timeline.lanes.during(LEARNER, "push"):
        oldest = run.rollouts.begin_step(learner.policy, version, cursor, index)
    learner.start_step(oldest)
    with run.stop.anywhere():  # nothing has changed before the first update
        with clock.phase("rollout"), explaining_memory(SAMPLE_LESS):
            collected = collect(run.rollouts, run.collector)
        clock.split("rollout", "grade", collected.grading_seconds)
        measuring = run.measures.begin([*collected.groups, *collected.dropped])
        rate = _scheduled(run, index)
        assembled = _assembled(run, collected, clock)
    updates = _updated(run, assembled, index, clock)
    step = Step(index + 1, cursor, version, collected, assembled, updates, rate, measuring())
    _report(run, step)
    _write(run, step, clock)
    if run.config.stop_on is None:  # else the run ends with its best checkpoint
        learner.guard.check()
    run.monitor.failures.check()
    run.profiler.end(run.log, str(learner.passes))
    return collected


# Before, between and after the steps


def _started(run: Run, session: RunSession, saves: Checkpointer) -> RunState:
    """The state that a run begins with: of the checkpoint that it resumes from, or after its first evaluation."""
    refuse_fewer_steps(run.config, session.resume_from)
    # Nothing is written before this: a run that cannot be resumed, because too much was changed, stays as it is.
    state = None if session.resume_from is None else saves.restore(session.resume_from, run.task, run.config.seed)
    session.start({"parameters": run.parameters})
    if session.unremembered is not None:
        run.progress.warned(0 if state is None else state.step, session.unremembered)
    if state is None:
        state = saves.snapshot(_first_state(run))
    else:
        run.log.rewind(state.sizes, state.step)
        _say_waits(run, state.step)
        run.monitor.remember(run.folder)
    if not run.repeats:
        run.monitor.notify(
            state.step,
            "not_repeatable",
            f"sampler {type(run.config.sampler).__name__} is not reproducible: the same config and seed may give other "
            "numbers, and steps that repeat after a resume may differ from those that were lost",
        )
    run.progress.start(run.config.steps, state.before)
    return state


def _first_state(run: Run) -> RunState:
    """Evaluate on held-out problems before the first step, and report what was left out of the data."""
    run.log.rewind({}, 0)
    for mistake in run.left_out:
        run.log.event(0, "skipped_row", mistake)
    for line in data_remarks(run.config.task):
        run.monitor.notify(0, "data", line)
    for line in skipped_line(run.left_out):
        run.progress.warned(0, line)
    for remark in run.remarks:
        run.monitor.notify(0, "calibration", remark)
    _say_waits(run, 0)
    before, answers = _evaluated(run, 0)
    before.value(run.config.evaluation.metric)  # refuses an unknown one before the first step
    if before.problems:
        run.monitor.metrics(0, before.floats())
    return RunState(step=0, before=before, answers=answers)


def _say_waits(run: Run, step: int) -> None:
    """Say what is not there yet, and will be waited for."""
    for message in run.waits_for:
        run.monitor.notify(step, "waiting", message)


def _evaluated(run: Run, step: int) -> tuple[Evaluation, list[Answered]]:
    """Evaluate after this many steps, and report failures of graders."""
    with run.timeline.lanes.during(LEARNER, "evaluate"):
        evaluation = run.evaluate()
    run.monitor.sampler_events(step, run.samplers.take_events())
    run.monitor.after_evaluation(step)
    return evaluation


def _between_steps(run: Run, saves: Checkpointer, state: RunState) -> RunState:
    """Evaluate and save a checkpoint between two steps, if due."""
    run.profiler.begin(state.step + 1)
    every, step, metric = run.config.evaluation.every, state.step, run.config.evaluation.metric
    if every and step and step % every == 0 and not state.evaluated:
        evaluation, answers = _evaluated(run, step)
        _write_beside_best(run, state, evaluation, answers)
        run.progress.evaluated(step, evaluation)
        state = saves.snapshot(state.after_evaluation(evaluation, answers, metric))
    with run.timeline.lanes.during(LEARNER, "save"):
        return saves.save_if_due(state, last=is_last(run.config, state))


def _write_beside_best(run: Run, state: RunState, evaluation: Evaluation, answers: Sequence[Answered]) -> None:
    """Write the row of an evaluation, if there was one, with how it stands beside the best one before it."""
    best = state.best_before(run.config.evaluation.metric)
    if evaluation.problems:
        beside = {"held_out/best_step": best.step, **since_best(best.answers, answers)}
        run.monitor.metrics(state.step, {**evaluation.floats(), **beside})


def _reason_to_end(run: Run, state: RunState) -> str | None:
    """Say why the run ends before its last step, if it does."""
    return run.monitor.collapse(run.learner.guard.complaint) or early_end(run.config.evaluation, state)


def _result(
    run: Run, saves: Checkpointer, state: RunState, after: Evaluation, answers: Sequence[Answered], ended: str
) -> RunResult:
    """The result of a run, whose last evaluation is written if it has no row yet."""
    if not state.evaluated:
        _write_beside_best(run, state, after, answers)
    best = state.best_before(run.config.evaluation.metric)
    result = result_of(state, best, after, answers, saves, ended=ended)
    if result.better is not None:
        run.log.event(state.step, "better_checkpoint", str(result.better))
    has_collapsed = ended and run.monitor.collapse(run.learner.guard.complaint)
    return at_best(result, state, saves) if has_collapsed else result


# Parts of a step


@dataclass(frozen=True)
class Step:
    """A step's groups, batch and updates."""

    number: int
    """Number of steps done after it."""
    cursor: DataCursor
    """Position in the data where it began."""
    version: int
    """Version of the policy before its updates."""
    collected: Collected
    assembled: Assembled | None
    """Batch of the step. None: there was no group to train on."""
    updates: Sequence[Update]
    learning_rate: float
    measures: Mapping[str, float]
    """Metrics of the user's own."""


def _scheduled(run: Run, index: int) -> float:
    """Reset the reference if that is due, and set the step's numbers and its learning rate."""
    every = run.config.training.reset_reference_every
    if every is not None and index and index % every == 0:
        run.learner.policy.reset_reference()
    if run.config.schedules:
        _set_numbers(run.learner, run.numbers.at(index))
    return run.learner.set_learning_rate(index, policy_step=index - run.config.pretrain_steps)


def _set_numbers(learner: Learner, config: RunConfig) -> None:
    """Give the learner the numbers of a step's config."""
    value = config.value_options
    learner.set_numbers(
        config.algorithm.with_length_limit(config.sampling.max_tokens),
        config.training.for_learner(),
        temperature=config.sampling.temperature,
        value_learning_rate=value and value.rate(config.training.learning_rate),
    )


def _assembled(run: Run, collected: Collected, clock: Clock) -> Assembled | None:
    if not collected.groups:
        return None
    with clock.phase("assemble"):
        return assemble(
            collected.groups,
            collected.dropped,
            run.learner,
            run.config.sampling.max_tokens,
            penalty_unit=run.config.penalty_unit,
            outcome_weight=run.config.rewards.task,
            teacher=run.teacher,
            spell=run.spelling,
        )


def _updated(run: Run, assembled: Assembled | None, index: int, clock: Clock) -> list[Update]:
    """The step's updates: only of the value model while it is pre-trained, then of everything."""
    if assembled is None or not len(assembled.batch):
        return []
    with clock.phase("update"):
        if index >= run.config.pretrain_steps:
            return list(run.learner.updates(assembled.batch))
        assert assembled.earned is not None
        return list(run.learner.value_updates(replace(assembled.batch, returns=assembled.earned)))


@phased("records")
def _report(run: Run, step: Step) -> None:
    """Report problems of a step on the console and in the events."""
    collected = step.collected
    run.monitor.sampler_events(step.number, run.samplers.take_events())
    for _, problem in collected.passed_over:
        if problem.unusable:
            run.monitor.notify(step.number, "skipped_row", problem.unusable)
    if not step.updates:
        run.log.event(step.number, "empty_step", _why_empty(collected, step.assembled))
    notices = run.learner.guard.take_notices()
    if step.assembled is not None:
        notices += skipped_updates(run.folder, step.number, step.assembled.batch, step.updates)
    groups = [*collected.groups, *collected.dropped]
    run.monitor.after_step(step.number, groups, notices, run.rollouts.take_notices())
    for line in run.measures.take_notices():
        run.monitor.notify(step.number, "metric", line)


@phased("records")
def _write(run: Run, step: Step, clock: Clock) -> None:
    """Write everything about a step."""
    number, collected = step.number, step.collected
    everyone = _shaped(run, collected) if step.assembled is None else step.assembled.everyone
    metrics = _metrics(run, step, everyone)
    run.monitor.metrics(number, metrics)
    size = run.task.size("train")
    run.log.ledger(entries(number, step.cursor, collected, step.assembled, step.updates, size))
    with clock.phase("write"):
        run.log.rollouts(number, _table(run, step, everyone))
    costs = run.grading.usage.take() | run.grading.episodes.take()
    run.log.timings(number, clock.seconds | {"tokens": collected.sampled_tokens} | costs)
    oldest = (min(rollout.completion.version for rollout in group.rollouts) for group in collected.groups)
    staleness = Counter(step.version - version for version in oldest)
    intervals = run.samplers.take_intervals()
    run.log.timeline(number, run.timeline.row(intervals, staleness=staleness, **run.rollouts.queue()))
    run.progress.stepped(number, metrics, clock.seconds, collected)


def _metrics(run: Run, step: Step, everyone: Batch) -> dict[str, float]:
    """The step's row of metrics; a KL in the reward is adapted to the measured one once that is in it."""
    config, learner, assembled = run.config, run.learner, step.assembled
    trains_policy = step.number > config.pretrain_steps
    metrics = step_metrics(
        step.collected,
        assembled,
        step.updates,
        step.learning_rate,
        has_verdict=has_verdict(run.task_played),
        has_tools=bool(getattr(config.environment, "tools", ())),
        is_whole=not config.sampling.truncates and not config.sampling.greedy,
        shaped=everyone.rewards if learner.algorithm.length_penalties else None,
    )
    metrics |= {**run.numbers.logged(step.number - 1), **step.measures}
    if assembled is None:
        return metrics
    if trains_policy:
        metrics |= clipping_metrics(learner.algorithm, assembled.batch, step.updates)
    if (kl := kl_per_completion(assembled.batch)) is not None:
        metrics |= kl_metrics(kl, learner.kl_reward)
        if trains_policy:
            learner.adapt_kl(kl, len(assembled.batch))
    return metrics


def _shaped(run: Run, collected: Collected) -> Batch:
    """Batch of all that a step without a group to train on sampled, with the rewards it would have trained on."""
    batch, config = to_batch(collected.dropped), run.config
    penalties = run.learner.algorithm.length_penalties
    return replace(batch, rewards=shaped_rewards(batch, penalties, config.sampling.max_tokens, config.penalty_unit))


def _table(run: Run, step: Step, everyone: Batch) -> pa.Table:
    """Table of everything sampled for the step, with the old log-probs that the updates used."""
    if step.assembled is None:
        return rollout_table(everyone, run.spelling, trained=torch.empty(0, dtype=torch.long), kept_groups=0)
    trained = step.assembled.index
    for update in step.updates:
        used = everyone.old_logprobs.index_copy(0, trained[update.rows], update.old_logprobs)
        everyone = replace(everyone, old_logprobs=used)
    return rollout_table(
        everyone,
        run.spelling,
        trained=trained,
        kept_groups=len(step.collected.groups),
        updates=step.updates,
        value_only=step.number <= run.config.pretrain_steps,
    )


def _why_empty(collected: Collected, assembled: Assembled | None) -> str:
    if assembled is None and all(math.isnan(outcome) for outcome in collected.outcomes()):
        return "no completion could be scored: look at the grader"
    if assembled is None:
        return (
            f"algorithm.keep dropped all {len(collected.dropped)} groups of {collected.rounds} rounds, as "
            "KeepMixed does with equal task scores; there was no update: the task is too hard or too easy for this "
            "model, or raise training.refill_rounds"
        )
    return f"{assembled.unscored} completions could not be scored and none is left: check the grader"
