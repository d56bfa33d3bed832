"""The loop: collect, assemble, update, log; evaluate before and after."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.models import load_model, load_tokenizer, pick_device, pick_dtype
from proximo.models.compiling import allow_compiling
from proximo.models.shipped import resolve
from proximo.models.values import OwnModel, load_value_model, value_model
from proximo.rewards.workers import close_workers
from proximo.samplers import Sampler
from proximo.samplers.embedded import local_sampler
from proximo.samplers.mismatch import MismatchedSampler
from proximo.tasks import Task
from proximo.training.assemble import Assembled, assemble
from proximo.training.calibration import calibrate
from proximo.training.checkpoints import Holders
from proximo.training.clock import Clock
from proximo.training.collect import Collected, Collector, Frontier
from proximo.training.config import RunConfig
from proximo.training.critic import BaselineWatch, kl_per_completion
from proximo.training.evaluate import Answered, Evaluation, evaluate
from proximo.training.evidence import skipped_updates
from proximo.training.guarding import Update
from proximo.training.judging import judged
from proximo.training.keeping import Keeper
from proximo.training.learner import Learner
from proximo.training.ledger import entries
from proximo.training.memory import explaining_memory
from proximo.training.metrics import step_metrics
from proximo.training.outcome import Outcome, paired
from proximo.training.progress import Progress
from proximo.training.prompts import check_prompts
from proximo.training.resume import Attempt, begin
from proximo.training.runlog import RunLog
from proximo.training.state import Standing
from proximo.training.stopping import Stop, Stopped
from proximo.training.unscored import UnscoredWatch

MOST_SLOTS = 512
"""Rows decoded at a time; a step with more refills slots as rows end."""
SAMPLE_LESS = "use a smaller sampling.max_tokens, or training.groups and training.group_size: so many rows are decoded"
"""What helps where sampling runs out of memory."""


class Run:
    """Everything a run holds in memory, built from its config."""

    def __init__(self, config: RunConfig, folder: Path, progress: Progress) -> None:
        self.config, self.folder, self.progress = config, folder, progress
        config.task.problem(0, "train", config.seed)  # a task that cannot be read fails before a model loads
        path = resolve(config.model)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(path)
        self.left_out = check_prompts(config, path, self.tokenizer)
        allow_compiling(config.compile)
        self.task: Task = judged(config.task, config.rewards, self.tokenizer, config.dtype)
        self.remarks = calibrate(self.task, config.seed)
        backbone = _value_backbone(config, self.tokenizer)
        device = pick_device(config.device)
        self.model: PreTrainedModel = load_model(path, device=device, dtype=pick_dtype(config.dtype, device))
        rows = config.training.groups * config.training.group_size
        slots = min(rows, MOST_SLOTS)
        self.sampler = local_sampler(self.model, self.tokenizer, slots=slots)
        records = config.replay == "sampler"
        self.mismatched = (
            None
            if config.mismatch is None
            else MismatchedSampler(self.model, self.tokenizer, config.mismatch, slots=slots, record_routes=records)
        )
        """What samples the rollouts in the place of `sampler`, where a mismatch is asked for."""
        self.learner = Learner(
            self.model,
            config.algorithm.within(config.sampling.max_tokens),
            config.training,
            temperature=config.sampling.temperature,
            seed=config.seed,
            value=config.value and value_model(config.value.form, self.model, backbone),
            value_learning_rate=config.value and config.value.learning_rate,
            replay=config.replay,
        )
        self.baselines, self.unscored = BaselineWatch(), UnscoredWatch(config.rewards.most_unscored)
        self.collector = Collector(
            task=self.task,
            sampler=self.mismatched or self._sampler(slots, record_routes=records),
            tokenizer=self.tokenizer,
            sampling=config.sampling,
            training=config.training,
            keep=config.algorithm.keep,
            seed=config.seed,
        )
        self.log, self.stop = RunLog(folder), Stop()

    def _sampler(self, slots: int, *, record_routes: bool) -> Sampler:
        """Evaluation's, with its keys and captured steps, unless it is to note routes, for which that has no use."""
        if not record_routes:
            return self.sampler
        return local_sampler(self.model, self.tokenizer, slots=slots, record_routes=True)

    def evaluate(self) -> tuple[Evaluation, list[Answered]]:
        config = self.config
        with self.stop.anywhere(), explaining_memory(SAMPLE_LESS):
            return evaluate(self.task, self.sampler, self.tokenizer, config.sampling, config.evaluation, config.seed)


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
        holders = Holders(run.learner, run.baselines, run.unscored, run.mismatched)
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
    run.progress.start(config.steps, standing.before)
    try:
        while standing.step < config.steps:
            standing = _between(run, keeper, standing)
            collected = train_step(run, standing.step, standing.frontier)
            standing = keeper.stepped(standing, collected)
        keeper.consider(standing)
        after, answers = _evaluated(run, config.steps - 1)
    except Stopped:
        keeper.save(standing, again=False)
        raise
    run.log.metrics(config.steps, after.floats())
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
        run.log.event(-1, "skipped_row", mistake)
    for remark in run.remarks:
        run.log.event(-1, "calibration", remark)
        run.progress.warned(-1, remark)
    before, answers = _evaluated(run, -1)
    run.log.metrics(-1, before.floats())
    return Standing(step=0, before=before, answers=answers)


