"""Evaluating a model from Python, as `proximo eval` does."""

from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from proximo.api.evaluating import EvalConfig, evaluated, on_all, on_data, own_evaluation, shipped_evaluation
from proximo.api.evaluation.models import Candidate
from proximo.api.folders import PathLike
from proximo.api.messages import Say, keep_quiet, say
from proximo.api.rehearsing import evaluation_plan, evaluation_text, tell_lines
from proximo.api.rewards import Rewards, with_rewards
from proximo.api.threads import as_found
from proximo.api.validate import refuse_kind
from proximo.config.unions import classes, missing_members
from proximo.data.formats import FORMATS
from proximo.data.given import KEPT, paths_of
from proximo.models import Precision, load_tokenizer
from proximo.models.shipped import resolve
from proximo.rewards import ExactMatch
from proximo.runs.records import Evaluation
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks import Arithmetic, Task, TaskOptions
from proximo.tasks.sources.mixture import with_reward
from proximo.tasks.sources.opening import open_data
from proximo.tasks.sources.recognising import Chosen


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

    task      whose held-out problems are asked; or the name of one without options, such as "arithmetic"
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
    config, source = _asked(str(model), *_one_of(task, data), rewards, load_code, tell)
    given = {"problems": problems, "samples": samples, "sampling": sampling, "device": device, "dtype": dtype}
    known: dict[str, Any] = {name: value for name, value in (given | {"seed": seed}).items() if value is not None}
    config = replace(config, **known)
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


def _asked(
    model: str, task: "TaskOptions | str | None", data: Any, rewards: "Rewards | None", load_code: bool, tell: Say
) -> tuple[EvalConfig, str | None]:
    """The config on the problems that are given, and where it is from."""
    config, source = _base(model, load_code, has_problems=task is not None or data is not None)
    if data is not None:
        config = _on_given(config, data, model, rewarded=rewards is not None or not config.rewards.task, tell=tell)
    return config if task is None else replace(config, task=_task(task)), source


def _base(model: str, load_code: bool, *, has_problems: bool) -> tuple[EvalConfig, str | None]:
    """The config of a run's model, or where no problems are given of one that ships, and where it is from."""
    config, source = own_evaluation(model, load_code=load_code)
    return shipped_evaluation(model) if source is None and not has_problems else (config, source)


def _dry(model: str, config: EvalConfig, quiet: bool) -> Any:
    """Lines on what a model would be asked, said and returned."""
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
