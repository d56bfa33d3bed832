"""`proximo compare`: train algorithms or configs with several seeds and an equal budget."""

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.text import Text

from proximo.algorithms import explain
from proximo.algorithms.explain import Card
from proximo.api.comparing import SEEDS, checked_plan, compared, compared_forks, default_jobs, machines_for
from proximo.api.folders import folder_for
from proximo.cli.arguments import asks_for_help, refuse, refusing, say, take, take_list, take_switch
from proximo.cli.configs import (
    named_algorithm,
    naming_flags,
    preset,
    preset_or_file,
    skipping,
    suited_base,
    with_named,
    with_values,
)
from proximo.cli.flags import changed
from proximo.cli.pieces import said_later
from proximo.cli.run_folders import ACCEPT_LOST, take_allowed, take_trackers
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
    fair_line,
    verdict_lines,
)
from proximo.insight.folder import RunFolder
from proximo.insight.report.run_details import gather
from proximo.recipes.defaults import listed
from proximo.recipes.presets import ARITHMETIC, COMPARISONS, ComparisonPreset, ablated
from proximo.rl.config import RunConfig
from proximo.runs.signals import Stopped
from proximo.runs.tracking.trackers import CHOICES
from proximo.system.opening import read_json, without_links
from proximo.system.secrets import without_secrets

DESCRIPTION = (
    "Train each algorithm or config with each seed, on one task and with an equal budget, and report which "
    "differences are more than noise. All runs of a seed get the same prompts and random numbers, so their first "
    "rollouts are equal."
)

FLAGS = f"""flags of the command itself; all others are for all runs, except --steps and --max-generated-tokens:
  --algorithms A B ...  algorithms to compare on one config: the preset or file that is named, or the demo's
  --ablate NAME         one algorithm, whole and with each of its choices put back to the default, one at a time
  --seeds N             number of seeds, counting up from the config's own (default: 3)
  --tokens N            budget: each run ends with the step in which it has sampled N tokens for training
  --updates N           budget: N optimizer updates per run; without either, the budget that the configs share
  --run DIR             folder for runs and reports (default: runs/compare-DATE); the same command resumes it
  --jobs N              runs in parallel (default: as many as the cores allow)
  --skip-bad            skip bad rows of a data file instead of refusing it
  --track NAME ...      send each run while it runs to {CHOICES}; any number
  --allow-change FIELD  on resume: permit this field to differ from the original runs
  --accept-lost-rows    resume runs although their metrics.jsonl or ledger.jsonl has lost rows
  --dry-run             print what would be run without starting it
  --json                print compare.json on stdout
"""

EXAMPLES = """examples:
  proximo compare five                                   PPO, GRPO, DAPO, GSPO and SAPO on the demo's task
  proximo compare --algorithms grpo gspo --updates 200   named algorithms on the demo's task, or on one config
  proximo compare --algorithms grpo dapo --model DIR --data problems.jsonl --updates 200
  proximo compare --ablate dapo --seeds 3 --updates 200  DAPO without each of its four additions
  proximo compare mine.toml yours.toml --tokens 500000   any configs; the first is the baseline
  proximo compare runs/a runs/a-at-40-gspo               a run and its forks, from the fork on; nothing is trained
"""
SECONDS = 2.0  # between two looks at the progress of the runs


def run(arguments: list[str]) -> int:
    """Exit status: 0 all runs finished, 1 some failed, 2 refused before any was started."""
    if asks_for_help(arguments):
        _changed(ARITHMETIC, ["--help"])
    as_json, dry_run = take_switch(arguments, "--json"), take_switch(arguments, "--dry-run")
    command = shlex.join(["proximo", "compare", *without_secrets(arguments)])
    folder, jobs = take(arguments, "--run"), _whole(arguments, "--jobs")
    accept_lost, trackers = take_switch(arguments, ACCEPT_LOST), take_trackers(arguments)
    allowed = take_allowed(arguments)
    if arguments and Path(arguments[0]).is_dir():
        return _forks(arguments, folder, command, as_json)
    plan = _plan(arguments)
    if dry_run:
        _print_plan(plan, jobs or default_jobs(plan, machines_for(plan)))
        return 0
    path = folder_for(folder or None, "compare")
    command += "" if folder else f" --run {shlex.quote(str(path))}"
    result, failures = _train(plan, path, jobs, command, accept_lost, trackers, allowed)
    _print_result(path, result, as_json, path)
    return 1 if failures else 0