def _evaluated(run: Run, step: int) -> tuple[Evaluation, list[Answered]]:
    """After a step, with what went wrong in graders."""
    found = run.evaluate()
    for line in run.unscored.lines():
        run.log.event(step, "unscored", line)
        run.progress.warned(step, line)
    return found


def _between(run: Run, keeper: Keeper, standing: Standing) -> Standing:
    """What may be due between two steps: an evaluation, a checkpoint."""
    every, step = run.config.evaluation.every, standing.step
    if every and step and step % every == 0 and not standing.evaluated:
        midway, _ = _evaluated(run, step - 1)
        run.log.metrics(step - 1, midway.floats())
        run.progress.evaluated(step - 1, midway)
        standing = keeper.evaluated(standing, midway)
    return keeper.consider(standing)


def train_step(run: Run, step: int, frontier: Frontier) -> Collected:
    """One step: rollouts, then the updates they allow."""
    config, learner, clock = run.config, run.learner, Clock()
    learner.start_step(run.mismatched and run.mismatched.refresh(learner.version))
    with run.stop.anywhere():  # until the first update nothing has changed
        with clock.phase("rollout"), explaining_memory(SAMPLE_LESS):
            collected = run.collector.collect(frontier, step=step, version=learner.version)
        clock.split("rollout", "grade", collected.grading_seconds)
        every = config.training.reset_reference_every
        if every is not None and step and step % every == 0:
            learner.reset_reference()
        rate, assembled = learner.set_learning_rate(step, policy_step=step - config.pretrain_steps), None
        if collected.groups:
            with clock.phase("assemble"):
                assembled = assemble(collected.groups, collected.dropped, learner, config.sampling.max_tokens)
    updates = []
    if assembled is not None and len(assembled.batch):
        with clock.phase("update"):
            updates = list(_updates(run, assembled, step))
    _tell(run, step, collected, assembled, updates)
    metrics = step_metrics(collected, assembled, updates, rate) | _kl_metrics(run, assembled, step)
    run.log.metrics(step, metrics)
    run.log.ledger(entries(step, frontier, collected, assembled, updates, run.task.size("train")))
    if (warning := run.baselines.look(metrics)) is not None:
        run.log.event(step, "weak_value_model", warning)
        run.progress.warned(step, warning)
    if assembled is not None:
        with clock.phase("write"):
            run.log.rollouts(step, assembled.batch, updates, run.tokenizer)
    run.log.timings(step, clock.seconds | {"tokens": collected.sampled_tokens})
    run.progress.stepped(step, metrics, clock.seconds, collected)
    learner.guard.check()
    run.unscored.check()
    return collected


def _tell(run: Run, step: int, collected: Collected, assembled: Assembled | None, updates: Sequence[Update]) -> None:
    """What went wrong in a step, if anything did: to who watches, and to who reads the run later."""
    if not updates:
        run.log.event(step, "empty_step", _why_empty(collected, assembled))
    notices = run.learner.guard.take_notices()
    if assembled is not None:
        notices += skipped_updates(run.folder, step, assembled.batch, updates)
    lines = run.unscored.look([*collected.groups, *collected.dropped])
    for kind, message in [(each.kind, each.message) for each in notices] + [("unscored", line) for line in lines]:
        run.log.event(step, kind, message)
        run.progress.warned(step, message)


def _updates(run: Run, assembled: Assembled, step: int) -> Iterator[Update]:
    """The step's updates: of the value model alone while it is pre-trained, then of everything."""
    if step >= run.config.pretrain_steps:
        return run.learner.updates(assembled.batch)
    assert assembled.earned is not None
    return run.learner.value_updates(replace(assembled.batch, returns=assembled.earned))


def _kl_metrics(run: Run, assembled: Assembled | None, step: int) -> dict[str, float]:
    """How far the policy that sampled is from the reference; once it moves, a controller moves the coefficient."""
    learner = run.learner
    kl = None if assembled is None else kl_per_completion(assembled.batch)
    if assembled is None or kl is None:
        return {}
    metrics = {"reference_kl": kl}
    if learner.kl_reward is not None:
        metrics["kl_coefficient"] = learner.kl_reward.coefficient
        if step >= run.config.pretrain_steps:
            learner.adapt_kl(kl, len(assembled.batch))
    return metrics


def _value_backbone(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel | None:
    """The value model's own weights, where it has a folder of its own; it must read the policy's tokens."""
    form = config.value and config.value.form
    if not isinstance(form, OwnModel) or form.path is None:
        return None
    path = resolve(form.path)
    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"value.form.path is {form.path!r}: its vocabulary is not the policy's, whose tokens it would have to "
            "read; use a model of the same family"
        )
    device = pick_device(config.device)
    return load_value_model(path, device=device, dtype=pick_dtype(config.dtype, device))


def _why_empty(collected: Collected, assembled: Assembled | None) -> str:
    if assembled is None and all(math.isnan(outcome) for outcome in collected.outcomes()):
        return "no completion could be scored: look at the grader"
    if assembled is None:
        return (
            f"all {len(collected.dropped)} groups of {collected.rounds} rounds had equal outcomes, nothing was "
            "updated: the task is too hard or too easy for this model, or raise training.refill_rounds"
        )
    return f"{assembled.unscored} completions could not be scored and none is left: look at the grader"
