"""The banner of a run of `train` and of an evaluation: what it will do, before it does it and with `--dry-run`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proximo.algorithms import explain
from proximo.api.evaluating import EvalConfig, EvalRehearsal, task_name
from proximo.api.evaluation.models import Candidate
from proximo.api.planning import Fit, fit_here
from proximo.api.threads import machine_words
from proximo.config.vocabulary import words_of
from proximo.environments.kinds import Acting, EnvironmentOptions
from proximo.models import pick_device, pick_dtype
from proximo.models.adapters.starting import base_dtype, merging
from proximo.models.context_length import reach_of
from proximo.models.loading import read_config
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.recipes.defaults import Default
from proximo.rl.config import RunConfig
from proximo.rl.preflight.calibration import Calibration, Probe
from proximo.rl.preflight.estimate import MemoryEstimate, batch_lines, memory
from proximo.rl.preflight.preflight import Preflight
from proximo.rl.preflight.prompts import PromptLengths, RenderedPrompt, prompt_lengths, rendered_prompt
from proximo.rl.progress import prompt_text
from proximo.rl.step_numbers import PREFIX, StepNumbers
from proximo.runs.banner import BannerLine, banner, folder_lines
from proximo.runs.files import BASE
from proximo.runs.pace import duration
from proximo.system.amounts import in_units
from proximo.system.safe_text import counted, quoted
from proximo.tasks import TaskOptions
from proximo.tasks.sources.mixture import storage_words

SHOWN_HEAD, SHOWN_TAIL = 600, 200
"""Characters of a prompt's beginning and end that are shown."""


@dataclass(frozen=True)
class Opening:
    """Facts of a run beside its config that its banner shows."""

    folder: str | Path
    chosen: Sequence[Default] = ()
    how: str = "a flag changes each"
    """Way to change what was chosen."""


@dataclass(frozen=True)
class Planned:
    """Memory and time of a run, predicted before its models are loaded."""

    held: MemoryEstimate
    fit: Fit
    lengths: PromptLengths


