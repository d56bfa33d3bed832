"""`proximo train`: train a model by reinforcement learning, or run the pipeline demo."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.console import Group as Stack
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from proximo.algorithms import explain
from proximo.api.banners import Opening
from proximo.api.endings import run_ending
from proximo.api.rehearsing import DryTrain
from proximo.api.training import going_on, trained
from proximo.cli.arguments import flag_names, refuse, refusing, say, take, take_number, take_switch
from proximo.cli.commands import pipelines
from proximo.cli.configs import naming_flags, preset, run_config
from proximo.cli.run_folders import (
    ACCEPT_LOST,
    NOTIFY,
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
from proximo.insight.doctor.checkup import standing, summary
from proximo.recipes.pipeline import PipelineConfig
from proximo.rl.config import RunConfig
from proximo.rl.progress import (
    Progress,
    ProgressLines,
    best_sample,
    measure,
    share,
    sparkline,
    speed,
)
from proximo.rl.progress import summary as step_summary
from proximo.rl.result import RunResult
from proximo.runs.checkpoints import step_of
from proximo.runs.pace import Pace
from proximo.runs.records import Collected, Evaluation
from proximo.runs.session import RunSession
from proximo.runs.tracking.trackers import CHOICES
from proximo.runs.webhook import Webhook
from proximo.system.opening import without_links
from proximo.system.safe_text import MAX_SHOWN, visible

PROFILE = "--profile"
"""The flag that asks for a profile of some steps."""
MAX_PROFILED = 100

TRAIN_FLAGS = f"""flags of the command itself:
  --run DIR             run folder; the same command with the same folder resumes the run
  --allow-change FIELD  on resume: permit this field to differ from the original run
  --accept-lost-rows    on resume: continue although metrics.jsonl or ledger.jsonl has lost rows
  --skip-bad            skip bad rows of a data file instead of refusing it
  --track NAME ...      send the run while it runs to {CHOICES}; any number
  --notify URL          tell a webhook (Slack, Discord, ntfy) how the run ends; without it $PROXIMO_NOTIFY is read
  --ranks N             train on N processes that hold the model in shards; sets ranks.processes (--ranks.shard,
                        --ranks.cluster and others set the rest of [ranks])
  --profile N           measure where the time of N steps goes, from this process's third on, and trace one more:
                        profile.json and trace.json.gz in the run folder; `proximo doctor RUN` shows the table
  --dry-run             check the run and print its config, sizes and memory, without starting it
  --json                print the result as JSON on stdout, progress on stderr
"""

EXAMPLES = """examples:
  proximo train                                         the default: GRPO on sums, a few minutes on a CPU
  proximo train --algorithm dapo --steps 300 --run runs/dapo
  proximo train run.toml --training.learning-rate 1e-6  a config file with one field changed
  proximo train --model DIR --data problems.jsonl --dry-run
  proximo train run.toml --ranks 4                      four GPUs of this machine; with torchrun or SLURM, it joins
  proximo train --track tensorboard wandb --run runs/a  local event files, and wandb (offline unless logged in)
  proximo train --algorithm.gate.type SoftGate --help   the fields of another piece
