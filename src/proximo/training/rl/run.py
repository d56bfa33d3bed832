"""Everything a run holds in memory, built from its config."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.health import Watch
from proximo.models import load_model, pick_dtype
from proximo.models.adapters.quantized import count_parameters
from proximo.models.adapters.starting import base_for
from proximo.models.compiling import allow_compiling
from proximo.models.shipped import resolve
from proximo.models.tokens.spelling import Spelling
from proximo.models.values import OwnModel, ValueForm, load_value_model, value_model
from proximo.rewards.grading import Grading
from proximo.samplers import RunSamplers, build_samplers
from proximo.tasks import Task
from proximo.training.config import RunConfig
from proximo.training.learner.learner import Learner
from proximo.training.learner.lora import LoraPolicy
from proximo.training.learner.memory import explaining_memory
from proximo.training.learner.policy import PlainPolicy, Policy
from proximo.training.learner.rounding import max_gap
from proximo.training.preflight.calibration import calibrate
from proximo.training.preflight.preflight import preflight
from proximo.training.records import Answered, Evaluation
from proximo.training.reward_mixing import judged
from proximo.training.rl.banding import BandWatch
from proximo.training.rl.collect import Collector
from proximo.training.rl.evaluate import evaluate
from proximo.training.rl.progress import Progress
from proximo.training.rl.unscored import UnscoredWatch
from proximo.training.runfolder.files import METRICS
from proximo.training.runfolder.log import RunLog
from proximo.training.runfolder.signals import Stop

MAX_SLOTS = 512
"""Number of slots for decoding; a step with more rows refills slots as rows end."""
SAMPLE_LESS = (
    "use a smaller sampling.max_tokens, or decode fewer rows: a smaller training.groups or training.group_size"
)
"""Advice if sampling runs out of memory."""


class HoldsOnRanks(Protocol):
    """Holds a run's policy in shards on several processes, see `proximo.distributed`."""

    def hold(self, policy: PlainPolicy, dtype: torch.dtype) -> Policy: ...

    def samplers(
        self, factory: Any, tokenizer: PreTrainedTokenizerBase, *, slots: int, record_routes: bool
    ) -> RunSamplers: ...

    def hold_signals(self, held: Callable[[], AbstractContextManager[None]]) -> None: ...


@dataclass(frozen=True)
class Built:
    """The models of a run, with what samples and trains them."""

    model: PreTrainedModel
    teacher: PreTrainedModel | None
    samplers: RunSamplers
    learner: Learner


class Run:
    """Everything a run holds in memory, built from its config."""

    def __init__(self, config: RunConfig, folder: Path, progress: Progress, ranks: HoldsOnRanks | None = None) -> None:
        """`ranks`: where the run is one of several processes, what holds the policy on all of them."""
        self.config, self.folder, self.progress = config, folder, progress
        checked = preflight(config)
        self.tokenizer: PreTrainedTokenizerBase = checked.tokenizer
        self.spelling = Spelling(self.tokenizer)
        self.left_out = checked.left_out
        self.task: Task = judged(config.task, config.rewards, self.tokenizer, config.dtype, compiled=config.compile)
        self.grading = Grading()
        """Failures and worker processes of this run's graders."""
        with self.grading.active():
            self.remarks = [*calibrate(self.task, config.seed), *config.penalty_remarks]
        built = build_learner(config, checked.path, checked.device, self.tokenizer, ranks)
        self.model, self.teacher = built.model, built.teacher
        self.samplers, self.learner = built.samplers, built.learner
        self.watch, self.unscored = Watch(), UnscoredWatch(config.rewards.max_unscored, self.grading.failures)
        self.band = BandWatch(config.algorithm)
        self.collector = Collector(
            task=self.task,
            sampler=self.samplers.training,
            tokenizer=self.tokenizer,
            sampling=config.sampling,
            training=config.training,
            keep=config.algorithm.keep,
            seed=config.seed,
            environment=config.environment,
        )
        self.log, self.stop = RunLog(folder), Stop()
        if ranks is not None:
            ranks.hold_signals(self.stop.held)

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters of the policy's model, and how many of them are trained, for run.json."""
        trained = sum(each.numel() for each in self.model.parameters() if each.requires_grad)
        return {"policy": count_parameters(self.model), "trained": trained}

    def refresh_sampler(self) -> int:
        """Give the policy's weights to the sampler; returns the version that it samples with."""
        return self.samplers.training.refresh(self.learner.policy, self.learner.version)

    def evaluate(self) -> tuple[Evaluation, list[Answered]]:
        config, sampler = self.config, self.samplers.evaluation
        if not config.evaluation.problems:
            return Evaluation.none(), []
        with self.stop.anywhere(), explaining_memory(SAMPLE_LESS):
            return evaluate(
                self.task,
                sampler,
                self.tokenizer,
                config.sampling,
                config.evaluation,
                config.seed,
                environment=config.environment,
                version=sampler.refresh(self.learner.policy, self.learner.version),
            )

    def tell_if_not_repeatable(self, step: int) -> None:
        """Warn, at the start and on every resume, if this run's sampler is not reproducible."""
        if not (self.samplers.training.repeats and self.samplers.evaluation.repeats):
            name = type(self.config.sampler).__name__
            message = (
                f"sampler {name} is not reproducible: the same config and seed may give other numbers, and steps "
                "that repeat after a resume may differ from those that were lost"
            )
            self.log.event(step, "not_repeatable", message)
            self.progress.warned(step, message)

    def tell_early_end(self, step: int, reason: str) -> None:
        """Report that the run ends before its last step."""
        self.log.event(step, "early_end", reason)
        self.progress.warned(step, reason)

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row of metrics, and report new findings."""
        self.log.metrics(step, metrics)
        for found in self.watch.look({"step": step, **metrics}):
            more = {"rule": found.rule, "severity": found.severity, "remedy": found.remedy, "show": found.show}
            self.log.event(found.step, "finding", found.message, **more)
            self.progress.warned(found.step, str(found))
        if (remark := self.band.look(metrics)) is not None:
            self.log.event(step, "narrow_band", remark)
            self.progress.warned(step, remark)

    def remember(self) -> None:
        """After a resume: feed the run's earlier rows to the watch, without reporting findings again."""
        path = self.folder / METRICS
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with suppress(ValueError):  # a damaged row is skipped
                if isinstance(row := json.loads(line), dict):
                    self.watch.look(row)
                    self.band.look(row)


