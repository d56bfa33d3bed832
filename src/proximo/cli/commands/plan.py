"""`proximo plan`: memory and seconds of a run on a GPU, predicted before any weights are loaded."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from rich.table import Table

from proximo.api.planning import PROMPT_TOKENS, plan
from proximo.cli import laboratory
from proximo.cli.arguments import flag_names, read_number, refuse, refusing, take, take_list, take_number, take_switch
from proximo.cli.configs import base_config, naming_flags
from proximo.cli.flags import changed
from proximo.cli.models import on_stdout
from proximo.cli.run_folders import take_ranks, with_ranks
from proximo.insight.folder import RunFolder
from proximo.models.adapters.lora import Lora
from proximo.planning.cards import CARDS, GIB, DeviceCard, card, chosen_card
from proximo.planning.plan import RunPlan, Switch, Way
from proximo.planning.shapes import SHAPES
from proximo.recipes.defaults import learning_rate
from proximo.recipes.presets import ARITHMETIC

LABEL_WIDTH, VALUE_WIDTH = 46, 18

BASE = replace(
    ARITHMETIC,
    model="8B",
    sampling=replace(ARITHMETIC.sampling, max_tokens=1024),
    training=replace(ARITHMETIC.training, groups=16, group_size=16),
)
"""The run that is planned where no preset and no file is given; its task is not looked at."""

PLAN_FLAGS = f"""flags of the command itself:
  --model MODEL         a folder, config.json or hub id, or a shape by name: {", ".join(SHAPES)}
  --gpu NAME            {", ".join(card.name for card in CARDS)},
                        cpu, or auto (the default): this machine
  --gpu.memory GIB      numbers of the GPU, in place of the named one's or without a name: its memory in GiB,
  --gpu.bandwidth N     bytes per second,
  --gpu.arithmetic N    and dense bfloat16 operations per second, as in a datasheet
  --ranks N             plan N such GPUs that hold the model in shards, as train --ranks N does; [ranks] of a file, too
  --prompt-tokens N     tokens of a prompt (default {PROMPT_TOKENS})
  --mean-tokens N       tokens of an average completion (default: all reach --sampling.max-tokens)
  --adapter.type Lora   adapter of the LoRA column, with --adapter.rank and the like (default: rank {Lora().rank})
  --json                print the plan as JSON on stdout, in bytes and seconds
"""


EXAMPLES = """examples:
  proximo plan --model 8B --algorithm ppo --gpu H200
  proximo plan run.toml --gpu A100-40 --mean-tokens 600
  proximo plan --model 8B --gpu H100 --ranks 8
  proximo plan run.toml --gpu H100 --gpus 1000 --mean-tokens 8000 --report plan.html