"""


def run(arguments: list[str]) -> int:
    named = flag_names(arguments)
    webhook, given = take_webhook(arguments), list(arguments)
    as_json, dry_run = take_switch(arguments, "--json"), take_switch(arguments, "--dry-run")
    folder, trackers, ranks = take(arguments, "--run"), take_trackers(arguments), take_ranks(arguments)
    chain = preset(arguments[0]) if arguments else None
    if isinstance(chain, PipelineConfig):
        if trackers:
            refuse("--track is for one run: send the runs of a pipeline with proximo track RUN --to NAME")
        if PROFILE in named:
            refuse(f"{PROFILE} is for one run, and {arguments[0]} is a chain of them: leave it out")
        if NOTIFY in named:
            refuse(f"{NOTIFY} is for one run, and {arguments[0]} is a chain of them: leave it out")
        return pipelines.run(arguments[0], chain, arguments[1:], folder=folder, as_json=as_json, dry_run=dry_run)
    profile = take_profile(arguments)
    skip_bad, allowed = take_switch(arguments, "--skip-bad"), take_allowed(arguments)
    accept_lost = take_switch(arguments, ACCEPT_LOST)
    config, defaults = run_config(
        arguments,
        prog="proximo train",
        usage="[PRESET | run.toml] [--algorithm NAME] [--run DIR]",
        description="Train a model by reinforcement learning.",
        help_more=f"{naming_flags('train', TRAIN_FLAGS)}{EXAMPLES}",
        skip_bad=skip_bad,
    )
    config = config if ranks is None else with_ranks(config, ranks)
    if dry_run:
        _print_plan(config, Opening(folder or "runs/DATE", defaults), as_json)
        return 0
    path = without_links(Path(folder) if folder else Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}")
    config = going_on(config, defaults, path, allowed)
    if config.ranks is not None:
        is_named = folder is not None
        status = launched(
            config.ranks, ["train", *given], path, lambda: follow_run(config), named=is_named, webhook=webhook
        )
        if status is not None:
            return status
    return train_in(
        path,
        config,
        allowed,
        opening=Opening(path, defaults),
        accept_lost=accept_lost,
        trackers=trackers,
        webhook=webhook,
        profile=profile,
        as_json=as_json,
    )


def take_profile(arguments: list[str]) -> int:
    """The number of steps that --profile gives, removed from the arguments; 0 without it."""
    steps = take_number(arguments, PROFILE, int)
    if steps is not None and not 0 < steps <= MAX_PROFILED:
        refuse(f"{PROFILE} {steps}: give the number of steps to measure, 1 to {MAX_PROFILED}")
    return steps or 0


def train_in(
    path: Path,
    config: RunConfig,
    allowed: Sequence[str] | None,
    *,
    opening: Opening | None = None,
    accept_lost: bool = False,
    trackers: Sequence[str],
    webhook: Webhook | None,
    profile: int = 0,
    as_json: bool,
) -> int:
    """Train in a run folder, new or begun, and print what came of it: the exit status. `allowed` are the fields that
    may have changed since it began; None if none may."""
    named = explain.named(config.algorithm)
    with taken(path, toml.dumps(config), allowed, algorithm=named, accept_lost=accept_lost) as session:
        more = "steps" in (allowed or ())
        outcome = _train(config, session, opening, more=more, trackers=trackers, webhook=webhook, profile=profile)
    if outcome is None:
        for line in summary(path):
            say(line)
        return 1
    _print_result(path, outcome, as_json)
    return 0


def _print_plan(config: RunConfig, opening: Opening, as_json: bool) -> None:
    """Print the resolved run and whether it fits; refuse whatever training would refuse before it loads weights."""
    with refusing():
        plan = DryTrain.of(config, opening)
    if not as_json:
        print("\n".join(plan.lines))
        return
    notes = [*(f"{label}: {text}" for label, text in plan.labelled if text), *plan.more]
    chosen = [asdict(each) | {"value": each.shown} for each in opening.chosen]
    fit = {"fits": plan.plan.fit.fits, "peak_bytes": plan.plan.fit.peak, "step_seconds": plan.plan.fit.seconds}
    held = plan.plan.held.to_dict()
    print(json.dumps({"config": toml.plain(config), "defaults": chosen, **held, **fit, "notes": notes}))


def follow_run(config: RunConfig) -> None:
    from proximo.distributed.rank0 import follow

    follow(config)


def _train(
    config: RunConfig,
    session: RunSession,
    opening: Opening | None,
    *,
    more: bool,
    trackers: Sequence[str],
    webhook: Webhook | None,
    profile: int,
) -> RunResult | None:
    """Train; None if the run failed, which has then been reported."""
    progress: Progress = LiveView() if sys.stderr.isatty() else ProgressLines()
    try:
        return trained(
            config,
            session,
            progress,
            say,
            more=more,
            opening=opening,
            track=trackers,
            webhook=webhook,
            profile=profile,
        )
    except (OSError, ValueError) as error:
        report_failure(session, error)
        return None


def _print_result(path: Path, outcome: RunResult, as_json: bool) -> None:
    if as_json:
        result = {
            "run": str(path),
            "steps": step_of(outcome.last or outcome.checkpoint),
            "checkpoint": str(outcome.checkpoint),
            "ended": outcome.ended or None,
            "better": asdict(outcome.better) if outcome.better else None,
            "held_out_before": outcome.before.accuracy,
            "held_out_after": outcome.after.accuracy,
            "generated_tokens": outcome.generated_tokens,
            "seconds": round(outcome.seconds, 3),
            "findings": [asdict(each) for each in standing(path)],
        }
        print(json.dumps(result))
        return
    print("\n".join(run_ending(path, outcome)))


# The view of a run in a terminal


class LiveView:
    """A bar, the task score as a sparkline, the step's numbers and one completion."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, refresh_per_second=4, transient=True)
        self.steps, self.outcomes, self.pace = 0, [], Pace()

    def start(self, steps: int, before: Evaluation) -> None:
        self.steps = steps
        self.pace.start(steps)
        if before.problems:
            self.console.print(f"held-out {measure(before)} before: {share(before)}", highlight=False)
        self.live.start()

    def stepped(
        self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float], collected: Collected
    ) -> None:
        self.outcomes.append(metrics["outcome"])
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            f"step {step}/{self.steps}",
            ProgressBar(self.steps, step, width=40),
            "  ".join(filter(None, [speed(seconds, collected), self.pace.left(step)])),
        )
        sample = Text()
        if (best := best_sample(collected)) is not None:
            sample = Text(best[0], style="italic")
            sample.append(f"   task score {best[1]:g}", style="dim")
        self.live.update(
            Stack(
                bar, Text(f"task score {sparkline(self.outcomes)}", style="cyan"), Text(step_summary(metrics)), sample
            )
        )

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self.console.print(f"held-out {measure(evaluation)} after step {step}: {share(evaluation)}", highlight=False)

    def warned(self, step: int, message: str) -> None:
        # As Text, not markup: a message may quote text from a model or a file.
        self.console.print(Text(f"warning at step {step}: {visible(message, MAX_SHOWN)}", style="yellow"))

    def stop(self) -> None:
        self.live.stop()
