"""Checks of a run before it loads weights; `train --dry-run` makes the same checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from proximo.algorithms import Algorithm
from proximo.environments.kinds import played
from proximo.learner.experts import balance_for, check_replay
from proximo.learner.policy import frozen_names
from proximo.losses.pieces.protocols import AdvantageTraits, GateTraits
from proximo.models import load_tokenizer, pick_device
from proximo.models.adapters.lora import import_peft
from proximo.models.adapters.quantized import check_quantization
from proximo.models.adapters.targets import target_layers
from proximo.models.loading import has_score, read_config, skeleton
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.reward_models import check_scores
from proximo.models.safe_files import inspect
from proximo.models.shipped import resolve
from proximo.models.values import OwnModel, check_form
from proximo.rewards.grading import grading
from proximo.rewards.metrics import StepMeasures
from proximo.rewards.protocol import Checks
from proximo.rl.config import EvaluationOptions, RunConfig
from proximo.rl.mixed_reward import with_reward_models
from proximo.rl.preflight.calibration import Calibration, calibration
from proximo.rl.preflight.prompts import check_prompts
from proximo.rl.reward_config import rewards_of
from proximo.rl.step_numbers import StepNumbers
from proximo.runs.metric_docs import is_taken
from proximo.samplers.sampler import CheckedFactory
from proximo.supervised.kept_checkpoints import is_untrained
from proximo.tasks.sources.mixture import data_remarks

SHOWN = 3
"""Skipped rows that are named to a person; the run folder has all of them."""


@dataclass(frozen=True)
class Preflight:
    """Results of the checks."""

    path: str
    """Folder or hub id of the policy."""
    device: str
    tokenizer: PreTrainedTokenizerBase
    left_out: list[str]
    """Rows of the data that are skipped, with the reason."""
    remarks: list[str]
    """Remarks on what the run will wait for."""
    numbers: StepNumbers
    """Config of each step, as its schedules make it."""


def preflight(config: RunConfig) -> Preflight:
    """Refuse a config whose device, data or models cannot be used; no weights are read."""
    device = pick_device(config.device)
    numbers = StepNumbers(config)
    numbers.check()
    _check_statistics(config.algorithm)
    _check_metric(config.evaluation)
    if config.task.size("train") == 0:
        raise ValueError("task.held_out leaves no problem to train on: hold out less")
    config.task.problem(0, "train", config.seed)
    if config.evaluation.problems and config.task.size("held_out") == 0:
        raise ValueError(
            "task.held_out leaves no problem to evaluate on, which a run does before and after training: keep some, or "
            "set evaluation.problems to 0"
        )
    for reward in rewards_of(config.task, config.rewards):
        if isinstance(reward, Checks):
            reward.check()
    if config.stop_on is not None and not (config.evaluation.every and config.checkpoints.keep_best):
        raise ValueError(
            f"stop_on is {config.stop_on!r}, which ends a run with its best checkpoint, but evaluation.every is "
            f"{config.evaluation.every} and checkpoints.keep_best {str(config.checkpoints.keep_best).lower()}: give "
            "the steps between evaluations, and keep the best"
        )
    path = resolve(config.model)
    tokenizer = load_tokenizer(path)
    _check_models(config, path, tokenizer)
    if config.adapter is not None:
        check_quantization(config.adapter.quantize_base, device)
    _check_ray(config)
    remarks = config.sampler.check() if isinstance(config.sampler, CheckedFactory) else []
    return Preflight(path, device, tokenizer, check_prompts(config, path, tokenizer), remarks, numbers)


@dataclass(frozen=True)
class Rehearsal:
    """Results of what a run does before it loads weights."""

    checked: Preflight
    calibration: Calibration
    remarks: list[str]
    """Rows that the run would skip, what it would wait for, and remarks on the grader."""


def rehearse(config: RunConfig) -> Rehearsal:
    """Do everything a run does before it loads weights, including the grader's calibration."""
    checked = preflight(config)
    remarks = [*checked.remarks, *config.penalty_remarks, *judge_remarks(config)]
    rows = [*data_remarks(config.task), *skipped_line(checked.left_out), *remarks]
    with grading() as active:
        StepMeasures(config.metrics or (), active).check()
        if config.rewards.models:
            # The models' weights would be loaded before the grader is calibrated.
            return Rehearsal(checked, Calibration([]), rows)
        task = played(config.task, config.environment, checked.tokenizer)
        graded = calibration(with_reward_models(task, config.rewards, checked.tokenizer, config.dtype), config.seed)
        return Rehearsal(checked, graded, [*rows, *active.called(), *graded.remarks])