def planned(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Planned:
    """Predict memory and time; ValueError where a model cannot be read."""
    lengths, held = prompt_lengths(config, tokenizer), memory(config)
    return Planned(held, fit_here(config, held), lengths)


def run_banner(
    config: RunConfig,
    checked: Preflight,
    plan: Planned,
    calibration: Calibration,
    opening: Opening,
    width: int | None = None,
) -> list[str]:
    """Lines for a person about a run that is about to begin."""
    return banner(run_lines(config, checked, plan, calibration, opening), width)


def run_lines(
    config: RunConfig, checked: Preflight, plan: Planned, calibration: Calibration, opening: Opening
) -> list[BannerLine]:
    """Labels and texts of the banner."""
    reasons = {each.field: each.reason for each in opening.chosen}
    return [
        ("model", f"{config.model}: {plan.held.lines[0]}; {_precision(config)}"),
        ("starts from", _start(config, checked, f"{opening.folder}/{BASE}")),
        ("algorithm", explain.in_words(config.algorithm)),
        ("schedules", _schedules(checked.numbers, config.steps)),
        ("data", data_words(config.task, checked.left_out)),
        ("environment", _environment(config.environment)),
        *prompt_lines(rendered_prompt(config, checked.tokenizer), plan.lengths, checked.path),
        ("reward", _reward(calibration)),
        *batch_lines(config, reasons),
        ("evaluation", _evaluation(config)),
        ("learning rate", _learning_rate(config, reasons.get("training.learning_rate"))),
        ("memory, time", _cost(config, plan)),
        *folder_lines(opening.folder),
        ("chosen", _chosen(opening)),
    ]


def _start(config: RunConfig, checked: Preflight, folder: str) -> str:
    """Fate of an adapter that the run starts from."""
    dtype = base_dtype(config.dtype, checked.device, sharded=config.ranks is not None)
    return merging(checked.path, config.adapter, folder, dtype)


def evaluation_lines(
    models: Sequence[Candidate], rehearsals: Sequence[EvalRehearsal], config: EvalConfig
) -> list[BannerLine]:
    """Labels and texts of what an evaluation asks of which models."""
    first = rehearsals[0]
    asked = counted(min(config.problems, config.task.size(config.split) or config.problems), "problem")
    split = "held-out" if config.split == "held_out" else "training"
    return [
        *(("model", _model(model, each, config)) for model, each in zip(models, rehearsals, strict=True)),
        ("data", data_words(config.task, first.left_out)),
        ("environment", _environment(config.environment)),
        *prompt_lines(
            rendered_prompt(config, first.tokenizer, config.split),
            prompt_lengths(config, first.tokenizer, config.split),
            first.path,
        ),
        ("asked", f"{asked} from the {split} ones: {_sampling(config)}"),
    ]


def _model(model: Candidate, rehearsal: EvalRehearsal, config: EvalConfig) -> str:
    return f"{model.label}: {in_units(rehearsal.parameters)} parameters; {_precision(config)}"


def _sampling(config: EvalConfig) -> str:
    """The number of answers to each problem, and how they are drawn."""
    sampling, k = config.sampling, config.samples
    limit = f"completions of at most {sampling.max_tokens:,} tokens"
    stop = f", ended by {', '.join(quoted(each, 40) for each in sampling.stop)}" if sampling.stop else ""
    cut = [f"{name} {value:g}" for name, value in (("top_p", sampling.top_p), ("min_p", sampling.min_p)) if value % 1]
    drawn = ", ".join(
        [f"temperature {sampling.temperature:g}", *cut, *([f"top_k {sampling.top_k}"] * bool(sampling.top_k))]
    )
    more = f" for accuracy, and {k} times at {drawn} for mean@{k} and pass@{k}" if k else ""
    return f"once greedily{more}, {limit}{stop}"


def _schedules(numbers: StepNumbers, steps: int) -> str:
    """First and last value of each number that follows a schedule."""
    first, last = numbers.logged(0), numbers.logged(steps - 1)
    return "; ".join(
        f"{name.removeprefix(PREFIX)} {first[name]:g} at step 1, {last[name]:g} at {steps}" for name in first
    )


def _environment(environment: EnvironmentOptions) -> str:
    """An environment of several turns, without fields that are as they always are."""
    if not isinstance(environment, Acting):
        return ""
    return ", ".join([type(environment).__name__, *explain.changed_fields(environment)])


def data_words(task: TaskOptions, left_out: Sequence[str] = ()) -> str:
    """The task, its problems to train on and those held out, and how many rows are left out."""
    train, held = task.size("train"), task.size("held_out")
    trained = "problems without end to train on" if train is None else f"{train:,} to train on"
    tested = "held-out ones without end" if held is None else f"{held:,} held out"
    skipped = f", {counted(len(left_out), 'bad row')} left out" if left_out else ""
    words = storage_words(task)
    return f"{task_name(task)}: {trained}, {tested}{skipped}{f'; {words}' if words else ''}"


def prompt_lines(prompt: RenderedPrompt, lengths: PromptLengths, path: str) -> list[BannerLine]:
    """The first prompt as the model reads it, and how long prompts are beside what the model can read."""
    reach = reach_of(read_config(path))
    room = "" if reach is None else f"; the context has {reach.tokens:,}"
    return [("prompt", f"{prompt.tokens:,} tokens, {shortened(prompt.text)}"), ("lengths", f"{_spread(lengths)}{room}")]


def shortened(text: str) -> str:
    """A text in one line with its line breaks visible: its beginning and its end, if it is long."""
    if len(text) <= SHOWN_HEAD + SHOWN_TAIL:
        return quoted(text, len(text))
    left = len(text) - SHOWN_HEAD - SHOWN_TAIL
    return f"{quoted(text[:SHOWN_HEAD], SHOWN_HEAD)} … {left:,} more characters … {quoted(text[-SHOWN_TAIL:])}"


def _spread(lengths: PromptLengths) -> str:
    if not lengths.tokens:
        return ""
    low, median, high, top = (lengths.quantile(share) for share in (0.0, 0.5, 0.95, 1.0))
    number = f"{len(lengths.tokens):,}"
    some = "" if lengths.is_whole else f", of {number} looked at"
    return f"{low:,} / {median:,} / {high:,} / {top:,} tokens in prompts (min / median / 95 % / max{some})"


def details(config: RunConfig, plan: Planned) -> list[str]:
    """Lines of a dry run beside the banner: what takes the memory, and what computes."""
    return [f"memory: {plan.held.lines[1]}", f"machine: {machine_words(config.model, config.device)}"]


def _precision(config: RunConfig | EvalConfig) -> str:
    device = pick_device(config.device)
    return f"{str(pick_dtype(config.dtype, device)).removeprefix('torch.')} on {device}"


def _reward(calibration: Calibration) -> str:
    """Rewards of the texts that were graded before the run."""
    if not calibration.graded:
        return ""
    problem = calibration.graded[0].problem
    return f"{', '.join(map(_graded, calibration.graded))}; asked {quoted(prompt_text(problem), 60)}"


def _graded(probe: Probe) -> str:
    score = "no score" if probe.is_unscored else f"{probe.grade.reward:g}"
    return f"{score} for {'the reference answer ' * probe.is_reference}{quoted(probe.text, 60)}"


def _evaluation(config: RunConfig) -> str:
    options = config.evaluation
    if not options.problems:
        return "none: evaluation.problems is 0"
    between = f", every {counted(options.every, 'step')}" if options.every else ""
    samples = f", {options.samples} samples of each" if options.samples else ""
    kept = f"; the checkpoint with the best {options.metric} is kept" * (config.checkpoints.keep_best and bool(between))
    return f"{counted(options.problems, 'held-out problem')}{samples}, before{between} and after{kept}"


def _learning_rate(config: RunConfig, reason: str | None) -> str:
    training = config.training
    warmup = f" after {counted(training.warmup_steps, 'step')} of warm-up" if training.warmup_steps else ""
    return (
        f"{_number(training.learning_rate)}, {training.learning_rate_schedule}{warmup}{f': {reason}' if reason else ''}"
    )


def _cost(config: RunConfig, plan: Planned) -> str:
    seconds = plan.fit.seconds
    whole = "" if seconds is None else f", {counted(config.steps, 'step')} {duration(seconds * config.steps)}"
    first, *more = plan.fit.lines
    return "; ".join([f"{first}{whole}", *more])


def _chosen(opening: Opening) -> str:
    """Names of the chosen fields, by their words where there are some, and the way to change them."""
    if not opening.chosen:
        return ""
    words = {field: word.name for word, field in words_of("train")}
    of_value = {each.field: f" ({each.reason})" for each in opening.chosen if each.field.startswith("value.")}
    names = ", ".join(
        words.get(field, field) + of_value.get(field, "") for field in (each.field for each in opening.chosen)
    )
    return f"for this model and data, {opening.how}: {names}"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)