def _forks(arguments: list[str], folder: str | None, command: str, as_json: bool) -> int:
    """Compare a run with its forks, which are finished already."""
    for each in arguments:
        if not Path(each).is_dir():
            refuse(f"{each} is no folder, as {arguments[0]} is: give a run and its forks alone, or configs")
    path = folder_for(folder or None, "compare")
    with refusing():
        result = compared_forks([without_links(each) for each in arguments], path, command)
    _print_result(path, result, as_json, Path(arguments[0]).parent)
    return 0


# What is compared


def _plan(arguments: list[str]) -> ComparisonPlan:
    """The plan that the command line describes."""
    names = take_list(arguments, "--algorithms", lambda each: not (each.endswith(".toml") or preset(each)))
    ablate, skip_bad = take(arguments, "--ablate"), take_switch(arguments, "--skip-bad")
    if names is not None and ablate is not None:
        refuse(f"--ablate {ablate} and --algorithms {' '.join(names)}: give one of them")
    seeds = _whole(arguments, "--seeds")
    if (one := take(arguments, "--algorithm")) is not None:
        refuse(f"--algorithm {one}: name those to compare, as in --algorithms {one} OTHER")
    tokens, updates = _whole(arguments, "--tokens"), _whole(arguments, "--updates")
    if tokens is not None and updates is not None:
        refuse("--tokens and --updates: give one of them, runs can be equal in one only")
    for flag in ("--steps", "--max-generated-tokens", "--max_generated_tokens"):
        if take(arguments, flag) is not None:
            refuse(f"{flag}: a comparison's runs end with its budget, give --updates N or --tokens N")
    comparison, configs = _chosen(arguments, names, ablate, skip_bad)
    configs = [(name, skipping(_changed(config, arguments), skip_bad)) for name, config in configs]
    with refusing():
        budget = Budget("tokens", tokens) if tokens is not None else None
        budget = Budget("updates", updates) if updates is not None else budget
        usual = SEEDS if comparison is None else comparison.seeds
        return checked_plan(configs, usual if seeds is None else seeds, budget)


def _chosen(
    arguments: list[str], names: list[str] | None, ablate: str | None, skip_bad: bool
) -> tuple[ComparisonPreset | None, list[tuple[str, RunConfig]]]:
    """Take the configs, by name, from the arguments; the flags stay."""
    given = []
    while arguments and not arguments[0].startswith("-"):
        given.append(arguments.pop(0))
    comparison = next((each for each in COMPARISONS if each.name in given), None)
    if comparison is not None:
        if len(given) > 1 or names is not None or ablate is not None:
            refuse(f"{comparison.name} is a whole comparison: give it alone")
        return comparison, list(comparison.configs.items())
    if names is not None or ablate is not None:
        if len(given) > 1:
            refuse(f"--algorithms and --ablate compare on one config, not on {len(given)}")
        base = preset_or_file(given[0], arguments) if given else _suited(arguments, skip_bad)
        if names is None:
            return None, _ablations(base, named_algorithm("--ablate", ablate or ""), arguments)
        cards = [named_algorithm("--algorithms", name) for name in names]
        return None, [(card.name, with_named(base, card.value, arguments)) for card in cards]
    if not given:
        refuse("compare needs something to compare: proximo compare five, --algorithms grpo sapo, or two configs")
    return None, [(Path(name).stem, _config(name, arguments)) for name in given]


def _ablations(base: RunConfig, card: Card, flags: Sequence[str]) -> list[tuple[str, RunConfig]]:
    """The algorithm first, then without each of its choices."""
    with said_later():
        less = ablated(card.value)
    variants = [(f"without-{stage}", with_named(base, value, flags)) for stage, value in less.items() if value]
    kept = [stage for stage, value in less.items() if value is None]
    if not variants:
        refuse(f"--ablate {card.name}: none of its choices can be left out alone")
    if kept:
        say(f"not left out, since other choices of {card.name} need it: {', '.join(kept)}")
    return [(card.name, with_named(base, card.value, flags)), *variants]


def _suited(arguments: list[str], skip_bad: bool) -> RunConfig:
    """The demo's config, or one for the model and data that the flags name."""
    base, defaults = suited_base(arguments, prog="proximo compare", skip_bad=skip_bad)
    for line in listed(defaults):
        say(line)
    return base


