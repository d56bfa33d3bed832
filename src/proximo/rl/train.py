"""The loop: collect, assemble, update, log; evaluate before and after."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from proximo.config import toml
from proximo.rl.checkpoint_state import Parts
from proximo.rl.checkpointer import Checkpointer
from proximo.rl.clock import LEARNER
from proximo.rl.evaluate import since_best
from proximo.rl.preflight.preflight import skipped_line
from proximo.rl.result import RunResult, better_than_last, paired
from proximo.rl.run import Run
from proximo.rl.step import train_step
from proximo.runs.records import Answered, Evaluation
from proximo.runs.session import Attempt, begin
from proximo.runs.signals import Stopped
from proximo.runs.state import RunState
from proximo.tasks.sources.mixture import data_remarks


def train(run: Run, attempt: Attempt | None = None, *, ends: Callable[[], bool] = lambda: False) -> RunResult:
    """Train a run; resumes if the run folder has a checkpoint.

    `attempt`: the folder, where it has been taken already; its config must be the run's. `ends` is asked after each
    step whether the run ends there: it is saved and evaluated as after its last step.
    """
    config_toml = toml.dumps(run.config)
    with ExitStack() as until:
        attempt = attempt or until.enter_context(begin(run.folder, config_toml))
        attempt.refuse_other_config(config_toml)
        if attempt.result is not None:
            return RunResult.from_dict(attempt.result, run.folder, run.task, run.config.seed)
        run.log = attempt.log
        until.callback(run.grading.close)
        until.callback(run.samplers.close)
        until.enter_context(run.grading.active())
        until.enter_context(run.stop)
        until.callback(run.close_ahead)
        parts = Parts(run.learner, run.unscored, run.ahead or run.samplers.history, run.ahead, run.in_flight)
        checkpointer = Checkpointer(run.config, parts, run.tokenizer, run.log, run.progress.warned)
        # Nothing is written before this: a run that cannot be resumed, because too much was changed, stays as it is.
        state = None if attempt.resume_from is None else checkpointer.restore(attempt.resume_from, run.task)
        attempt.start({"parameters": run.parameters})
        if attempt.unremembered is not None:
            run.progress.warned(0 if state is None else state.step, attempt.unremembered)
        outcome = _train(run, checkpointer, state, ends)
        run.log.settle()
        attempt.finish(outcome.to_dict())
        return outcome


def _train(run: Run, checkpointer: Checkpointer, state: RunState | None, ends: Callable[[], bool]) -> RunResult:
    """The training loop. The state is snapshotted between steps, and saved every few steps."""
    config = run.config
    if state is None:
        state = checkpointer.snapshot(_begun(run))
    else:
        run.log.rewind(state.sizes, state.step)
        run.tell_waits(state.step)
        run.remember()
    run.tell_if_not_repeatable(state.step)
    run.progress.start(config.steps, state.before)
    ended = ""
    try:
        while not checkpointer.is_last(state):
            state = _between(run, checkpointer, state)
            if (reason := run.collapse or checkpointer.early_end(state)) is not None:
                checkpointer.save(state, last=True)
                run.tell_early_end(state.step, reason)
                ended = reason
                break
            collected = train_step(run, state.step, state.cursor)
            state = checkpointer.after_step(state, collected)
            if ends():
                checkpointer.save(state, last=True)
                break
        checkpointer.save_if_due(state)
        after, answers = _evaluated(run, state.step)
    except Stopped:
        checkpointer.save(state, again=False)
        raise
    best = checkpointer.best_before(state)
    if not state.evaluated:  # else the row of this evaluation is written
        _note(run, state.step, after, {"held_out/best_step": best.step, **since_best(best.answers, answers)})
    result = RunResult(
        before=state.before,
        after=after,
        examples=paired(state.answers, answers),
        checkpoint=checkpointer.path(state.step),
        generated_tokens=state.generated,
        seconds=checkpointer.seconds,
        ended=ended,
        better=better_than_last(best, after, answers, checkpointer.path(best.step).is_dir()),
    )
    if result.better is not None:
        run.log.event(state.step, "better_checkpoint", str(result.better))
    return _of_best(result, state, checkpointer) if ended and run.collapse else result


def _of_best(result: RunResult, state: RunState, checkpointer: Checkpointer) -> RunResult:
    """The result of a run that collapsed: its best checkpoint, or the last where none was evaluated or kept."""
    best = state.best
    if best is None or best.evaluation is None or not (point := checkpointer.path(best.step)).is_dir():
        return result
    return replace(
        result,
        after=best.evaluation,
        examples=paired(state.answers, best.answers),
        checkpoint=point,
        last=None if point == result.checkpoint else result.checkpoint,
        better=result.better if result.better and not result.better.checkpoint else None,
    )


def _begun(run: Run) -> RunState:
    """Before the first step: evaluate on held-out problems, and report what was left out of the data."""
    run.log.rewind({}, 0)
    for mistake in run.left_out:
        run.log.event(0, "skipped_row", mistake)
    for line in data_remarks(run.config.task):
        run.log.event(0, "data", line)
        run.progress.warned(0, line)
    for line in skipped_line(run.left_out):
        run.progress.warned(0, line)
    for remark in run.remarks:
        run.log.event(0, "calibration", remark)
        run.progress.warned(0, remark)
    run.tell_waits(0)
    before, answers = _evaluated(run, 0)
    before.value(run.config.evaluation.metric)  # refuses an unknown one before the first step
    _note(run, 0, before, {})
    return RunState(step=0, before=before, answers=answers)


def _evaluated(run: Run, step: int) -> tuple[Evaluation, list[Answered]]:
    """Evaluate after this many steps, and report failures of graders."""
    with run.timeline.lanes.during(LEARNER, "evaluate"):
        found = run.evaluate()
    run.tell_of_sampler(step)
    told = [("unscored", line) for line in run.unscored.lines()]
    told += [("failed_episodes", line) for line in run.failed_episodes.lines()]
    for kind, line in told:
        run.log.event(step, kind, line)
        run.progress.warned(step, line)
    return found


def _note(run: Run, step: int, found: Evaluation, beside: Mapping[str, float]) -> None:
    """Write the row of an evaluation, if there was one; `beside`: how it stands beside the best one."""
    if found.problems:
        run.note(step, {**found.floats(), **beside})


def _between(run: Run, checkpointer: Checkpointer, state: RunState) -> RunState:
    """Evaluate and save a checkpoint between two steps, if due."""
    every, step = run.config.evaluation.every, state.step
    if every and step and step % every == 0 and not state.evaluated:
        midway, answers = _evaluated(run, step)
        best = checkpointer.best_before(state)
        _note(run, step, midway, {"held_out/best_step": best.step, **since_best(best.answers, answers)})
        run.progress.evaluated(step, midway)
        state = checkpointer.after_evaluation(state, midway, answers)
    with run.timeline.lanes.during(LEARNER, "save"):
        return checkpointer.save_if_due(state)
