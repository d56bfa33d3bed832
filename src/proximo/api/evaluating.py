"""`proximo.evaluate`: held-out accuracy of a model."""

import tomllib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from proximo.algorithms import UnusualChoice
from proximo.api.evaluation.results import ModelResult
from proximo.api.threads import open_model
from proximo.config import toml
from proximo.config.aliases import renewed
from proximo.config.trust.permission import OfRun
from proximo.environments.kinds import EnvironmentOptions, SingleTurn, played
from proximo.insight.folder import RunFolder
from proximo.models import Precision, load_tokenizer, pick_device
from proximo.models.loading import read_config, skeleton
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.safe_files import inspect
from proximo.models.shipped import resolve
from proximo.recipes.presets import PRESETS
from proximo.rewards.grading import grading
from proximo.rl import evaluate as evaluation
from proximo.rl.config import EvaluationOptions, RunConfig
from proximo.rl.mixed_reward import with_reward_models
from proximo.rl.plugin_errors import name_user_code
from proximo.rl.preflight.prompts import check_prompts
from proximo.rl.reward_config import RewardMix
from proximo.runs.files import RECORD
from proximo.runs.run_json import config_damage
from proximo.samplers.embedded import local_sampler
from proximo.samplers.sampler import SamplingOptions
from proximo.system.opening import UnsafeFile, read_file, without_links
from proximo.tasks import Arithmetic, Code, File, Mixture, Split, TaskOptions

ALL_PROBLEMS = 1_000_000
"""Number of problems that means all of a file."""
SHORT_PATH = 40
"""Characters of a path that is shown whole."""
NEEDED = ("task", "rewards", "sampling", "evaluation", "device", "dtype", "environment", "seed")
"""Fields of a run's config that say how it is evaluated."""


@dataclass(frozen=True)
class EvalConfig:
    """Settings of an evaluation. For a run's own model the defaults come from the run's config.toml."""

    task: TaskOptions = field(default_factory=Arithmetic)
    rewards: RewardMix = field(default_factory=RewardMix)
    sampling: SamplingOptions = field(default_factory=lambda: SamplingOptions(max_tokens=8))
    problems: int = 1000
    """Number of problems, taken from the start of the split; each counts once."""
    samples: int = 0
    """Completions per problem for mean@k, pass@k and maj@k, at the sampling temperature. 0: greedy accuracy only."""
    split: Split = "held_out"
    """Problems to ask: the task's held-out ones, or those it trains on."""
    device: str = "auto"
    """Torch device of the model. `auto`: a GPU if there is one, else the CPU."""
    dtype: Precision = "auto"
    """Data type of the weights. `auto`: bfloat16 on a GPU, float32 on a CPU."""
    environment: EnvironmentOptions = field(default_factory=SingleTurn)
    """Environment between a problem and its completions. `SingleTurn`: one completion per sample.
    `MultiTurn`: several turns with an environment of your own or tools."""
    seed: int = 0
    """Random seed of the evaluation."""


def evaluated(name: str, config: EvalConfig, label: str | None = None) -> tuple[ModelResult, list[str]]:
    """The result, and how graders failed; ValueError where the model cannot be evaluated so. `label` is the model's
    name in tables and files."""
    _refuse_none(config)
    with name_user_code(config):
        return _evaluated(name, config, label or name)


def _refuse_none(config: EvalConfig) -> None:
    if config.problems < 1:
        raise ValueError(f"problems is {config.problems}: give at least 1")


@dataclass(frozen=True)
class EvalRehearsal:
    """Results of what an evaluation does before it loads weights."""

    path: str
    """Folder or hub id of the model."""
    device: str
    tokenizer: PreTrainedTokenizerBase
    left_out: list[str]
    """Rows of the data that are skipped, with the reason."""
    parameters: int


def rehearse_evaluation(name: str, config: EvalConfig) -> EvalRehearsal:
    """Refuse what an evaluation of a model would refuse before it loads weights."""
    _refuse_none(config)
    with name_user_code(config):
        path = resolve(name)
        device, tokenizer = pick_device(config.device), load_tokenizer(path)
        left_out = check_prompts(config, path, tokenizer)
        if Path(path).is_dir():
            inspect(Path(path), weights=True)
        if config.task.size(config.split) == 0:
            raise ValueError(f"task has no {config.split} problems to ask: hold some out, or set split to another")
        parameters = sum(each.numel() for each in skeleton(path).parameters())
        return EvalRehearsal(path, device, tokenizer, left_out, parameters)


def _evaluated(name: str, config: EvalConfig, label: str) -> tuple[ModelResult, list[str]]:
    path = resolve(name)
    if Path(path).is_dir():  # another name is checked when it is opened
        check_prompts(config, path, load_tokenizer(path))
    model, tokenizer = open_model(name, config.device, config.dtype)
    model.requires_grad_(False)  # nothing is trained, and the sampler may take the memory that training would
    options = EvaluationOptions(problems=config.problems, samples=config.samples)
    task = played(config.task, config.environment, tokenizer)
    task = with_reward_models(task, config.rewards, tokenizer, config.dtype)
    sampler = local_sampler(model, tokenizer)
    with grading() as active:
        answers = evaluation.answers(
            task,
            sampler,
            tokenizer,
            config.sampling,
            options,
            config.seed,
            environment=config.environment,
            split=config.split,
        )
    failures = [str(failures) for failures in (*active.failures.take(), *active.failed.take())]
    return ModelResult(label, answers, config.task), failures


