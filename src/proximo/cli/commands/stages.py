"""`proximo sft`, `reward-model` and `dpo`: stages that train on files, each into a run folder."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from proximo.api.endings import stage_ending
from proximo.api.folders import folder_for, suit_session
from proximo.api.stages import StageFunction, fitted_in
from proximo.cli.arguments import asks_for_help, flag_names, refuse, refusing, say, take, take_switch
from proximo.cli.commands.watch import panel
from proximo.cli.flags import changed
from proximo.cli.mistakes import no_model
from proximo.cli.naming import file_tables
from proximo.cli.run_folders import (
    ACCEPT_LOST,
    launched,
    report_failure,
    take_allowed,
    take_ranks,
    take_trackers,
    take_webhook,
    taken,
    with_ranks,
)
from proximo.config import toml
from proximo.config.vocabulary import fields_by_word
from proximo.data import DataFile
from proximo.runs.notifying import notified
from proximo.runs.tracking.processes import tracked
from proximo.runs.tracking.trackers import CHOICES
from proximo.supervised.dpo import DpoConfig, dpo, dpo_overview
from proximo.supervised.fitting import Fitted
from proximo.supervised.overview import Overview
from proximo.supervised.reward_model import RewardModelConfig, reward_model_overview, train_reward_model
from proximo.supervised.schedule import FitOptions, fit_length
from proximo.supervised.sft import SftConfig, sft, sft_overview
from proximo.supervised.snapshots import POINTS

Config = TypeVar("Config", DpoConfig, RewardModelConfig, SftConfig)

STAGE_FLAGS = f"""arguments of the command itself:
  DATA or --data DATA   data file to train on (.jsonl, .parquet, .csv, ...)
  config.toml           config file, such as the config.toml of a run folder
  --run DIR             run folder; the same command with the same folder resumes the run
  --allow-change FIELD  on resume: permit this field to differ from the original run
  --accept-lost-rows    on resume: continue although metrics.jsonl or ledger.jsonl has lost rows
  --skip-bad            skip bad rows of a data file instead of refusing it
  --track NAME ...      send the run while it runs to {CHOICES}; any number
  --notify URL          tell a webhook (Slack, Discord, ntfy) how the run ends; without it $PROXIMO_NOTIFY is read
  --ranks N             train on N processes that hold the model in shards; sets ranks.processes
  --dry-run             check the run and print its config, and what it would do, without starting it
  --json                print the result as JSON on stdout, progress on stderr
examples:
"""

EXAMPLES = {
    "sft": """  proximo sft demonstrations.jsonl --model DIR --run runs/sft
  proximo sft --data.task.type Countdown --model DIR --fit.epochs 2
""",
    "reward-model": """  proximo reward-model pairs.jsonl --model runs/sft --run runs/judge
  proximo train --reward-model runs/judge --rewards.task 0
""",
    "dpo": """  proximo dpo pairs.jsonl --model runs/sft --run runs/dpo
  proximo dpo pairs.jsonl --loss.type Ipo --loss.beta 0.2
