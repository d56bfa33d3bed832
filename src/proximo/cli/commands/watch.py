"""`proximo watch`: a run in the terminal."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.console import Group as Stack
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

from proximo.cli.arguments import refuse, refusing, take_number, take_switch
from proximo.cli.models import on_stdout
from proximo.insight.folder import RunFolder
from proximo.insight.terminal import RunSnapshot, Sample, look
from proximo.system.safe_text import visible

USAGE = """usage: proximo watch RUN [--once] [--every SECONDS]

Show a run in the terminal: whether it learns, its main curves, findings, the last events and the newest completion.
It is drawn anew while the run is in progress; Ctrl-C or the end of the run ends it. It only reads the run's folder.

--once           print it once, as for a pipe or a run that is not in progress
--every SECONDS  seconds between two looks (default: 2)

examples:
  proximo watch runs/a
  proximo watch runs/a --once
"""
TONES = {"good": "bold green", "bad": "bold red", "plain": "bold"}
SEVERITIES = {"failing": "bold red", "warning": "yellow"}
PIPE, NARROWEST, WIDEST, AROUND = 100, 10, 60, 44
"""Columns: of a pipe, of the shortest and longest sparkline, and of what stands around it."""
MAX_TEXT = 600
"""Maximum characters shown of a prompt, a completion or a message."""


def run(arguments: list[str]) -> int:
    once, seconds = take_switch(arguments, "--once"), take_number(arguments, "--every", float)
    if len(arguments) != 1 or arguments[0].startswith("-"):
        refuse(f"watch takes one run folder, not {' '.join(arguments) or 'none'}: proximo watch RUN")
    if seconds is not None and not 0.1 <= seconds <= 3600:
        refuse(f"--every {seconds:g}: give 0.1 to 3600 seconds")
    with refusing(OSError):
        folder = RunFolder(Path(arguments[0]))
        _watch(folder, on_stdout(PIPE, highlight=False), once or not sys.stdout.isatty(), seconds or 2.0)
    return 0


def _watch(folder: RunFolder, console: Console, once: bool, seconds: float) -> None:
    seen = look(folder)
    if once or seen.state != "running":
        console.print(drawn(seen, console.width))
        return
    with Live(drawn(seen, console.width), console=console, auto_refresh=False) as live:
        while seen.state == "running":
            time.sleep(seconds)
            seen = look(folder)
            live.update(drawn(seen, console.width), refresh=True)


@contextmanager
def panel(folder: Path) -> Iterator[None]:
    """Panel of a run below the lines of the command that trains it, where these go to a terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield
        return
    disable_progress_bar()  # those of transformers, while weights are read and written
    with Live(
        get_renderable=lambda: _now(folder, console.width), console=console, refresh_per_second=0.5, transient=True
    ):
        yield


def _now(folder: Path, width: int) -> Stack:
    """The run as it is; nothing before its first numbers are there."""
    try:
        return drawn(seen, width) if (seen := look(RunFolder(folder))).curves else Stack()
    except (OSError, ValueError):  # not begun, or in the middle of being written
        return Stack()


def drawn(seen: RunSnapshot, width: int) -> Stack:
    """Text to print, for a terminal of this width."""
    of = "" if seen.of_steps is None else f" of {seen.of_steps}"
    head = Text.assemble((visible(seen.name, MAX_TEXT), "bold"), f"  {seen.state}, step {seen.steps}{of}")
    verdict = Text.assemble((seen.verdict.word, TONES[seen.verdict.tone]))
    verdict.append(seen.verdict.sentence.removeprefix(seen.verdict.word))
    parts = [head, verdict, *_findings(seen), Text(), _curves(seen, width)]
    if seen.events:
        parts += [Text(), *(Text(visible(event, MAX_TEXT), style="dim") for event in seen.events)]
    return Stack(*parts, *([] if seen.sample is None else _sample(seen.sample)))


def _findings(seen: RunSnapshot) -> list[Text]:
    findings = ((f"{each.severity}: ", SEVERITIES[each.severity], each) for each in seen.findings)
    return [
        Text.assemble((word, style), f"{each.rule} since step {each.step}: {each.message}")
        for word, style, each in findings
    ]


def _curves(seen: RunSnapshot, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    room = max(NARROWEST, min(WIDEST, width - AROUND))
    for curve in seen.curves:
        table.add_row(Text(curve.title, style="dim"), Text(curve.line(room), style="cyan"), Text(curve.ends))
    return table


def _sample(sample: Sample) -> list[Text]:
    outcome = "unscored" if sample.outcome is None else f"task score {sample.outcome:g}"
    text = Text(visible(sample.prompt[-MAX_TEXT:].strip(), MAX_TEXT), style="dim")
    text.append(visible(sample.text, MAX_TEXT), style="not dim")
    return [Text(), Text(f"newest completion, step {sample.step}, {outcome}", style="dim"), text]