def on_data(config: EvalConfig, path: str) -> EvalConfig | None:
    """The config with every row of a file as its problems, where its task can read them: it keeps its columns and its
    reward. None where it cannot."""
    names = {each.name for each in fields(config.task)} if is_dataclass(config.task) else set()
    if not {"path", "held_out"} <= names:
        return None
    task = replace(config.task, path=path, held_out=1.0)  # pyright: ignore[reportArgumentType]
    try:
        task.size("held_out")
    except ValueError:
        return None
    return on_all(config, task)


def on_all(config: EvalConfig, task: TaskOptions) -> EvalConfig:
    """The config with every held-out problem of another task."""
    return replace(config, task=task, problems=ALL_PROBLEMS)


def own_evaluation(name: str, *, load_code: bool = False) -> tuple[EvalConfig, str | None]:
    """Settings with which the run evaluated itself, where the model is a run of `proximo train` or one of its
    checkpoints, with a line that says so; else the defaults."""
    match = _own_config(name, _needed, load_code)
    if match is None:
        return EvalConfig(), None
    config, file = match
    return _as_evaluated(config), _settings(str(file), config)


def shipped_evaluation(name: str) -> tuple[EvalConfig, str]:
    """Settings with which the preset of a model that ships evaluates it, with a line that says so; another model's task
    has to be named."""
    preset = next((each for each in PRESETS if isinstance(each.config, RunConfig) and each.config.model == name), None)
    if preset is None:
        read_config(resolve(name))  # one that is not there is told so
        raise ValueError(
            f"{name} brings no problems of its own, as a run of train does: give `data=FILE` or `task.type=NAME`"
        )
    assert isinstance(preset.config, RunConfig)
    return _as_evaluated(preset.config), _settings(f"the preset {preset.name}", preset.config)


def _settings(source: str, config: RunConfig) -> str:
    return f"settings from {source}: {task_name(config.task)}, {config.sampling.max_tokens} tokens at most"


def _as_evaluated(config: RunConfig) -> EvalConfig:
    """Settings with which a run of this config evaluates its model."""
    return EvalConfig(
        task=config.task,
        rewards=config.rewards,
        sampling=config.sampling,
        problems=config.evaluation.problems or EvalConfig.problems,  # 0: the run did not evaluate itself
        samples=config.evaluation.samples,
        device=config.device,
        dtype=config.dtype,
        environment=config.environment,
        seed=config.seed,
    )


def task_name(task: TaskOptions) -> str:
    """Class of the task, and the data that it reads; of a long path its last part."""
    tasks = [source.task for source in task.sources] if isinstance(task, Mixture) else [task]
    paths = [each.path for each in tasks if isinstance(each, File | Code)]
    short = [path if len(path) <= SHORT_PATH else f"…/{Path(path).name}" for path in paths]
    return f"{type(task).__name__} {', '.join(short)}".rstrip()


def own_file(name: str) -> File | None:
    """The task of a run that trains on a file, without its reward, which may be code; None for any other model."""
    match = _own_config(name, _asked)
    task = None if match is None else match[0].task
    return task if isinstance(task, File) else None


def _own_config(
    name: str, part: Callable[[dict[str, Any]], dict[str, Any]], load_code: bool = False
) -> tuple[RunConfig, Path] | None:
    """A part of a run's config, with defaults for the rest, and its file; None for any other model."""
    folder = without_links(name)
    run = folder.parents[1] if folder.match("checkpoints/*") else folder
    file = run / "config.toml"
    try:
        is_other = not name or "algorithm" not in tomllib.loads(read_file(file).decode("utf-8-sig"))
    except UnsafeFile:
        raise
    except OSError:
        return None
    except ValueError as error:
        raise ValueError(f"{file}: this is not TOML: {error}") from error
    if is_other:
        return None  # another stage's run, which has no task
    if (run / RECORD).is_file() and (damage := config_damage(run, RunFolder(run).record)):
        raise ValueError(f"{run}: {damage}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusualChoice)  # reported when the run began
        # A folder may come from anyone: only code that this part needs is loaded, where the user permits it.
        return toml.load(str(file), RunConfig, OfRun(run, load_code), part), file


def _needed(tables: dict[str, Any]) -> dict[str, Any]:
    return {name: table for name, table in renewed(tables).items() if name in NEEDED}


def _asked(tables: dict[str, Any]) -> dict[str, Any]:
    """Options that decide how a file's problems are asked."""
    task = renewed(tables).get("task")
    if not isinstance(task, dict) or task.get("type") != File.__name__:
        return {}
    return {"task": {name: value for name, value in task.items() if name != "reward"}}