def build_learner(
    config: RunConfig, path: str, device: str, tokenizer: PreTrainedTokenizerBase, ranks: HoldsOnRanks | None = None
) -> Built:
    """Load the models of a run, and build what samples and trains them."""
    value, dtype = config.value_options, pick_dtype(config.dtype, device)
    held = dtype if ranks is None else torch.float32  # shards are float32, and their passes in `dtype`
    backbone = value and _value_backbone(value.form, device, held)
    quantization = None if config.adapter is None else config.adapter.quantize_base
    model = load_model(path, device=device, dtype=held, quantization=quantization)
    teacher = _teacher(config, device, dtype)
    for each in filter(None, (model, backbone, teacher)):
        allow_compiling(each, config.compile)
    # First the value model, which may copy layers: a copy has no use for an adapter.
    values = value and value_model(value.form, model, backbone)
    policy = plain = build_policy(model, config, path)
    rows, records = config.training.groups * config.training.group_size, config.routing_replay == "sampler"
    slots, bound = min(rows, MAX_SLOTS), max_gap(model, dtype)
    if ranks is None:
        samplers = build_samplers(config.sampler, policy, tokenizer, slots=slots, record_routes=records)
    else:
        policy = ranks.hold(plain, dtype)
        samplers = ranks.samplers(config.sampler, tokenizer, slots=slots, record_routes=records)
    learner = Learner(
        policy,
        config.algorithm.with_length_limit(config.sampling.max_tokens),
        config.training,
        temperature=config.sampling.temperature,
        seed=config.seed,
        value=values,
        value_learning_rate=value and value.rate(config.training.learning_rate),
        replay=config.routing_replay,
        max_gap=None if samplers.differs else bound,
        steps=config.steps,
    )
    return Built(model, teacher, samplers, learner)


def build_policy(model: PreTrainedModel, config: RunConfig, path: str) -> PlainPolicy:
    """What is trained: the model, which was loaded from `path`, or an adapter that is added to it."""
    if config.adapter is None:
        return PlainPolicy(model)
    return LoraPolicy(model, config.adapter, base=base_for(path), seed=config.seed)


def _teacher(config: RunConfig, device: str, dtype: torch.dtype) -> PreTrainedModel | None:
    if config.teacher is None:
        return None
    return load_model(resolve(config.teacher), device=device, dtype=dtype).requires_grad_(False)


def _value_backbone(form: ValueForm, device: str, dtype: torch.dtype) -> PreTrainedModel | None:
    """The value model's own weights, if it has a separate folder."""
    if not isinstance(form, OwnModel) or form.path is None:
        return None
    return load_value_model(resolve(form.path), device=device, dtype=dtype)
