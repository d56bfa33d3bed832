"""`proximo selfcheck`: check that model, task and algorithm work together."""

import json
import time
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proximo.cli.arguments import refusing, say, take_switch
from proximo.cli.configs import naming_flags, run_config
from proximo.cli.models import on_stdout, open_model
from proximo.recipes.selfcheck.checks import Check
from proximo.recipes.selfcheck.selfcheck import selfcheck
from proximo.rewards.grading import grading
from proximo.rl.config import RunConfig
from proximo.rl.plugin_errors import name_user_code
from proximo.system.lines import plain
from proximo.system.safe_text import visible

SELFCHECK_FLAGS = """flags of the command itself:
  --json                print the checks as JSON on stdout
exit status: 0 if every check passes, 1 if one fails
"""

EXAMPLES = """examples:
  proximo selfcheck
  proximo selfcheck run.toml --model DIR
"""


def run(arguments: list[str]) -> int:
    """Exit status: 0 if every check passes, 1 if one fails."""
    as_json = take_switch(arguments, "--json")
    config, _ = run_config(
        arguments,
        prog="proximo selfcheck",
        usage="[PRESET | run.toml] [--algorithm NAME]",
        description="Check on a few completions that model, task and algorithm work together. Nothing is written.",
        help_more=f"{naming_flags('selfcheck', SELFCHECK_FLAGS)}{EXAMPLES}",
    )
    start = time.perf_counter()
    checks = _checks(config)
    seconds = time.perf_counter() - start
    failed = [check for check in checks if not check.ok]
    warned = [check for check in checks if check.warns]
    if as_json:
        rows = [asdict(check) | {"value": plain(check.value), "ok": check.ok, "warns": check.warns} for check in checks]
        print(json.dumps({"model": config.model, "ok": not failed, "seconds": round(seconds, 3), "checks": rows}))
    else:
        _print_table(checks)
        looks = f", {len(warned)} to look at" if warned else ""
        print(f"{len(checks)} checks in {seconds:.1f} s, {len(failed)} failed{looks}")
    for check in warned:
        say(f"warning: {check.name} {_number(check.value)} ({check.detail})")
    if failed:
        say(f"selfcheck failed: {'; '.join(map(_fault, failed))}")
    return 1 if failed else 0


def _checks(config: RunConfig) -> list[Check]:
    with Console(stderr=True).status("checking"):
        model, tokenizer = open_model(config.model, config.device, config.dtype)
        with refusing(), name_user_code(config), grading():  # all checks use the same reward workers
            return list(selfcheck(config, model, tokenizer))


def _print_table(checks: list[Check]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("check", no_wrap=True)
    for column in ("result", "bound"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("ok", no_wrap=True)
    table.add_column("")
    for check in checks:
        word, style = _verdict(check)
        detail = check.detail.removeprefix("skipped: ")
        table.add_row(
            check.name,
            _number(check.value),
            _number(check.bound),
            Text(word, style),
            Text(visible(detail), style="dim"),
        )
    # Wide enough for any detail where the output goes to a file or a pipe.
    on_stdout(200).print(table)


def _verdict(check: Check) -> tuple[str, str]:
    """The status in one word, and its style."""
    if check.value is None:
        return "skipped", "dim"
    if check.warns:
        return "look", "bold yellow"
    return ("yes", "green") if check.ok else ("NO", "bold red")


def _fault(check: Check) -> str:
    return f"{check.name} {_number(check.value)}, bound {_number(check.bound)} ({check.detail})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
