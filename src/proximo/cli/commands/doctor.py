"""`proximo doctor`: diagnose a run, or check this installation."""

import json
import textwrap
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from proximo.cli.arguments import refuse, refusing, take_switch
from proximo.cli.models import on_stdout
from proximo.insight.doctor.checkup import Checkup, check_up
from proximo.insight.doctor.installation import Part, installation, is_fine
from proximo.insight.folder import RunFolder
from proximo.runs.health import ENOUGH, ActiveFinding
from proximo.runs.step_profile import StepProfile, profile_lines
from proximo.system.safe_text import counted, visible

USAGE = """usage: proximo doctor [RUN] [--json]

Diagnose a run, or check this installation.

With a run folder: report problems that its metrics show, with the evidence, the first thing to do and where to look;
then its events, and whether its files are intact. Problems that are over are listed but do not count.
Exit status: 0 no problems, 3 warnings, 4 the run is failing.

Without RUN: report what is installed and what this machine can use. Exit status: 0, or 3 if runs would fail.

--json  print the report as JSON

examples:
  proximo doctor
  proximo doctor runs/a
"""
STATUS = {None: 0, "warning": 3, "failing": 4}
STYLES = {"failing": "bold red", "warning": "yellow", "ok": "green", "absent": "dim", "problem": "bold red"}
INDENT = 9
"""Width of the left margin, in columns."""
MAX_MESSAGE = 300
"""Maximum characters shown of an event's message."""


def run(arguments: list[str]) -> int:
    as_json = take_switch(arguments, "--json")
    if not arguments:
        return _installation(as_json)
    folder, *rest = arguments
    if rest or folder.startswith("-"):
        refuse(f"doctor takes one run's folder or none, and --json, not {' '.join(arguments)}")
    return _run(Path(folder), as_json)


# A run


def _run(folder: Path, as_json: bool) -> int:
    with refusing(OSError):
        checkup = check_up(RunFolder(folder))
    if as_json:
        print(json.dumps(checkup.to_dict() | {"run": str(folder)}))
    else:
        _print_checkup(_console(), folder, checkup)
    return STATUS[checkup.severity]


def _print_checkup(console: Console, folder: Path, checkup: Checkup) -> None:
    held_out = checkup.held_out
    learned = f", held-out task score {held_out[0]:.3f} → {held_out[-1]:.3f}" if len(held_out) > 1 else ""
    console.print(Text(visible(f"{folder}: {checkup.state}, {counted(checkup.steps, 'step')} of training{learned}")))
    console.print(Text(checkup.verdict.sentence))
    for active in checkup.standing:
        _print_finding(console, active, active.finding.severity, f", since step {active.finding.step}")
        if active.finding.show:
            _print_beside(console, "open", f"proximo view {folder}, then {checkup.link(active.finding)}")
    for active in checkup.passed:
        _print_finding(console, active, "over", f", steps {active.finding.step} to {active.last}")
    if checkup.events:
        console.print()
    for event in checkup.events:
        last = f", last at step {event.step}" if event.step > 0 else ""
        _print_beside(console, "event", f"{event.times} × {event.kind}{last}: {event.message}", MAX_MESSAGE)
    if stages := sorted(path.parent.name for path in folder.glob("*/run.json")):
        _print_beside(console, "stages", f"{', '.join(stages)} are runs of their own: proximo doctor {folder}/…")
    if checkup.profile is not None:
        _print_profile(console, checkup.profile)
    if waiting := [f"{each.rule} ({each.rows} of {each.needs})" for each in checkup.rules if each.state == "waiting"]:
        console.print()
        _print_beside(console, "rules", f"need more steps: {', '.join(waiting)}")
    number = len(checkup.standing)
    short = (
        f"; {counted(checkup.steps, 'step')}: too few for most rules, which need {ENOUGH}" if checkup.is_short else ""
    )
    summary = f"{counted(number, 'finding')}" if number else "nothing is wrong" + " so far" * checkup.is_short
    console.print(Text(f"\n{summary}{short}"))


def _print_profile(console: Console, profile: StepProfile) -> None:
    sentence, *table = profile_lines(profile)
    console.print()
    _print_beside(console, "profile", sentence)
    console.print(Text("\n".join(table)), soft_wrap=True)


def _print_finding(console: Console, active: ActiveFinding, word: str, when: str) -> None:
    finding = active.finding
    margin = (f"\n{word:<{INDENT}}", STYLES.get(word, "dim"))
    console.print(Text.assemble(margin, (finding.rule, "bold"), (when if finding.show else "", "dim")))
    _print_beside(console, "", finding.message)
    if active.latest != finding.message and not active.is_over:
        _print_beside(console, "now", active.latest)
    _print_beside(console, "first", finding.remedy)


# The installation


def _installation(as_json: bool) -> int:
    parts = installation(Path.cwd())
    fine = is_fine(parts)
    if as_json:
        print(json.dumps({"ok": fine, "parts": [asdict(part) for part in parts]}))
    else:
        _print_parts(_console(), parts)
    return 0 if fine else 3


def _print_parts(console: Console, parts: list[Part]) -> None:
    for part in parts:
        margin = (f"{part.standing:<{INDENT}}", STYLES[part.standing])
        console.print(Text.assemble(margin, f"{part.name}: {visible(part.detail)}"))


def _print_beside(console: Console, word: str, text: str, max_length: int | None = None) -> None:
    """Print a word in the margin and the text next to it, wrapped to the terminal."""
    width = max(console.width - INDENT, 40)
    lines = textwrap.wrap(visible(text, max_length), width, break_long_words=False, break_on_hyphens=False) or [""]
    for number, line in enumerate(lines):
        margin = (f"{word if number == 0 else '':<{INDENT}}", "dim")
        console.print(Text.assemble(margin, line), soft_wrap=True)


def _console() -> Console:
    """A console as wide as the terminal; lines that go to a file or a pipe are not wrapped."""
    return on_stdout(10_000, highlight=False)
