"""`proximo.compare`: configs times seeds on equal terms, each run in a process of its own."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from proximo.algorithms import explain
from proximo.api.folders import PathLike, folder_for
from proximo.api.messages import Say, keep_quiet, say
from proximo.api.rewards import refuse_unbound
from proximo.api.run import OpenedRun
from proximo.api.threads import machine_of
from proximo.api.training import CONFIG
from proximo.api.validate import refuse_kind, unwritable
from proximo.insight.compare import (
    JSON,
    MARKDOWN,
    PAGE,
    Budget,
    ComparisonFolder,
    ComparisonPlan,
    ComparisonResult,
    RunFailure,
    RunJob,
    at_once,
    fork_result,
    gathered,
    is_finished,
    make_plan,
    run_jobs,
    write_reports,
)
from proximo.models import pick_device
from proximo.recipes.presets import ComparisonPreset, with_values
from proximo.rl.config import RunConfig
from proximo.rl.preflight.estimate import held_models
from proximo.runs.tracking.trackers import check_names
from proximo.system.locks import FolderLock
from proximo.system.machine import Machine
from proximo.system.opening import make_folder, without_links
from proximo.system.safe_text import counted

SEEDS = 3
REPORTS = (JSON, MARKDOWN, PAGE)


def compare(
    configs: Mapping[str, RunConfig] | Sequence[RunConfig | OpenedRun | str | Path] | ComparisonPreset,
    *,
    seeds: int | None = None,
    tokens: int | None = None,
    updates: int | None = None,
    run: PathLike | None = None,
    jobs: int | None = None,
    track: str | Sequence[str] = (),
    accept_lost_rows: bool = False,
    allow_change: Sequence[str] = (),
    quiet: bool = False,
) -> ComparisonResult:
    """Train each config with each seed on one task and an equal budget; what `proximo compare` does.

    The first config is what the others are compared with. All runs of a seed see the same prompts and sample with the
    same random numbers. The folder gets compare.html, compare.md and compare.json; the same call with the same folder
    does the runs that are missing. A run that fails is named in the result, and the others go on.

    configs  by name, or in order, named after their algorithms; or a whole comparison, proximo.presets.FIVE. Or a run
             and its forks, opened or by their folders: nothing is trained then, and they are compared from the fork
             on, paired by step; seeds, tokens, updates and jobs are not for these
    seeds    for each config, from the first config's own on (3)
    tokens   each run ends with the step in which it has sampled this many tokens in training
    updates  optimizer updates of each run; without either, the budget that the configs share
    run      the folder; None: runs/compare-DATE
    jobs     runs at a time (as many as the cores allow)
    track    trackers that each run is sent to while it runs, as in proximo.train
    accept_lost_rows   resume runs although their metrics.jsonl or ledger.jsonl has lost rows
    allow_change   fields that may differ from those the comparison began with, such as ["device"]
    quiet    no lines of progress on stderr

    Example:
        base = proximo.presets.ARITHMETIC
        variants = {name: replace(base, steps=40, training=replace(base.training, learning_rate=rate))
                    for name, rate in {"slow": 1e-5, "fast": 4e-5}.items()}
        result = proximo.compare(variants, seeds=3, run="runs/rates")
        print([(standing.name, standing.after) for standing in result.contenders])
    """
    budget = _budget(tokens, updates)
    command, trackers = " ".join(map(shlex.quote, sys.argv)), [track] if isinstance(track, str) else track
    check_names(trackers)
    if folders := _folders(configs):
        if any(given is not None for given in (seeds, tokens, updates, jobs)):
            raise ValueError("configs are runs, which are trained already: leave out seeds, tokens, updates and jobs")
        return compared_forks(folders, folder_for(run, "compare"), command)
    named = _named(configs)
    for _, config in named:
        refuse_unbound(config, "each run of a comparison has a process of its own")
    usual = configs.seeds if isinstance(configs, ComparisonPreset) else SEEDS
    plan = checked_plan(
        [(name, with_values(config)) for name, config in named], usual if seeds is None else seeds, budget
    )
    path = folder_for(run, "compare")
    view = Lines(keep_quiet if quiet else say)
    result, _ = compared(
        plan, path, jobs, command, view, accept_lost=accept_lost_rows, track=trackers, allowed=allow_change
    )
    return result


def _budget(tokens: int | None, updates: int | None) -> Budget | None:
    if tokens is not None and updates is not None:
        raise ValueError("tokens and updates are both given: runs can be equal in one of them only")
    budget = Budget("tokens", tokens) if tokens is not None else None
    return Budget("updates", updates) if updates is not None else budget


def _folders(configs: object) -> list[Path]:
    """Folders of runs, if such are given."""
    if not isinstance(configs, list | tuple) or not any(isinstance(each, OpenedRun | str | Path) for each in configs):
        return []
    for each in configs:
        refuse_kind("configs: one", each, (OpenedRun, str, Path), "a run or its folder, as the others are")
        if not isinstance(each, OpenedRun) and not Path(each).is_dir():
            raise TypeError(f"configs: one is {each!r}: give {CONFIG}, or the folder of a run")
    return [each.path if isinstance(each, OpenedRun) else without_links(each) for each in configs]


def compared_forks(folders: Sequence[Path], path: Path, command: str) -> ComparisonResult:
    """Compare a run with its forks and write the reports; ValueError where the folder holds something else."""
    if path.exists() and (not path.is_dir() or any(each.name not in REPORTS for each in path.iterdir())):
        raise ValueError(f"`run={path}` holds something else than a comparison of forks: choose another name")
    result = fork_result(folders, command)
    try:
        make_folder(path)
        write_reports(path, result)
    except OSError as error:
        raise unwritable(path, error) from error
    return result


def _named(configs: Any) -> list[tuple[str, RunConfig]]:
    if isinstance(configs, ComparisonPreset):
        return list(configs.configs.items())
    refuse_kind("configs", configs, (Mapping, list, tuple), "a dict of RunConfigs by name, or a list of them")
    for config in configs.values() if isinstance(configs, Mapping) else configs:
        refuse_kind("configs: one", config, RunConfig, CONFIG)
    if isinstance(configs, Mapping):
        return list(configs.items())
    return [(explain.nearest(config.algorithm).name, config) for config in configs]


def checked_plan(configs: Sequence[tuple[str, RunConfig]], seeds: int, budget: Budget | None) -> ComparisonPlan:
    """The plan of a comparison; refuses what cannot be compared or read, once and before anything is started."""
    plan = make_plan(configs, seeds, budget)
    for contender in plan.contenders:
        contender.config.task.problem(0, "train", contender.config.seed)
        held_models(contender.config)
        pick_device(contender.config.device)
    return plan


class View(Protocol):
    """Shows the progress of the runs."""

    def begins(self, count: int) -> None: ...
    def started(self, job: RunJob) -> None: ...
    def ended(self, job: RunJob, failure: RunFailure | None) -> None: ...
    def waiting(self, jobs: Sequence[RunJob]) -> None: ...


class Lines:
    """A line for each run that starts or ends."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def begins(self, count: int) -> None:
        self._say(f"{counted(count, 'run')} to do")

    def started(self, job: RunJob) -> None:
        self._say(f"{job}: started")

    def ended(self, job: RunJob, failure: RunFailure | None) -> None:
        self._say(f"{job}: finished" if failure is None else f"{job}: FAILED, {failure.message}; the others go on")

    def waiting(self, jobs: Sequence[RunJob]) -> None: ...