""",
}


def run(command: str, arguments: list[str]) -> int:
    return {"dpo": run_dpo, "reward-model": run_reward_model, "sft": run_sft}[command](arguments)


def run_sft(arguments: list[str]) -> int:
    description = "Fine-tune on a file's completions, or on a task's reference answers."
    return run_stage("sft", arguments, description, SftConfig(), sft, sft_overview)


def run_reward_model(arguments: list[str]) -> int:
    description = "Train a reward model on ranked completions: chosen and rejected, or a list with the best first."
    default = RewardModelConfig(DataFile(""))
    return run_stage("reward-model", arguments, description, default, train_reward_model, reward_model_overview)


def run_dpo(arguments: list[str]) -> int:
    description = (
        "Train on ranked completions directly (DPO or IPO): chosen and rejected, or a list with the best first."
    )
    return run_stage("dpo", arguments, description, DpoConfig(DataFile("")), dpo, dpo_overview)


def run_stage(
    command: str,
    arguments: list[str],
    description: str,
    default: Config,
    stage: StageFunction[Config],
    check: Callable[[Config], Overview],
) -> int:
    """Run a stage. Exit status: 0 done, 1 failed during training, 2 refused before training.

    A data file given as first argument replaces the default's.
    """
    webhook, given = take_webhook(arguments), list(arguments)
    as_json, dry_run = take_switch(arguments, "--json"), take_switch(arguments, "--dry-run")
    skip_bad, ranks = take_switch(arguments, "--skip-bad"), take_ranks(arguments)
    folder, allowed, trackers = take(arguments, "--run"), take_allowed(arguments), take_trackers(arguments)
    accept_lost = take_switch(arguments, ACCEPT_LOST)
    given_fields = [each.removeprefix("--").replace("-", "_") for each in flag_names(arguments)]
    config = changed(
        _named(command, arguments, default),
        arguments,
        prog=f"proximo {command}",
        usage="(DATA | config.toml) --model MODEL [--run DIR]",
        description=description,
        help_more=f"{STAGE_FLAGS}{EXAMPLES[command]}",
    )
    with refusing():
        config = replace(config, fit=fit_length(config.fit, given_fields))
    if skip_bad:
        if not isinstance(config.data, DataFile):
            refuse("--skip-bad is for data files: name one")
        config = replace(config, data=replace(config.data, skip_bad=True))
    config = config if ranks is None else with_ranks(config, ranks)
    if dry_run:
        _print_plan(config, check, as_json)
        return 0
    path = folder_for(folder or None, command)
    if config.ranks is not None:
        named, follow = folder is not None, partial(_follow, config)
        status = launched(config.ranks, [command, *given], path, follow, named=named, webhook=webhook)
        if status is not None:
            return status
    with taken(path, toml.dumps(config), allowed, POINTS, accept_lost=accept_lost) as session:
        if session.result is not None:
            say(f"{path}: this run is finished")
        else:
            suit_session(session, config.model, config.device, say)
        try:
            begins = session.result is None
            telling = notified(session, webhook if begins else None, say)
            with tracked(path, trackers if begins else (), say), telling, panel(path):
                fitted = fitted_in(config, path, stage, session, say)
        except (OSError, ValueError) as error:
            if session.is_empty:
                refuse(str(error))
            report_failure(session, error)
            return 1
    print(json.dumps(_summary(path, fitted)) if as_json else "\n".join(stage_ending(command, path, config, fitted)))
    return 0


def _print_plan(config: Config, check: Callable[[Config], Overview], as_json: bool) -> None:
    """Print the config, and on stderr what the run would do; refuse whatever it would refuse before it loads
    weights."""
    with refusing():
        overview = check(config)
        if as_json:
            print(json.dumps({"config": toml.plain(config), **overview.to_dict()}))
            return
        overview.tell(say)
    print(toml.dumps(config))


def _follow(config: DpoConfig | RewardModelConfig | SftConfig) -> None:
    from proximo.distributed.rank0 import follow_stage

    follow_stage(config)


def _named(command: str, arguments: list[str], default: Config) -> Config:
    """Take the config from the first argument: a config file, or a data file for the default config. Data and model
    have to be named: the default's are the demo's."""
    given = bool(arguments) and not arguments[0].startswith("-")
    first, data = arguments.pop(0) if given else "", take(arguments, "--data") or ""
    if asks_for_help(arguments) and not (first or data):
        return default
    flags, name = flag_names(arguments), data or first
    if first.endswith(".toml"):
        config = _from_file(command, first, flags, type(default))
        return replace(config, data=DataFile(data)) if data else config
    if first and data:
        refuse(f"{first} and --data {data}: both name the data to train on, give one of them")
    if not name and not any(each.startswith("--data.") for each in flags):
        refuse(f"{command} needs data: proximo {command} DATA.jsonl --model MODEL, or a config.toml")
    if "--model" not in flags and not asks_for_help(arguments):
        refuse(no_model(command))
    return _on_model(replace(default, data=DataFile(name)) if name else default, arguments)


def _on_model(config: Config, arguments: list[str]) -> Config:
    """The config with the model that the flags name, which other flags may need: an adapter is one of a model."""
    model = take(list(arguments), "--model") or "None"
    return config if model.lower() == "none" else replace(config, model=model)


def _from_file(command: str, name: str, flags: Sequence[str], kind: type[Config]) -> Config:
    """The config in a file, which has to name a model, unless a flag does; a run's own config may have none."""
    with refusing():
        fit_length(FitOptions(), file_tables(name))
        config = toml.load(name, kind, words=fields_by_word(command))
    is_named = "--model" in flags or "model" in file_tables(name) or (Path(name).parent / "run.json").is_file()
    if not is_named and not asks_for_help(flags):
        refuse(f'{name} names no model: write model = "DIR", or give --model MODEL{_none(config)}')
    return config


def _none(config: Config) -> str:
    """Hint for a stage that can begin with a new model."""
    return "; --model None is a new tiny one" if isinstance(config, SftConfig) else ""


def _summary(path: Path, fitted: Fitted) -> dict[str, object]:
    return {
        "run": str(path),
        "steps": fitted.steps,
        "best_step": fitted.best_step,
        "stopped_early": fitted.stopped_early,
        "held_out_before": fitted.before,
        "held_out_best": fitted.best,
        "skipped": fitted.skipped,
        "checkpoint": str(fitted.checkpoint),
        "seconds": round(fitted.seconds, 3),
    }
