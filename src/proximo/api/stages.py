"""`proximo.sft`, `proximo.dpo` and `proximo.reward_model`: stages that learn from files, each into a run folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Unpack

from proximo.api.endings import stage_ending
from proximo.api.folders import PathLike, attempted, folder_for, suit_session
from proximo.api.messages import Say, keep_quiet, say
from proximo.api.rehearsing import dry_stage, tell_lines
from proximo.api.stage_settings import DpoSettings, StageSettings, with_stage_settings
from proximo.api.threads import as_found, on_ranks
from proximo.api.validate import refuse_kind, refuse_values
from proximo.config import toml
from proximo.data import DataFile
from proximo.data.given import KEPT, paths_of
from proximo.runs.notifying import notified
from proximo.runs.session import RunSession
from proximo.runs.tracking.processes import tracked
from proximo.runs.tracking.trackers import check_names
from proximo.runs.webhook import Webhook, webhook_at
from proximo.supervised import dpo as dpo_stage
from proximo.supervised import reward_model as reward_model_stage
from proximo.supervised import sft as sft_stage
from proximo.supervised.dpo import DpoConfig
from proximo.supervised.fitting import Fitted
from proximo.supervised.overview import Overview
from proximo.supervised.reward_model import RewardModelConfig
from proximo.supervised.sft import SftConfig
from proximo.supervised.snapshots import POINTS
from proximo.supervised.stage_model import HoldsStages
from proximo.system.slow_work import slow_work_told

Config = TypeVar("Config", DpoConfig, RewardModelConfig, SftConfig)
Given = ParamSpec("Given")
StageFunction = Callable[[Config, Path, Say, RunSession, HoldsStages | None], Fitted]
"""Runs a stage into a folder that is taken."""


def _data_first(stage: Callable[Given, Fitted]) -> Callable[Given, Fitted]:
    """The function of a stage, which says what comes first where a model does."""

    @wraps(stage)
    def called(*given: Given.args, **named: Given.kwargs) -> Fitted:
        if given and "data" in named:
            name = stage.__name__
            raise TypeError(
                f"{name} takes the data first, and data= is given, too: proximo.{name}(data=..., model={given[0]!r})"
            )
        return stage(*given, **named)

    return called


@_data_first
def sft(
    data: Any,
    run: PathLike | None = None,
    *,
    model: PathLike | None = None,
    evaluation_data: Any = None,
    resume: bool = True,
    allow_change: Sequence[str] = (),
    accept_lost_rows: bool = False,
    track: str | Sequence[str] = (),
    notify: str | None = None,
    quiet: bool = False,
    dry_run: bool = False,
    settings: Mapping[str, Any] | None = None,
    **words: Unpack[StageSettings],
) -> Fitted:
    """Fine-tune on a file's completions, or on a task's reference answers; what `proximo sft` does.

    data             a path, a list of dicts, a dict of columns, a DataFrame or a Dataset; or a whole SftConfig
    run              the run folder; None: runs/sft-DATE
    model            where to start, unless a whole config is given: a folder, a run's folder or a hub id
    evaluation_data  likewise as data; without it a tenth of the prompts is held out
    words            learning_rate (lr), epochs or steps, batch, max_tokens, lora, warmup_steps, weight_decay,
                     token_budget, seed, dtype: as flags in `proximo sft --help`
    settings         any other field by its name: {"fit.patience": 3}
    The other arguments are those of `proximo.train`.

    Example:
        fitted = proximo.sft("chats.jsonl", "runs/sft", model="runs/base", lr=1e-5, epochs=2, lora=16)
        print(fitted.before["loss"], fitted.best["loss"], fitted.checkpoint)
    """
    config = _config("sft", data, SftConfig(), model, evaluation_data, words, settings)
    if dry_run:
        return _dry(config, sft_stage.sft_overview, track, quiet)
    path = folder_for(run, "sft")
    return _fitted(
        "sft", config, path, sft_stage.sft, resume, allow_change, accept_lost_rows, track, webhook_at(notify), quiet
    )


@_data_first
def dpo(
    data: Any,
    run: PathLike | None = None,
    *,
    model: PathLike | None = None,
    evaluation_data: Any = None,
    resume: bool = True,
    allow_change: Sequence[str] = (),
    accept_lost_rows: bool = False,
    track: str | Sequence[str] = (),
    notify: str | None = None,
    quiet: bool = False,
    dry_run: bool = False,
    settings: Mapping[str, Any] | None = None,
    **words: Unpack[DpoSettings],
) -> Fitted:
    """Learn from ranked completions directly, without a reward model; what `proximo dpo` does.

    `data`, and `evaluation_data` to hold out, are chosen and rejected completions: a path or rows; or a whole
    DpoConfig. `model` is where to start, and the words are those of `proximo.sft`, with `beta`, the strength of the
    implicit KL to the reference. The other arguments are those of `proximo.train`.

    Example:
        fitted = proximo.dpo("pairs.jsonl", "runs/dpo", model="runs/sft", lr=1e-6, beta=0.1)
    """
    config = _config("dpo", data, DpoConfig(DataFile("")), model, evaluation_data, words, settings)
    if dry_run:
        return _dry(config, dpo_stage.dpo_overview, track, quiet)
    path = folder_for(run, "dpo")
    return _fitted(
        "dpo", config, path, dpo_stage.dpo, resume, allow_change, accept_lost_rows, track, webhook_at(notify), quiet
    )


@_data_first
def reward_model(
    data: Any,
    run: PathLike | None = None,
    *,
    model: PathLike | None = None,
    evaluation_data: Any = None,
    resume: bool = True,
    allow_change: Sequence[str] = (),
    accept_lost_rows: bool = False,
    track: str | Sequence[str] = (),
    notify: str | None = None,
    quiet: bool = False,
    dry_run: bool = False,
    settings: Mapping[str, Any] | None = None,
    **words: Unpack[StageSettings],
) -> Fitted:
    """Train a model that scores completions, from ranked ones; what `proximo reward-model` does.

    `data`, and `evaluation_data` to hold out, are chosen and rejected completions: a path or rows; or a whole
    RewardModelConfig. `model` is where to start, and the words are those of `proximo.sft`.
    The other arguments are those of `proximo.train`.

    Example:
        judge = proximo.reward_model("pairs.jsonl", "runs/judge", model="runs/sft")
        mix = proximo.RewardMix(task=0.0, models=(proximo.RewardModel("runs/judge"),))
    """
    default = RewardModelConfig(DataFile(""))
    config = _config("reward-model", data, default, model, evaluation_data, words, settings)
    if dry_run:
        return _dry(config, reward_model_stage.reward_model_overview, track, quiet)
    path, stage = folder_for(run, "reward-model"), reward_model_stage.train_reward_model
    return _fitted(
        "reward-model", config, path, stage, resume, allow_change, accept_lost_rows, track, webhook_at(notify), quiet
    )


def _dry(config: Config, check: Callable[[Config], Overview], track: str | Sequence[str], quiet: bool) -> Any:
    """Lines on what a stage would do, said and returned."""
    refuse_values(config)
    check_names([track] if isinstance(track, str) else track)
    with as_found():
        return tell_lines(dry_stage(config, check), quiet)


def _config(
    kind: str,
    data: Any,
    default: Config,
    model: PathLike | None,
    evaluation_data: Any,
    words: StageSettings,
    settings: Mapping[str, Any] | None,
) -> Config:
    """A config with the settings that are given: a whole one, or the default on these data."""
    if not isinstance(data, type(default)):
        return with_stage_settings(kind, _on_data(data, default, model, evaluation_data), words, settings)
    if model is not None:
        raise ValueError(f"model is {model!r}, and a whole config is given, which has its own: set config.model")
    if evaluation_data is not None:
        raise ValueError("evaluation_data is given, and a whole config, which has its own: set config.data.held_out")
    return with_stage_settings(kind, data, words, settings)


def _on_data(data: Any, default: Config, model: PathLike | None, evaluation_data: Any) -> Config:
    """The default config on data: a file, or rows, which are kept as one."""
    if isinstance(data, DpoConfig | RewardModelConfig | SftConfig):
        raise TypeError(f"data is a {type(data).__name__}: give data, or a {type(default).__name__}")
    if model is None:
        raise ValueError(f"model is not given: name the model to start from, or give a whole {type(default).__name__}")
    refuse_kind("model", model, (str, Path), "a folder, a run's folder or a hub id")
    file = DataFile(_file("data", data))
    if evaluation_data is not None:
        file = replace(file, held_out=_file("evaluation_data", evaluation_data))
    return replace(default, data=file, model=str(model))


def _file(name: str, given: Any) -> str:
    """Path of the data, or of the file that rows are kept in."""
    paths = paths_of(given, KEPT)
    if len(paths) != 1:
        raise ValueError(f"{name} has {len(paths)} paths: give one file, or the rows of all of them")
    return paths[0]


def _fitted(
    kind: str,
    config: Config,
    path: Path,
    stage: StageFunction[Config],
    resume: bool,
    allow_change: Sequence[str],
    accept_lost: bool,
    track: str | Sequence[str],
    webhook: Webhook | None,
    quiet: bool,
) -> Fitted:
    refuse_values(config)
    track = [track] if isinstance(track, str) else track
    check_names(track)
    tell = keep_quiet if quiet else say
    text = toml.dumps(config)
    with (
        slow_work_told(tell),
        as_found(),
        attempted(
            path, text, resume=resume, allow_change=allow_change, accept_lost=accept_lost, points=POINTS
        ) as session,
    ):
        if session.result is None:
            suit_session(session, config.model, config.device, tell)
        begins = session.result is None
        with tracked(path, track if begins else (), tell), notified(session, webhook if begins else None, tell):
            fitted = fitted_in(config, path, stage, session, tell)
    for line in () if quiet else stage_ending(kind, path, config, fitted):
        say(line)
    return fitted


def fitted_in(config: Config, path: Path, stage: StageFunction[Config], session: RunSession, say: Say) -> Fitted:
    """Run a stage whose folder is taken, on the processes that its config names; of a finished one its result."""
    if session.result is not None:
        return stage(config, path, say, session, None)
    with on_ranks(config) as ranks:
        return stage(config, path, say, session, ranks)
