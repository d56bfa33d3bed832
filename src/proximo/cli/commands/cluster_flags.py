"""Flags of `proximo plan` for many GPUs."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from proximo.cli.flags import read_number, refuse, take
from proximo.insight.folder import RunFolder
from proximo.planning.cards import Card, card
from proximo.planning.plan import Switch

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
class Asked:
    """What the flags for many GPUs say."""

    gpus: int
    staleness: tuple[int, ...]
    switch: Switch
    sigma: float | None
    run: RunFolder | None
    timed_on: Card | None
    per_node: int
    network: float
    engine_gpus: int | None
    report: Path | None


def take_cluster(arguments: list[str]) -> Asked | None:
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
    given = {name: take(arguments, f"--{name}") for name in names}
    if gpus is None:
        if alone := [f"--{name}" for name, value in given.items() if value is not None]:
            refuse(f"{alone[0]} is for a plan of many GPUs: give --gpus too")
        return None
    switch, run, timed = given["switch"] or "in_flight", given["from-run"], given["timed-on"]
    if switch not in get_args(Switch):
        refuse(f"--switch {switch}: give one of {', '.join(get_args(Switch))}")
    if timed is not None and run is None:
        refuse("--timed-on says where a run was timed: give --from-run too")
    try:
        return Asked(
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
    except ValueError as error:
        refuse(str(error))
