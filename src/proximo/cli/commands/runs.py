"""`proximo runs`: the runs below a folder, as a table."""

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from proximo.cli.arguments import refuse, refusing, say, take_switch
from proximo.cli.models import on_stdout
from proximo.insight.page.overview import Runs
from proximo.system.safe_text import visible

USAGE = """usage: proximo runs [DIR] [--json]

List the runs below a folder (default: runs), newest first: state, step, held-out score, algorithm and model. Of sft,
dpo and reward-model the held-out loss, and the share of held-out pairs that are ordered rightly. It only reads, and
executes nothing that a run names.

--json           print the list as JSON on stdout

examples:
  proximo runs
  proximo runs runs/sweep --json
"""
PIPE = 160
"""Columns of a pipe."""
COLUMNS = ("run", "state", "step", "held-out", "training", "algorithm", "model", "started")


def run(arguments: list[str]) -> int:
    as_json = take_switch(arguments, "--json")
    if len(arguments) > 1 or any(each.startswith("-") for each in arguments):
        refuse(f"runs takes one folder, not {' '.join(arguments)}: proximo runs [DIR]")
    folder = Path(arguments[0] if arguments else "runs")
    if not folder.is_dir():
        refuse(f"{folder} is no folder: give the one that your runs are in")
    with refusing(OSError):
        listed = Runs(folder).listed()["runs"]
    if as_json:
        print(json.dumps(listed))
        return 0
    if not listed:
        say(f"there are no runs in {folder}")
        return 0
    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="bold")
    for each in listed:
        table.add_row(*map(visible, _row(each)))
    on_stdout(PIPE, highlight=False).print(table)
    return 0


def _row(listed: dict[str, Any]) -> list[str]:
    """The cells of a run; of one that cannot be read the reason."""
    if "error" in listed:
        return [listed["name"], listed["state"], "", "", "", listed["error"]]
    step, steps = listed["step"], listed["steps"]
    started = str(listed["started"] or "")[:16].replace("T", " ")
    return [
        str(listed["name"]),
        listed["state"],
        "-" if step is None else f"{step}/{steps}" if steps is not None else str(step),
        _of_stage(listed) if listed["stage"] else _score(listed["held_out"], is_share=True),
        _score(listed["outcome"], is_share=listed["is_share"]),
        str(listed["stage"] or listed["algorithm"] or "-"),
        str(listed["model"] or ""),
        started,
    ]


def _of_stage(listed: dict[str, Any]) -> str:
    """Held-out values of a run that trains on a file. Its accuracy is one of pairs, not of answers."""
    loss, pairs = listed["held_out_loss"], listed["held_out_pairs"]
    of_pairs = "" if pairs is None else f", {_score(pairs, is_share=True)} of pairs"
    return "-" if loss is None else f"loss {_score(loss, is_share=False)}{of_pairs}"


def _score(value: object, *, is_share: bool) -> str:
    """Example: _score(0.5, is_share=True) == "50.0%"."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "-"
    return f"{value:.1%}" if is_share else f"{value:.3g}"
