"""`proximo.evaluate`: held-out accuracy of a model."""

import tomllib
import warnings
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from proximo.algorithms import UnusualChoice
from proximo.api.evaluation.models import Candidate
from proximo.api.evaluation.results import ModelResult
from proximo.api.folders import PathLike
from proximo.api.messages import Say, keep_quiet, say
from proximo.api.rewards import Rewards, with_rewards
from proximo.api.threads import as_found, open_model
from proximo.api.validate import refuse_kind
from proximo.config import toml
from proximo.config.aliases import renewed
from proximo.config.trust.permission import OfRun
from proximo.config.unions import classes, missing_members
from proximo.data.formats import FORMATS
from proximo.data.given import KEPT, paths_of
from proximo.environments.kinds import EnvironmentOptions, SingleTurn, played
from proximo.insight.folder import RunFolder
from proximo.models import Precision, load_tokenizer, pick_device
from proximo.models.loading import read_config, skeleton
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.safe_files import inspect
from proximo.models.shipped import resolve
from proximo.recipes.presets import PRESETS
from proximo.rewards import ExactMatch
from proximo.rewards.grading import grading
from proximo.rl import evaluate as evaluation
from proximo.rl.config import EvaluationOptions, RunConfig
from proximo.rl.mixed_reward import with_reward_models
from proximo.rl.plugin_errors import name_user_code
from proximo.rl.preflight.prompts import check_prompts
from proximo.rl.reward_config import RewardMix
from proximo.runs.files import RECORD
from proximo.runs.records import Evaluation
from proximo.runs.run_json import config_damage
from proximo.samplers.embedded import local_sampler
from proximo.samplers.sampler import SamplingOptions
from proximo.system.opening import UnsafeFile, read_file, without_links
from proximo.tasks import Arithmetic, Code, File, Mixture, Split, Task, TaskOptions
from proximo.tasks.sources.mixture import with_reward
from proximo.tasks.sources.opening import open_data
from proximo.tasks.sources.recognising import Chosen

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


def evaluate(
    model: PathLike,
    task: "TaskOptions | str | None" = None,
    *,
    data: Any = None,
    problems: int | None = None,
    samples: int | None = None,
    sampling: SamplingOptions | None = None,
    rewards: "Rewards | None" = None,
    device: str | None = None,
    dtype: Precision | None = None,
    seed: int | None = None,
    quiet: bool = False,
    load_code: bool = False,
    dry_run: bool = False,
) -> Evaluation:
    """Held-out accuracy of a model, with its 95 % interval; what `proximo eval` does.

    What is not given is as the run evaluated itself, where `model` is a run's folder or one of its checkpoints, and
    else the default of `proximo eval --help`; the task has no default then, but for a model that ships.

    task      whose held-out problems are asked; or the name of one that needs no options, such as "arithmetic"
    data      every row of these is asked instead: a path, hub id, dicts, a DataFrame or a Dataset
    problems  how many of them, each once
    samples   completions per problem, for mean@k and pass@k; 0: greedy accuracy alone
    sampling  temperature and lengths, a SamplingOptions
    rewards   what is rewarded, as in `proximo.train`
    device, dtype, seed   as in RunConfig
    quiet     no lines on stderr
    load_code   load code that the run's config names, although you have not run it with this run before
    dry_run   True: load no weights; the lines of `proximo eval --dry-run` are said and returned

    Example:
        result = proximo.evaluate("runs/mine", problems=200)
        print(f"{result.accuracy:.1%} ({result.low:.1%} to {result.high:.1%})")
    """
    refuse_kind("model", model, (str, Path), "a folder, a run's folder or a hub id")
    tell = keep_quiet if quiet else say
    task, data = _one_of(task, data)
    config, source = _base(str(model), load_code, has_problems=task is not None or data is not None)
    if data is not None:
        config = _on_given(config, data, str(model), rewarded=rewards is not None or not config.rewards.task, tell=tell)
    given: dict[str, Any] = {
        "task": None if task is None else _task(task),
        "problems": problems,
        "samples": samples,
        "sampling": sampling,
        "device": device,
        "dtype": dtype,
        "seed": seed,
    }
    config = replace(config, **{name: value for name, value in given.items() if value is not None})
    if source is not None:
        tell(source)
    config = with_rewards(config, rewards)
    with as_found():
        if dry_run:
            return _dry(str(model), config, quiet)
        result, failures = evaluated(str(model), config)
    for failure in failures:
        tell(f"warning: {failure}")
    return result.evaluation


def _base(model: str, load_code: bool, *, has_problems: bool) -> tuple[EvalConfig, str | None]:
    """The config of a run's model, or where no problems are given of one that ships, and where it is from."""
    config, source = own_evaluation(model, load_code=load_code)
    return shipped_evaluation(model) if source is None and not has_problems else (config, source)


def _dry(model: str, config: EvalConfig, quiet: bool) -> Any:
    """Lines on what a model would be asked, said and returned."""
    from proximo.api.rehearsing import evaluation_plan, evaluation_text, tell_lines  # which imports configs from here

    return tell_lines(evaluation_text(*evaluation_plan([Candidate(model, model)], config)), quiet)


def _one_of(task: "TaskOptions | str | None", data: Any) -> "tuple[TaskOptions | str | None, Any]":
    """The task and the data, of which one may be given; a path in the place of a task is one of data."""
    if isinstance(task, Path) or (isinstance(task, str) and (Path(task).suffix in FORMATS or Path(task).exists())):
        task, data = (None, task) if data is None else (task, data)
    if task is not None and data is not None:
        raise ValueError("task and data are both given: give one of them")
    return task, data


def _on_given(config: EvalConfig, data: Any, model: str, *, rewarded: bool, tell: Say) -> EvalConfig:
    """The config on every row of data: read by its own task where that reads a file, else recognised."""
    paths = paths_of(data, KEPT)
    if len(paths) == 1 and Path(paths[0]).is_file() and (on_file := on_data(config, paths[0])):
        return on_file
    chosen = Chosen(held_out=1.0, has_reward=rewarded)
    opened = open_data(paths, (), chosen, chat=load_tokenizer(resolve(model)).chat_template is not None)
    for line in opened.lines:
        tell(line)
    return on_all(config, with_reward(opened.task, ExactMatch()) if rewarded else opened.task)


def _task(given: TaskOptions | str) -> TaskOptions:
    """A task as it is, or by its name."""
    wanted = f"a task, such as proximo.{Arithmetic.__name__}()"
    if not isinstance(given, str):
        if not is_dataclass(given) or missing_members(type(given), Task):
            raise TypeError(f"task is {given!r}: give {wanted}")
        return given
    known = {kind.__name__.lower(): kind for kind in classes(TaskOptions)}
    named = {
        name: kind
        for name, kind in known.items()
        if not any(field.default is MISSING and field.default_factory is MISSING for field in fields(kind))
    }
    if given.lower() in named:
        return named[given.lower()]()
    raise ValueError(f"task is {given!r}: give one of {', '.join(named)}, or {wanted}")


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
