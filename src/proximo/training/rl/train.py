"""The loop: collect, assemble, update, log; evaluate before and after."""

from contextlib import ExitStack

import torch

from proximo.rewards.workers import close_workers
from proximo.training.rl.checkpointer import Keeper
from proximo.training.rl.evaluate import Answered, Evaluation
from proximo.training.rl.result import Outcome, paired
from proximo.training.rl.run import Run
from proximo.training.rl.step import train_step
from proximo.training.runfolder.checkpoints import Holders
from proximo.training.runfolder.resume import Attempt, begin
from proximo.training.runfolder.signals import Stopped
from proximo.training.runfolder.state import Standing


def train(run: Run, config_toml: str, attempt: Attempt | None = None) -> Outcome:
    """Sample, grade, learn, repeat; from where the run stands, if its folder holds one already."""
    with ExitStack() as until:
        attempt = attempt or until.enter_context(begin(run.folder, config_toml))
        if attempt.result is not None:
            return Outcome.from_dict(attempt.result, run.folder, run.task, run.config.seed)
        run.log = attempt.log
        until.callback(close_workers)
        until.enter_context(run.stop)
        until.enter_context(torch.random.fork_rng([run.model.device] if run.model.device.type == "cuda" else []))
        torch.manual_seed(run.config.seed)  # for models that draw by themselves
        holders = Holders(run.learner, run.unscored, run.mismatched)
        keeper = Keeper(run.config, holders, run.tokenizer, run.log, run.progress.warned)
        # A run that cannot be gone on with, since too much was changed, stays as it is: nothing is written before.
        standing = None if attempt.point is None else keeper.restored(attempt.point, run.task)
        attempt.start()
        outcome = _train(run, keeper, standing)
        run.log.settle()
        attempt.finish(outcome.to_dict())
        return outcome


def _train(run: Run, keeper: Keeper, standing: Standing | None) -> Outcome:
    """The loop. Between two steps everything that the next one depends on is noted; now and then it is saved."""
    config = run.config
    if standing is None:
        standing = keeper.noted(_begun(run))
    else:
        run.log.rewind(standing.sizes, standing.step)
        run.remember()
    run.progress.start(config.steps, standing.before)
    try:
        while not keeper.is_last(standing):
            standing = _between(run, keeper, standing)
            collected = train_step(run, standing.step, standing.frontier)
            standing = keeper.stepped(standing, collected)
        keeper.consider(standing)
        after, answers = _evaluated(run, standing.step)
    except Stopped:
        keeper.save(standing, again=False)
        raise
    run.note(standing.step, after.floats())
    return Outcome(
        before=standing.before,
        after=after,
        examples=paired(standing.answers, answers),
        checkpoint=keeper.path(standing.step),
        generated_tokens=standing.generated,
        seconds=keeper.seconds,
    )


def _begun(run: Run) -> Standing:
    """Before the first step: the held-out problems, and what was left out of the data."""
    run.log.rewind({}, 0)
    for mistake in run.left_out:
        run.log.event(0, "skipped_row", mistake)
    for remark in run.remarks:
        run.log.event(0, "calibration", remark)
        run.progress.warned(0, remark)
    before, answers = _evaluated(run, 0)
    run.note(0, before.floats())
    return Standing(step=0, before=before, answers=answers)


def _evaluated(run: Run, step: int) -> tuple[Evaluation, list[Answered]]:
    """After so many steps, with what went wrong in graders."""
    found = run.evaluate()
    for line in run.unscored.lines():
        run.log.event(step, "unscored", line)
        run.progress.warned(step, line)
    return found


def _between(run: Run, keeper: Keeper, standing: Standing) -> Standing:
    """What may be due between two steps: an evaluation, a checkpoint."""
    every, step = run.config.evaluation.every, standing.step
    if every and step and step % every == 0 and not standing.evaluated:
        midway, _ = _evaluated(run, step)
        run.note(step, midway.floats())
        run.progress.evaluated(step, midway)
        standing = keeper.evaluated(standing, midway)
    return keeper.consider(standing)