def judge_remarks(config: RunConfig) -> list[str]:
    """Remarks on reward models that training has never improved."""
    return [
        f"rewards.models has {each.path!r}, which is the model that its training began with, as no step made it "
        "better: a score head that was new is untrained, and its scores are arbitrary; train the reward model again, "
        "with another fit.learning_rate or more rankings"
        for each in config.rewards.models
        if is_untrained(each.path)
    ]


def skipped_line(left_out: Sequence[str]) -> list[str]:
    """The number of skipped rows, and the first of them; nothing where there are none."""
    more = [f"and {len(left_out) - SHOWN} more"] if len(left_out) > SHOWN else []
    return [f"bad rows left out: {len(left_out)}; {'; '.join([*left_out[:SHOWN], *more])}"] * bool(left_out)


def _check_ray(config: RunConfig) -> None:
    """Refuse what needs Ray where it is not installed."""
    wanted = ["ranks"] * (config.ranks is not None and config.ranks.cluster == "ray")
    wanted += ["workers"] * (config.workers is not None)
    if wanted:
        from proximo.processes.cluster import need_ray

        need_ray(wanted[0])


def _check_statistics(algorithm: Algorithm) -> None:
    """Refuse a gate that logs under a name of the run's own; its names are found by asking it about one token."""
    statistics, one = GateTraits.read(algorithm.gate).statistics, torch.zeros(1, 1)
    names = [] if statistics is None else statistics(one, one, torch.ones(1, 1, dtype=torch.bool))
    for name in names:
        if is_taken(name):
            gate = type(algorithm.gate).__name__
            raise ValueError(f"gate {gate}.statistics names {name!r}, which every run logs itself: use another name")


def _check_metric(options: EvaluationOptions) -> None:
    """Refuse a metric that no evaluation has. Parts of the reward and sources are known after the first one."""
    names = ["accuracy", "outcome", "reward", *(["mean_at_k", "pass_at_k"] if options.samples else [])]
    if options.metric not in names and "/" not in options.metric:
        more = "" if options.samples else ", or mean_at_k and pass_at_k with evaluation.samples"
        raise ValueError(
            f"evaluation.metric is {options.metric!r}: give one of {', '.join(names)}{more}, or a part of the reward "
            "such as parts/format"
        )


def _check_models(config: RunConfig, path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    if has_score(read_config(path)):
        raise ValueError(f"path {path!r} is a reward model, which cannot generate text: give a causal language model")
    _check_weights(path)
    form, adapter, frozen = config.value_options and config.value_options.form, config.adapter, config.training.freeze
    if config.routing_replay is not None or form is not None or config.algorithm.extras or adapter or frozen:
        policy = skeleton(path)
        frozen_names(policy, frozen)
        if adapter is not None:
            import_peft()
            target_layers(policy, adapter.targets)
        check_replay(policy, config.routing_replay)
        balance_for(config.algorithm, policy)
        if form is not None:
            check_form(form, policy)
    if isinstance(form, OwnModel) and form.path is not None:
        _check_reads_tokens("value.form.path", form.path, tokenizer)
    _check_teacher(config, path, tokenizer)
    for judge in config.rewards.models:
        pick_device(judge.device)
        folder = resolve(judge.path)
        load_tokenizer(folder)
        check_scores(folder)
        _check_weights(folder)


def _check_teacher(config: RunConfig, path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a teacher that nothing reads, that is missing, or that cannot score the policy's tokens."""
    advantage = config.algorithm.advantage
    is_needed = "teacher_logprobs" in AdvantageTraits.read(advantage).all_needs
    if is_needed and config.teacher is None:
        raise ValueError(f"teacher is None, but algorithm.advantage {type(advantage).__name__} reads one: give a model")
    if config.teacher is None:
        return
    if not is_needed:
        raise ValueError(
            f"teacher is {config.teacher!r}, but algorithm.advantage {type(advantage).__name__} reads none: leave it "
            "out, or use the algorithm distill"
        )
    _check_reads_tokens("teacher", config.teacher, tokenizer)
    known, sampled = (read_config(model).get_text_config().vocab_size for model in (resolve(config.teacher), path))
    if known < sampled:
        raise ValueError(
            f"teacher is {config.teacher!r}: it has {known} embeddings, the model {sampled}; give a teacher with at "
            "least as many, since the model can sample each of its tokens"
        )


def _check_reads_tokens(field: str, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model, named by this field, that does not read the policy's tokens."""
    path = resolve(name)
    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"{field} is {name!r}: its vocabulary is not the policy's, whose tokens it would have to "
            "read; use a model of the same family"
        )
    _check_weights(path)


def _check_weights(path: str) -> None:
    """Check the headers of local weight files; a model on the hub is checked when the run loads it."""
    if Path(path).is_dir():
        inspect(Path(path), weights=True)
