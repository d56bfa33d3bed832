"""Options of `proximo bench`, parsed without the command line's dependencies: GPU machines often lack them."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from proximo.planning.published_shapes import SHAPES, WRITTEN
from proximo_lab.bench.own import OwnRow

VLLM = "vllm"
PEERS = ("best", "default", "static", "compiled", VLLM)


@dataclass(frozen=True)
class BenchOptions:
    only: tuple[str, ...] = ()
    """Rows to measure. Empty: all rows for this device."""
    own: OwnRow | None = None
    """A row of the user's own to measure instead."""
    steps: int = 5
    """Measured repetitions, after the comparison of numbers and the warm-up."""
    warmup: int = 1
    device: str = "auto"
    peers: tuple[str, ...] = ("best", "default", "static")
    """TRL settings to compare with, and `vllm` for rollouts."""
    vllm_python: str | None = None
    """The Python that has vLLM. None: this one."""
    ablate: bool = False
    """True to switch our own techniques off one by one instead of measuring TRL."""
    token_budget: int | None = None
    """Tokens per forward pass of Proximo. None: as in a run."""
    peer_rows: int | None = None
    """Rows of TRL's micro-batch at its best settings. None: the workload's, halved while memory runs out."""
    threads: int = 1
    """CPU threads; more than one is fair only on a quiet machine."""
    results: str = "benchmarks/results"
    """Folder for the JSON file."""
    commit: str | None = None
    """Commit of the code, stored with the readings. None: as git says, if it does."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0 or self.threads < 1:
            raise ValueError(
                f"steps is {self.steps}, warmup {self.warmup}, threads {self.threads}: give at least 1, 0 and 1"
            )
        if self.own is not None and (self.only or self.ablate):
            raise ValueError(
                "shape is given with only or ablate: a row of your own is measured by itself, leave them out"
            )
        unknown = [name for name in self.peers if name not in PEERS]
        if unknown:
            raise ValueError(f"peers has {unknown[0]!r}: give some of {', '.join(PEERS)}, or none")


def parsed(arguments: Sequence[str], tables: Sequence[tuple[str, str]], prog: str) -> tuple[str, BenchOptions]:
    """The table's name and the options; `tables` are names with descriptions."""
    listed = "\n".join(f"  {name:<9}{what}" for name, what in tables)
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Measure Proximo, and TRL's GRPOTrainer for comparison if it is installed.\n\n"
        f"tables:\n{listed}\n\n{prog} page writes the tables of docs/performance.md from the stored readings.",
        epilog=f"examples:\n  {prog} rollout --peers none\n  {prog} step --steps 10 --device cuda\n  {prog} page",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = BenchOptions()
    parser.add_argument("table", choices=[name for name, _ in tables], help="table to measure")
    parser.add_argument("--only", nargs="+", default=(), metavar="ROW", help="measure only these rows")
    _add_own(parser)
    parser.add_argument(
        "--steps", type=int, default=default.steps, metavar="N", help="measured repetitions (default: 5)"
    )
    parser.add_argument(
        "--warmup", type=int, default=default.warmup, metavar="N", help="repetitions before measuring (default: 1)"
    )
    parser.add_argument("--device", default=default.device, help="device: auto, cpu or cuda (default: auto)")
    parser.add_argument(
        "--peers",
        nargs="+",
        default=default.peers,
        metavar="SETTING",
        help=f"TRL settings: {', '.join(PEERS[:-1])}; {VLLM} for rollouts, if it is installed; or none",
    )
    parser.add_argument("--vllm-python", metavar="FILE", help="the Python that has vLLM (default: this one)")
    parser.add_argument("--ablate", action="store_true", help="instead of TRL, measure Proximo with each technique off")
    parser.add_argument("--token-budget", type=int, metavar="N", help="tokens per forward pass of Proximo")
    parser.add_argument("--peer-rows", type=int, metavar="N", help="rows of TRL's micro-batch at its best settings")
    parser.add_argument("--threads", type=int, default=default.threads, metavar="N", help="CPU threads (default: 1)")
    parser.add_argument(
        "--results",
        default=default.results,
        metavar="DIR",
        help="folder for the JSON file (default: benchmarks/results)",
    )
    parser.add_argument(
        "--commit", metavar="ID", help="commit of this code, where it is no git checkout; stored with the readings"
    )
    given = vars(parser.parse_args(list(arguments)))
    table = given.pop("table")
    peers = () if list(given["peers"]) == ["none"] else tuple(given["peers"])
    try:
        if VLLM in peers and table != "rollout":
            raise ValueError(f"peers has '{VLLM}', which makes rollouts alone: measure them with {prog} rollout")
        return table, BenchOptions(own=_own_row(given), **given | {"only": tuple(given["only"]), "peers": peers})
    except ValueError as error:
        parser.error(str(error))


def _add_own(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a row of your own (rollout, train, step, start)")
    names = ", ".join(shape.name for shape in SHAPES)
    group.add_argument("--shape", help=f"the model: {names}, or {WRITTEN}")
    group.add_argument("--groups", type=int, help="prompts (default 16)")
    group.add_argument("--siblings", type=int, help="completions of each prompt (default 16)")
    group.add_argument("--prompt", type=int, help="tokens of each prompt (default 512)")
    group.add_argument("--lengths", help="tokens of each completion (default 512), or MEAN:LIMIT for ends at random")


def _own_row(given: dict[str, Any]) -> OwnRow | None:
    """Take the fields of a row of the user's own out of the arguments."""
    named = {field.name: given.pop(field.name) for field in fields(OwnRow)}
    named = {name: value for name, value in named.items() if value is not None}
    if named and "shape" not in named:
        name, value = next(iter(named.items()))
        raise ValueError(f"{name} is {value} without a shape: give --shape too")
    return OwnRow(**named) if named else None