def machines_for(plan: ComparisonPlan) -> dict[str, Machine]:
    """Machine that each contender runs on, by its name."""
    return {
        each.name: machine_of(each.config.model, each.config.device) or Machine.current() for each in plan.contenders
    }


def default_jobs(plan: ComparisonPlan, machines: Mapping[str, Machine]) -> int:
    """Runs at a time."""
    return at_once([each.config for each in plan.contenders], machines.values())


def compared(
    plan: ComparisonPlan,
    path: Path,
    jobs: int | None,
    command: str,
    view: View,
    *,
    accept_lost: bool = False,
    track: Sequence[str] = (),
    allowed: Sequence[str] = (),
) -> tuple[ComparisonResult, list[RunFailure]]:
    """Do what is left of a comparison and write its reports; ValueError where the folder cannot be taken for it."""
    machines = machines_for(plan)
    max_jobs = jobs or default_jobs(plan, machines)
    files, existed = ComparisonFolder(path, track, allowed), path.exists()
    with ExitStack() as until:
        try:
            lock = FolderLock(path)
            until.callback(lambda: lock.release(remove_empty=not existed))
            files.check(plan)
            left = [job for job in plan.jobs() if not is_finished(job, files, accept_lost)]
        except OSError as error:
            raise unwritable(path, error) from error
        view.begins(len(left))
        machines = files.settle(plan, machines, shlex.split(command))
        failures = run_jobs(
            left,
            files,
            machines,
            max_jobs,
            started=view.started,
            ended=view.ended,
            waiting=view.waiting,
            accept_lost=accept_lost,
        )
        result = gathered(plan, files, failures, command)
        write_reports(path, result)
    return result, failures
