"""`proximo init`: write a commented config for a model and data."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from proximo.cli.arguments import asks_for_help, refuse, take, take_switch, write_out
from proximo.cli.configs import naming_flags, run_config
from proximo.cli.pieces import alternatives
from proximo.cli.run_folders import take_ranks, with_ranks
from proximo.config import toml
from proximo.recipes.defaults import Default
from proximo.rl.config import RunConfig

FLAGS = """flags of the command itself:
  --out FILE            file to write (default: run.toml); one that exists is not overwritten
  --ranks N             write a config for N processes that hold the model in shards; sets ranks.processes
  --skip-bad            skip bad rows of a data file instead of refusing it
"""

EXAMPLES = """examples:
  proximo init --model DIR --data problems.jsonl
  proximo init --model DIR --data problems.jsonl --algorithm dapo --adapter.type Lora --out dapo.toml
"""


def run(arguments: list[str]) -> int:
    """Exit status: 0 written, 2 refused."""
    out, skip_bad = Path(take(arguments, "--out") or "run.toml"), take_switch(arguments, "--skip-bad")
    ranks = take_ranks(arguments)
    if not asks_for_help(arguments) and (out.exists() or out.suffix != ".toml"):
        refuse(f"--out {out}: {'it exists' if out.exists() else 'no .toml file'}; give another name")
    config, defaults = run_config(
        arguments,
        prog="proximo init",
        usage="--model MODEL --data DATA [--out run.toml]",
        description="Write a commented config: what was chosen for a model and data, why, and what else is possible.",
        help_more=f"{naming_flags('init', FLAGS)}{EXAMPLES}",
        skip_bad=skip_bad,
    )
    config = config if ranks is None else with_ranks(config, ranks)
    write_out(out, commented(config, defaults, out))
    print(f"written to {out}\ncheck it     proximo train {out} --dry-run\nstart it     proximo train {out}")
    return 0


def commented(config: RunConfig, defaults: Sequence[Default], out: Path) -> str:
    """A config as TOML, with the reason above each value that was chosen and other choices next to each type. Names of
    code, which count from the current folder on the command line, count from the folder of the file there."""
    lines = toml.dumps(config, os.path.relpath(os.curdir, out.parent)).splitlines()
    reasons, others = {each.field: each.reason for each in defaults}, dict(alternatives(config))
    head = [
        f"# A run of Proximo. Check it with: proximo train {out} --dry-run",
        "# Comments say why a value was chosen for this model and data, and what else a type may be.",
        "# proximo train --help explains every field.",
        "",
    ]
    return "\n".join([*head, *_lines(lines, reasons, others)]) + "\n"


def _lines(lines: Sequence[str], reasons: dict[str, str], others: dict[str, list[str]]) -> Iterator[str]:
    table = ""
    for line in lines:
        if match := re.fullmatch(r"\[([\w.]+)\]", line):
            table = match[1]
        key = line.partition(" = ")[0]
        if (why := reasons.get(f"{table}.{key}".removeprefix("."))) is not None:
            yield f"# {why}"
        yield f"{line}  # or {', '.join(others[table])}" if key == "type" and table in others else line