def _config(name: str, flags: Sequence[str]) -> RunConfig:
    if Path(name).is_dir():
        refuse(
            f"{name} is a folder: give {Path(name) / 'config.toml'} to train its config, or folders alone, a run and "
            "its forks"
        )
    if explain.card(name) is not None:
        refuse(f"{name} is an algorithm: --algorithms {name} OTHER compares it")
    return preset_or_file(name, flags)


def _changed(config: RunConfig, flags: list[str]) -> RunConfig:
    return changed(
        with_values(config),
        flags,
        prog="proximo compare",
        usage="[five | PRESET | run.toml ... | RUN FORK ...] [--algorithms A B | --ablate A]",
        description=DESCRIPTION,
        help_more=f"{naming_flags('compare', FLAGS)}{EXAMPLES}",
    )


def _whole(arguments: list[str], flag: str) -> int | None:
    """The whole number of a flag, at least 1."""
    given = take(arguments, flag)
    if given is None:
        return None
    try:
        number = int(given.replace("_", ""))
    except ValueError:
        refuse(f"{flag} {given}: give a whole number")
    if number < 1:
        refuse(f"{flag} {given}: give at least 1")
    return number


def _print_plan(plan: ComparisonPlan, max_jobs: int) -> None:
    rows = [("run", "steps", "updates a step", "completions a step", "evaluated every")]
    for job in plan.jobs():
        training = job.config.training
        steps = f"{'at most ' * (plan.budget.kind == 'tokens')}{job.config.steps}"
        completions = f"{training.groups} × {training.group_size}"
        rows.append((job.name, steps, str(training.updates), completions, f"{job.config.evaluation.every} steps"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"{len(rows) - 1} runs of {plan.budget} each, {max_jobs} at a time; nothing was started")


# Running


def _train(
    plan: ComparisonPlan,
    path: Path,
    jobs: int | None,
    command: str,
    accept_lost: bool,
    trackers: Sequence[str],
    allowed: Sequence[str],
) -> tuple[ComparisonResult, list[RunFailure]]:
    view = _View(ComparisonFolder(path))
    try:
        with refusing():
            return compared(plan, path, jobs, command, view, accept_lost=accept_lost, track=trackers, allowed=allowed)
    except (Stopped, KeyboardInterrupt):
        view.stop()
        say(f"stopped; the same command with --run {path} resumes it")
        raise
    finally:
        view.stop()


class _View:
    """Print a line when a run starts or ends, and on a terminal a progress line."""

    def __init__(self, files: ComparisonFolder) -> None:
        self._count, self._files, self._done = 0, files, 0
        self._began, self._looked = time.monotonic(), 0.0
        self._status: Status | None = None

    def begins(self, count: int) -> None:
        self._count = count
        if sys.stderr.isatty() and count:
            self._status = Console(stderr=True).status("")
            self._status.start()

    def started(self, job: RunJob) -> None:
        say(f"{job}: started")

    def ended(self, job: RunJob, failure: RunFailure | None) -> None:
        self._done += 1
        if failure is not None:
            say(f"{job}: FAILED, {failure.message}; the others continue")
            return
        seconds = (time.monotonic() - self._began) / self._done * (self._count - self._done)
        result = RunFolder(self._files.run(job)).result or {}
        before, after = (result.get(side, {}).get("outcome", float("nan")) for side in ("before", "after"))
        rest = f", about {seconds / 60:.0f} min left" if self._done < self._count else ""
        say(f"{job}: held-out {before:.3f} → {after:.3f} ({self._done} of {self._count} done{rest})")

    def waiting(self, jobs: Sequence[RunJob]) -> None:
        now = time.monotonic()
        if self._status is None or now - self._looked < SECONDS:
            return
        self._looked = now
        self._status.update(Text(" · ".join(f"{job} {self._progress(job)}" for job in jobs)))

    def _progress(self, job: RunJob) -> str:
        try:
            return f"step {gather(RunFolder(self._files.run(job))).steps_done}"
        except ValueError:  # it has not started
            return "loading"

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()


def _print_result(path: Path, result: ComparisonResult, as_json: bool, runs: Path) -> None:
    if as_json:
        print(json.dumps(read_json(path / JSON)))
        return
    print("\n".join(["", *verdict_lines(result), "", fair_line(result), ""]))
    print(f"report  {path / PAGE}   also {MARKDOWN} and {JSON}; the runs: proximo view {runs}")
