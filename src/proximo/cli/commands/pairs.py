"""`proximo pairs`: rankings from a run's rollouts."""

import json
from dataclasses import asdict

from proximo.cli.arguments import refuse, refusing, take, take_switch
from proximo.cli.flags import changed
from proximo.supervised.pairs import Counts, PairsConfig, write_pairs

HELP = """flags of the command itself:
  --json  print the counts as JSON on stdout
examples:
  proximo pairs runs/a --out pairs.jsonl
  proximo pairs runs/a --out new.jsonl --steps 100:200 --old pairs.jsonl
"""


def run(arguments: list[str]) -> int:
    as_json = take_switch(arguments, "--json")
    config = changed(
        _named(arguments),
        arguments,
        prog="proximo pairs",
        usage="RUN --out PAIRS.jsonl [--json]",
        description="Rank a run's completions: one ranking for each prompt whose completions differ in task score.",
        help_more=HELP,
    )
    with refusing():
        counts = write_pairs(config)
    print(json.dumps({"out": config.out, **asdict(counts)}) if as_json else _result(config, counts))
    return 0


def _named(arguments: list[str]) -> PairsConfig:
    """Take the run folder and the output file from the arguments."""
    if {"-h", "--help"} & set(arguments):
        return PairsConfig("RUN", "PAIRS.jsonl")
    out = take(arguments, "--out")
    if not arguments or arguments[0].startswith("-"):
        refuse("pairs needs the folder of a run: proximo pairs RUN --out PAIRS.jsonl")
    if out is None:
        refuse("pairs needs --out PAIRS.jsonl, the file to write")
    with refusing():
        return PairsConfig(arguments.pop(0), out)


def _result(config: PairsConfig, counts: Counts) -> str:
    lines = [
        f"{counts.fresh} rankings from {counts.groups} groups; {counts.one_level} had completions of one level only",
        f"left out: {counts.truncated} truncated, {counts.unscored} unscored, {counts.empty} empty completions",
    ]
    if config.old is not None:
        short = f", {counts.old_missing} fewer than wanted: it has no more" if counts.old_missing else ""
        lines.append(f"{counts.old} old rankings from {config.old}{short}")
    return "\n".join([*lines, f"written to {config.out}"])