"""


def run(arguments: list[str]) -> int:
    """Exit status: 0 if full fine-tuning or LoRA fits, 1 if neither does."""
    as_json = take_switch(arguments, "--json")
    name, numbers = (
        take(arguments, "--gpu"),
        [take_number(arguments, f"--gpu.{each}", float) for each in DeviceCard.NUMBERS],
    )
    cluster, ranks = take_cluster(arguments), take_ranks(arguments)
    if cluster is not None and ranks is not None:
        refuse("--gpus divides GPUs into ranks and engines itself, and --ranks says how many are ranks: leave one out")
    prompt, mean = take_number(arguments, "--prompt-tokens", int), take_number(arguments, "--mean-tokens", int)
    if {"--data"} & set(given := flag_names(arguments)) and "--model" not in given:
        refuse("--data is read with a model's tokenizer: give --model MODEL, too")
    config = changed(
        base_config(arguments, BASE),
        arguments,
        prog="proximo plan",
        description="Predict a run's memory and time on a GPU, before any weights are loaded.",
        help_more=f"{naming_flags('plan', PLAN_FLAGS + CLUSTER_FLAGS)}{EXAMPLES}",
        usage="[PRESET | run.toml] [--gpu NAME] [--gpus N]",
    )
    config = config if ranks is None else with_ranks(config, ranks)
    prompt = PROMPT_TOKENS if prompt is None else prompt
    with refusing():
        chosen = chosen_card(name, *numbers)
        if cluster is not None:
            run_cluster = laboratory("plan-gpus", "--gpus")
            return run_cluster(config, cluster, chosen, prompt_tokens=prompt, mean_tokens=mean, as_json=as_json)
        planned = plan(config, chosen, prompt_tokens=prompt, mean_tokens=mean)
    if as_json:
        print(json.dumps(planned.to_dict()))
    else:
        _print(planned)
    return 0 if any(way.fits for way in planned.ways) else 1


def _print(planned: RunPlan) -> None:
    console = on_stdout(160, highlight=False)
    size, card = planned.size, planned.card
    console.print(
        f"{planned.model}: {planned.parameters / 1e9:,.3f} B parameters in {planned.dtype} on {card.name} "
        f"({card.memory:,.1f} GiB, {card.bandwidth / 1e12:,.2f} TB/s, {card.arithmetic / 1e12:,.1f} TFLOP/s)",
        markup=False,
    )
    ends = "" if size.mean_tokens is None else f", {size.mean_tokens:,} on average"
    console.print(
        f"a step: {size.groups} prompts of {size.prompt_tokens:,} tokens × {size.group_size} completions of up to "
        f"{size.max_tokens:,}{ends}; everything below is predicted\n",
        markup=False,
    )
    for title, rows in (("GiB", _model_rows), ("", _memory_rows), ("", _size_rows), ("seconds", _second_rows)):
        console.print(_table(title, [dict(rows(way)) for way in planned.ways], planned.ways))
    lines = [*planned.verdicts, *(f"({each})" for each in planned.remarks), *_rates(planned.parameters)]
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def _rates(parameters: float) -> Iterator[str]:
    yield "a run that is given a model and no learning rate chooses one, here:"
    for way, has_adapter in (("full fine-tuning", False), ("LoRA", True)):
        chosen = learning_rate(parameters, has_adapter=has_adapter)
        yield f"  {way}: {chosen.shown}, {chosen.reason}"


def _table(title: str, columns: list[dict[str, str]], ways: Sequence[Way]) -> Table:
    """A row for each label of either way."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_header=bool(title))
    table.add_column(title, width=LABEL_WIDTH)
    for way in ways:
        table.add_column(way.name, justify="right", width=VALUE_WIDTH)
    for label in dict.fromkeys(label for column in columns for label in column):
        table.add_row(label, *(column.get(label, "–") for column in columns))
    return table


def _model_rows(way: Way) -> Iterator[tuple[str, str]]:
    for each in way.components:
        for what in ("weights", "gradients", "masters", "moments"):
            if size := getattr(each, what):
                yield f"{each.role}: {what}", _gib(size)


def _memory_rows(way: Way) -> list[tuple[str, str]]:
    use = way.memory
    return [
        ("keys and values of the first rollout", _gib(use.first_keys)),
        ("keys and values", _gib(use.keys)),
        ("activations of a pass", _gib(use.activations)),
        ("logits of a chunk, gradient of the head", _gib(use.head)),
        ("logits kept until the backward pass", _gib(use.logits)),
        ("peak of a rollout", _gib(use.rollout_peak)),
        ("peak of an update", _gib(use.update_peak)),
    ]


def _size_rows(way: Way) -> list[tuple[str, str]]:
    use = way.memory
    return [
        ("fits", "yes" if way.fits else "no"),
        ("completions decoded at a time", f"{use.live:,}"),
        ("tokens of a pass", f"{use.pass_tokens:,}"),
        ("passes over each group", f"{use.parts:,}"),
        ("layers run again in the backward pass", f"{use.checkpointed}{' (offloaded)' * use.offloaded}"),
        ("longest completions, at this group size", "none" if way.longest is None else f"{way.longest:,}"),
        ("largest groups, at this length", "none" if way.largest_group is None else f"{way.largest_group:,}"),
    ]


