"""The loop: collect, assemble, update, log; evaluate before and after."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.models import load_model, load_tokenizer, pick_device, pick_dtype
from proximo.models.compiling import allow_compiling
from proximo.models.shipped import resolve
from proximo.models.values import OwnModel, load_value_model, value_model
from proximo.samplers import Sampler
from proximo.samplers.embedded import local_sampler
from proximo.samplers.mismatch import MismatchedSampler
from proximo.tasks import Task
from proximo.training.assemble import Assembled, assemble
from proximo.training.checkpoints import save
from proximo.training.collect import Collected, Collector, Frontier
from proximo.training.config import RunConfig
from proximo.training.critic import BaselineWatch, kl_per_completion
from proximo.training.evaluate import Answered, Evaluation, evaluate
from proximo.training.judging import judged
from proximo.training.learner import Learner, Update
from proximo.training.metrics import step_metrics
from proximo.training.progress import Progress
from proximo.training.prompts import check_prompts
from proximo.training.runlog import RunLog

MOST_SLOTS = 512
"""Rows decoded at a time; a step with more refills slots as rows end."""


@dataclass
class Clock:
    """Seconds by phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def split(self, name: str, part: str, seconds: float) -> None:
        """Count so many seconds of a phase as one of their own."""
        self.seconds[name] -= seconds
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds


@dataclass(frozen=True)
class Outcome:
    """What a finished run has to say."""

    before: Evaluation
    after: Evaluation
    examples: list[tuple[Answered, Answered]]
    """The same held-out problems before and after."""
    checkpoint: Path
    generated_tokens: int
    seconds: float


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
        backbone = _value_backbone(config, self.tokenizer)
        device = pick_device(config.device)
        self.model: PreTrainedModel = load_model(path, device=device, dtype=pick_dtype(config.dtype, device))
        rows = config.training.groups * config.training.group_size
        slots = min(rows, MOST_SLOTS)
        self.sampler = local_sampler(self.model, self.tokenizer, slots=slots)
        records = config.replay == "sampler"
        self.mismatched = config.mismatch and MismatchedSampler(
            self.model, self.tokenizer, config.mismatch, slots=slots, record_routes=records
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
        self.baselines = BaselineWatch()
        self.collector = Collector(
            task=self.task,
            sampler=self.mismatched or self._sampler(slots, record_routes=records),
            tokenizer=self.tokenizer,
            sampling=config.sampling,
            training=config.training,
            keep=config.algorithm.keep,
            seed=config.seed,
        )
        self.log = RunLog(folder)

    def _sampler(self, slots: int, *, record_routes: bool) -> Sampler:
        """Evaluation's, with its keys and captured steps, unless it is to note routes, for which that has no use."""
        if not record_routes:
            return self.sampler
        return local_sampler(self.model, self.tokenizer, slots=slots, record_routes=True)

    def evaluate(self) -> tuple[Evaluation, list[Answered]]:
        config = self.config
        return evaluate(self.task, self.sampler, self.tokenizer, config.sampling, config.evaluation, config.seed)


def train(run: Run, config_toml: str) -> Outcome:
    """Sample, grade, learn, repeat."""
    start = time.perf_counter()
    config, folder, progress = run.config, run.folder, run.progress
    run.log.start(config_toml)
    for mistake in run.left_out:
        run.log.event(-1, "skipped_row", mistake)
    before, answers_before = run.evaluate()
    run.log.metrics(-1, before.floats())
    progress.start(config.steps, before)

    frontier, generated = Frontier(), 0
    for step in range(config.steps):
        collected = train_step(run, step, frontier)
        frontier, generated = collected.frontier, generated + collected.sampled_tokens
        if config.evaluation.every and (step + 1) % config.evaluation.every == 0 and step + 1 < config.steps:
            midway, _ = run.evaluate()
            run.log.metrics(step, midway.floats())
            progress.evaluated(step, midway)
        if config.save_every and (step + 1) % config.save_every == 0:
            save(folder, step + 1, run.model, run.tokenizer)

    after, answers_after = run.evaluate()
    run.log.metrics(config.steps, after.floats())
    checkpoint = save(folder, config.steps, run.model, run.tokenizer)
    return Outcome(
        before=before,
        after=after,
        examples=list(zip(answers_before, answers_after, strict=True)),
        checkpoint=checkpoint,
        generated_tokens=generated,
        seconds=time.perf_counter() - start,
    )


def train_step(run: Run, step: int, frontier: Frontier) -> Collected:
    """One step: rollouts, then the updates they allow."""
    config, learner, clock = run.config, run.learner, Clock()
    learner.start_step(run.mismatched and run.mismatched.refresh(learner.version))
    with clock.phase("rollout"):
        collected = run.collector.collect(frontier, step=step, version=learner.version)
    clock.split("rollout", "grade", collected.grading_seconds)
    every = config.training.reset_reference_every
    if every is not None and step and step % every == 0:
        learner.reset_reference()
    rate = learner.set_learning_rate(step, policy_step=step - config.pretrain_steps)
    assembled, updates = None, []
    if collected.groups:
        with clock.phase("assemble"):
            assembled = assemble(collected.groups, collected.dropped, learner, config.sampling.max_tokens)
        with clock.phase("update"):
            updates = list(_updates(run, assembled, step)) if len(assembled.batch) else []
    if not updates:
        run.log.event(step, "empty_step", _why_empty(collected, assembled))
    for number, update in enumerate(updates):
        if not math.isfinite(update.gradient_norm + (update.value_gradient_norm or 0.0)):
            run.log.event(
                step, "skipped_update", f"update {number} had a gradient that is not finite; weights untouched"
            )
    metrics = step_metrics(collected, assembled, updates, rate) | _kl_metrics(run, assembled, step)
    run.log.metrics(step, metrics)
    if (warning := run.baselines.look(metrics)) is not None:
        run.log.event(step, "weak_value_model", warning)
        run.progress.warned(step, warning)
    if assembled is not None:
        with clock.phase("write"):
            run.log.rollouts(step, assembled.batch, updates, run.tokenizer)
    run.log.timings(step, clock.seconds | {"tokens": collected.sampled_tokens})
    run.progress.stepped(step, metrics, clock.seconds, collected)
    return collected


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
