"""`proximo plan --gpus N`: its flags, its table and its page."""

import json
import sys

from rich.table import Table

from proximo.cli.arguments import refusing, say
from proximo.cli.commands.plan import ClusterOptions
from proximo.cli.models import on_stdout
from proximo.planning.cards import GIB, DeviceCard
from proximo.rl.config import RunConfig
from proximo.system.folders import write_file
from proximo.system.opening import without_links
from proximo_lab.cluster_plan.lengths import Lengths, Recorded, Tailed
from proximo_lab.cluster_plan.pictures import ages, cluster_page, memory_rows
from proximo_lab.cluster_plan.search import Cluster, ClusterPlan, plan_cluster
from proximo_lab.cluster_plan.timings import PREDICTED, Timings, timings_of


def run_cluster(
    config: RunConfig,
    asked: ClusterOptions,
    chosen: DeviceCard,
    *,
    prompt_tokens: int,
    mean_tokens: int | None,
    as_json: bool,
) -> int:
    """Print the plan, and write its page if it is asked for."""
    with refusing(OSError):
        lengths = _lengths(config, asked, mean_tokens)
        plan = plan_cluster(
            config,
            Cluster(chosen, asked.gpus, asked.per_node, asked.network, asked.engine_gpus),
            lengths,
            prompt_tokens=prompt_tokens,
            staleness=asked.staleness,
            switch=asked.switch,
            timings=_timings(asked, lengths, prompt_tokens),
            say=say if sys.stderr.isatty() else lambda line: None,
        )
        if asked.report is not None:
            write_file(without_links(asked.report), cluster_page(plan).encode())
    if as_json:
        print(json.dumps(plan.to_dict()))
    else:
        _print(plan)
        if asked.report is not None:
            print(f"pictures: {asked.report}")
    return 0


def _lengths(config: RunConfig, asked: ClusterOptions, mean_tokens: int | None) -> Lengths:
    if asked.run is not None:
        return Recorded.of(asked.run)
    max_tokens = config.sampling.max_tokens
    if mean_tokens is not None:
        return Tailed(mean_tokens, max_tokens) if asked.sigma is None else Tailed(mean_tokens, max_tokens, asked.sigma)
    if asked.sigma is not None:
        raise ValueError(f"--sigma {asked.sigma:g} is the tail of lengths around their mean: give --mean-tokens too")
    return Tailed(max_tokens, max_tokens, 0.0)


def _timings(asked: ClusterOptions, lengths: Lengths, prompt_tokens: int) -> Timings:
    if asked.run is None or asked.timed_on is None:
        return PREDICTED
    mean = round(float(lengths.draw(1000, 1, seed=0).mean()))
    return timings_of(asked.run, asked.timed_on, prompt_tokens=prompt_tokens, mean_tokens=mean)


def _print(plan: ClusterPlan) -> None:
    console = on_stdout(160, highlight=False)
    cluster, size = plan.cluster, plan.size
    console.print(
        f"{plan.model}: {plan.parameters / 1e9:,.3f} B parameters on {cluster.gpus:,} {cluster.card.name} "
        f"({cluster.per_node} a node)",
        markup=False,
    )
    console.print(
        f"a step: {size.groups:,} prompts of {size.prompt_tokens:,} tokens × {size.group_size} completions; "
        f"{plan.lengths}; weights change {plan.switch.replace('_', ' ')}; everything below is predicted\n",
        markup=False,
        soft_wrap=True,
    )
    console.print(_best(plan))
    console.print()
    console.print(_memory(plan))
    console.print("\n" + "\n".join(_remarks(plan)), markup=False, soft_wrap=True)


def _best(plan: ClusterPlan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    names = "staleness", "learner ranks", "shard", "engines", "s a step", "update", "waiting", "push"
    for name in (*names, "learner busy", "engines busy", "requests/engine"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("trained tokens by age")
    for staleness in plan.staleness:
        point = plan.best(staleness)
        outcome = point.outcome
        table.add_row(
            str(staleness),
            f"{point.ranks.number:,}",
            f"{point.ranks.shard:,}",
            f"{point.engines:,} × {point.engine_gpus}",
            f"{point.seconds:,.1f}",
            f"{outcome.updating:,.1f}",
            f"{outcome.waiting:,.1f}",
            f"{outcome.pushing:,.1f}",
            f"{outcome.learner_busy:.0%}",
            f"{outcome.engines_busy:.0%}",
            f"{outcome.live_per_engine:,.0f} of {point.slots}",
            ages(outcome),
        )
    return table


def _memory(plan: ClusterPlan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("GiB of a learner rank", width=42)
    for staleness in plan.staleness:
        table.add_column(f"staleness {staleness}", justify="right", no_wrap=True)
    for name, sizes in memory_rows(plan):
        table.add_row(name, *(f"{size / GIB:,.1f}" for size in sizes))
    return table


def _remarks(plan: ClusterPlan) -> list[str]:
    fastest = min((plan.best(staleness) for staleness in plan.staleness), key=lambda point: point.seconds)
    best = plan.preferred
    title = "fastest" if best is fastest else f"least stale within 5 % of the fastest ({fastest.seconds:,.1f} s)"
    lines = [
        f"{title}: staleness {best.staleness}, {best.ranks.number:,} learner ranks and {best.engines:,} engines of "
        f"{best.engine_gpus}, {best.seconds:,.1f} s a step; {best.used:.0%} of the GPUs' time is used"
        + (f"; {best.idle:,} GPUs are left over" if best.idle else ""),
        f"to run it so: proximo train … {best.flags(plan.switch)}",
        "rank 0 also keeps the whole policy in its host's memory, to send and to save",
    ]
    if best.time.balance > 1.2:
        per_update = plan.size.update_groups
        lines.append(
            f"the fullest rank has {best.time.balance:.2f} times the average tokens: an update has {per_update:,} "
            f"groups, and whole groups go to {best.ranks.number:,} ranks; fewer mini-batches or more groups even it out"
        )
    lines.append(f"({plan.timings.remark}; grading, evaluation and checkpoints are left out)")
    return lines