def _second_rows(way: Way) -> list[tuple[str, str]]:
    """Rows with the seconds of a step; none of a way that does not fit."""
    time = way.time
    if time is None:
        return []
    return [
        ("rollout", f"{time.rollout.total:,.1f}"),
        ("scoring: old policy, reference, reward models", f"{time.scoring:,.1f}"),
        ("update", f"{time.update:,.1f}"),
        ("step", f"{time.total:,.1f}"),
        ("sampled tokens per second of the rollout", f"{time.tokens / time.rollout.total:,.0f}"),
    ]


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}"


# Many GPUs

CLUSTER_FLAGS = """flags for many GPUs:
  --gpus N              plan N GPUs: the best split between learner ranks and engines for each staleness
  --staleness K,K,…     bounds that are simulated, up to 64 (default 0,1,2,4)
  --switch WHEN         when weights change: in_flight (the default), between (steps), or aggregate: in flight
                        without a hard bound, as other systems do
  --sigma X             tail of log-normal lengths with the mean --mean-tokens: the standard deviation of their
                        logarithm (default 1)
  --from-run RUN        take lengths from the rollouts of a run folder in their place
  --timed-on CARD       with --from-run: scale seconds by what that run took on this card
  --gpus-per-node N     default 8
  --network BYTES/S     between nodes, for each GPU (default 50e9)
  --engine-gpus N       GPUs of an engine (default: the fewest that hold the model)
  --report FILE.html    write a page with pictures
"""


@dataclass(frozen=True)
class ClusterOptions:
    """Values of the flags for many GPUs."""

    gpus: int
    staleness: tuple[int, ...]
    switch: Switch
    sigma: float | None
    run: RunFolder | None
    timed_on: DeviceCard | None
    per_node: int
    network: float
    engine_gpus: int | None
    report: Path | None


def take_cluster(arguments: list[str]) -> ClusterOptions | None:
    """The flags for many GPUs, taken from the arguments; None without `--gpus`."""
    names = (
        "staleness",
        "switch",
        "sigma",
        "from-run",
        "timed-on",
        "gpus-per-node",
        "network",
        "engine-gpus",
        "report",
    )
    gpus = take(arguments, "--gpus")
    steps = take_list(arguments, "--staleness", str.isdigit)
    given = {name: take(arguments, f"--{name}") for name in names}
    given["staleness"] = None if steps is None else ",".join(steps)
    if gpus is None:
        if alone := [f"--{name}" for name, value in given.items() if value is not None]:
            refuse(f"{alone[0]} is for a plan of many GPUs: give --gpus too")
        return None
    switch, run, timed = given["switch"] or "in_flight", given["from-run"], given["timed-on"]
    if switch not in get_args(Switch):
        refuse(f"--switch {switch}: give one of {', '.join(get_args(Switch))}")
    if timed is not None and run is None:
        refuse("--timed-on says where a run was timed: give --from-run too")
    with refusing():
        return ClusterOptions(
            gpus=read_number("--gpus", gpus, int),
            staleness=tuple(
                sorted({read_number("--staleness", each, int) for each in (given["staleness"] or "0,1,2,4").split(",")})
            ),
            switch=next(each for each in get_args(Switch) if each == switch),
            sigma=None if given["sigma"] is None else read_number("--sigma", given["sigma"], float),
            run=None if run is None else RunFolder(Path(run)),
            timed_on=None if timed is None else card(timed),
            per_node=read_number("--gpus-per-node", given["gpus-per-node"] or "8", int),
            network=read_number("--network", given["network"] or "50e9", float),
            engine_gpus=None
            if given["engine-gpus"] is None
            else read_number("--engine-gpus", given["engine-gpus"], int),
            report=None if given["report"] is None else Path(given["report"]),
        )
