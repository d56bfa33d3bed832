"""The command line. The only place that knows tyro.

proximo explain dapo                     what DAPO is, choice by choice
proximo explain dapo --gate.high 0.2     the same with one choice changed, and what is no longer DAPO
proximo explain --all                    the table of all algorithms
"""

import difflib
import sys
import textwrap
import warnings
from collections.abc import Sequence
from typing import NoReturn

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proximo import explain
from proximo.algorithms import Algorithm, UnusualChoice
from proximo.explain import Card

USAGE = """usage: proximo explain NAME [--stage.field VALUE ...]
       proximo explain --all

  explain NAME   the objective of an algorithm, its eleven choices, their sources,
                 and what TRL and verl call them; change a choice with a flag
                 (proximo explain NAME --help lists them)
  explain --all  the table of all algorithms

names: """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 for done and 2 for bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    names = ", ".join(card.name for card in explain.CARDS)
    match arguments:
        case [] | ["-h" | "--help", *_] | ["explain"] | ["explain", "-h" | "--help", *_]:
            print(USAGE + names)
            return 0
        case ["explain", "--all"]:
            _print_table(_console())
            return 0
        case ["explain", "--all", *rest]:
            _refuse(f"explain --all takes nothing else, not {' '.join(rest)}")
        case ["explain", name, *flags]:
            card = explain.card(name)
            if card is None:
                _refuse(f"no algorithm is called {name!r}{_nearest(name)}; the names are {names}")
            _print_card(_console(), card, _changed(card, flags))
            return 0
        case [command, *_]:
            _refuse(f"no command is called {command!r}; there is: explain")
    return 2


def _console() -> Console:
    """As wide as the terminal; wide enough for any table where the output goes to a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def _changed(card: Card, flags: list[str]) -> Algorithm:
    """The card's algorithm with the choices that the flags change."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnusualChoice)
        try:
            algorithm = tyro.cli(
                Algorithm,
                default=card.value,
                args=flags,
                prog=f"proximo explain {card.name}",
                description=card.idea,
                config=(tyro.conf.AvoidSubcommands,),
            )
        except ValueError as error:
            _refuse(str(error))
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"unusual: {message}", file=sys.stderr)
    return algorithm


def _print_card(console: Console, card: Card, algorithm: Algorithm) -> None:
    console.print(Text(f"{card.name.upper()}  {card.title}", style="bold"), Text(f"({card.paper})", style="dim"))
    console.print(card.idea, highlight=False)
    changes = explain.changes(card, algorithm)
    if changes:
        twin = explain.same_as(algorithm)
        now = f"; this is {twin.name}" if twin else ""
        console.print(
            Text(f"No longer {card.name.upper()}: {'; '.join(changes)}{now}.", style="yellow"), soft_wrap=True
        )
    console.print()
    for line in explain.objective(algorithm):
        _print_labelled(console, "", line, style="cyan", indent=2)
    console.print()
    for number, (stage, choice, peers) in enumerate(explain.stages(algorithm), start=1):
        _print_labelled(console, f"{number:>2} {stage}", choice, style="bold")
        default = getattr(card.value, stage)
        if default != getattr(algorithm, stage):
            _print_labelled(console, "", f"yours; {card.name} has {explain.choice(default)}", style="yellow")
        elif explain.source(card, stage):
            _print_labelled(console, "      paper", explain.source(card, stage))
        for peer in peers:
            _print_labelled(console, "      TRL", peer.trl, style="dim")
            _print_labelled(console, "      verl", peer.verl, style="dim")
    console.print(
        "\ndocs/algorithms: derivations, and choices where the paper is silent\n", style="dim", highlight=False
    )


def _print_labelled(console: Console, label: str, text: str, style: str = "", indent: int = 13) -> None:
    """A label, and beside it the text, wrapped to the terminal."""
    lines = textwrap.wrap(text, max(console.width - indent, 20), break_long_words=False, break_on_hyphens=False)
    for line in lines or [""]:
        console.print(
            Text(f"{label:<{indent}}", style="bold" if style == "bold" else "dim"), Text(line, style=style), sep=""
        )
        label = ""


def _print_table(console: Console) -> None:
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in explain.TABLE_HEAD:
        grid.add_column(column, overflow="fold")
    for row in explain.table():
        grid.add_row(*(Text(cell) for cell in row))
    console.print(grid)


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), [card.name for card in explain.CARDS], n=1)
    return f", the nearest is {close[0]!r}" if close else ""


def _refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    sys.exit(main())
