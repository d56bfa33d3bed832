"""`proximo.sft`, `proximo.dpo` and `proximo.reward_model`: stages that learn from files, each into a run folder."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from proximo.api.folders import PathLike, attempted, folder_for, suit_session
from proximo.api.messages import Say, keep_quiet, say
from proximo.api.threads import as_found, on_ranks
from proximo.api.validate import refuse_kind, refuse_values
from proximo.config import toml
from proximo.data import DataFile
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
from proximo.supervised.reward_model import RewardModelConfig
from proximo.supervised.sft import SftConfig
from proximo.supervised.snapshots import POINTS
from proximo.supervised.stage_model import HoldsStages

Config = TypeVar("Config", DpoConfig, RewardModelConfig, SftConfig)
StageFunction = Callable[[Config, Path, Say, RunSession, HoldsStages | None], Fitted]
"""Runs a stage into a folder that is taken."""


def sft(
    data: SftConfig | PathLike,
    run: PathLike | None = None,
    *,
    model: str | None = None,
    resume: bool = True,
    allow_change: Sequence[str] = (),
    accept_lost_rows: bool = False,
    track: Sequence[str] = (),
    notify: str | None = None,
    quiet: bool = False,
) -> Fitted:
    """Fine-tune on a file's completions, or on a task's reference answers; what `proximo sft` does.

    `data` is a data file, or a whole SftConfig. `model` is where to start, for a file: a folder, a run's
    folder or a hub id. The other arguments are those of `proximo.train`.

    Example:
        fitted = proximo.sft("chats.jsonl", "runs/sft", model="runs/base")
        print(fitted.before["loss"], fitted.best["loss"], fitted.checkpoint)
    """
    config = _config(data, SftConfig(), model)
    path = folder_for(run, "sft")
    return _fitted(
        config, path, sft_stage.sft, resume, allow_change, accept_lost_rows, track, webhook_at(notify), quiet
    )


def dpo(
    data: DpoConfig | PathLike,
    run: PathLike | None = None,
    *,
    model: str | None = None,
    resume: bool = True,
    allow_change: Sequence[str] = (),
    accept_lost_rows: bool = False,
    track: Sequence[str] = (),
    notify: str | None = None,
    quiet: bool = False,
) -> Fitted:
    """Learn from ranked completions directly, without a reward model; what `proximo dpo` does.

    `data` is a data file of chosen and rejected completions, or a whole DpoConfig. `model` is where to
    start, for a file. The other arguments are those of `proximo.train`.

    Example:
        fitted = proximo.dpo("pairs.jsonl", "runs/dpo", model="runs/sft")
    """
    config = _config(data, DpoConfig(DataFile("")), model)
    path = folder_for(run, "dpo")
    return _fitted(
        config, path, dpo_stage.dpo, resume, allow_change, accept_lost_rows, track, webhook_at(notify), quiet
    )


def reward_model(
    data: RewardModelConfig | PathLike,
    run: PathLike | None = None,
    *,
    model: str | None = None,
    resume: bool = True,
    allow_change: Sequence[str] = (),
    accept_lost_rows: bool = False,
    track: Sequence[str] = (),
    notify: str | None = None,
    quiet: bool = False,
) -> Fitted:
    """Train a model that scores completions, from ranked ones; what `proximo reward-model` does.

    `data` is a data file of chosen and rejected completions, or a whole RewardModelConfig. `model` is
    where to start, for a file. The other arguments are those of `proximo.train`.

    Example:
        judge = proximo.reward_model("pairs.jsonl", "runs/judge", model="runs/sft")
        mix = proximo.RewardMix(task=0.0, models=(proximo.RewardModel("runs/judge"),))
    """
    config = _config(data, RewardModelConfig(DataFile("")), model)
    path, stage = folder_for(run, "reward-model"), reward_model_stage.train_reward_model
    return _fitted(config, path, stage, resume, allow_change, accept_lost_rows, track, webhook_at(notify), quiet)


def _config(data: Config | PathLike, default: Config, model: str | None) -> Config:
    """A config as it is; a file takes the place of the default's data."""
    refuse_kind("data", data, (str, Path, type(default)), f"a data file, or a {type(default).__name__}")
    if not isinstance(data, str | Path):
        if model is not None:
            raise ValueError(f"model is {model!r}, and a whole config is given, which has its own: set config.model")
        return data
    if model is None:
        raise ValueError(f"model is not given: name the model to start from, or give a whole {type(default).__name__}")
    return replace(default, data=DataFile(str(data)), model=model)


def _fitted(
    config: Config,
    path: Path,
    stage: StageFunction[Config],
    resume: bool,
    allow_change: Sequence[str],
    accept_lost: bool,
    track: Sequence[str],
    webhook: Webhook | None,
    quiet: bool,
) -> Fitted:
    refuse_values(config)
    check_names(track)
    tell = keep_quiet if quiet else say
    text = toml.dumps(config)
    with (
        as_found(),
        attempted(
            path, text, resume=resume, allow_change=allow_change, accept_lost=accept_lost, points=POINTS
        ) as session,
    ):
        if session.result is None:
            suit_session(session, config.model, config.device, tell)
        begins = session.result is None
        with tracked(path, track if begins else (), tell), notified(session, webhook if begins else None, tell):
            return fitted_in(config, path, stage, session, tell)


def fitted_in(config: Config, path: Path, stage: StageFunction[Config], session: RunSession, say: Say) -> Fitted:
    """Run a stage whose folder is taken, on the processes that its config names; of a finished one its result."""
    if session.result is not None:
        return stage(config, path, say, session, None)
    with on_ranks(config) as ranks:
        return stage(config, path, say, session, ranks)
