"""`proximo explain`: an algorithm choice by choice, or the table of all."""

import textwrap

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proximo.algorithms import Algorithm, explain
from proximo.algorithms.explain import Card
from proximo.cli.arguments import asks_for_help, nearest, refuse
from proximo.cli.flags import changed
from proximo.cli.models import on_stdout

DESCRIPTION = (
    "Explain an algorithm choice by choice: its objective, its stages, the source of each choice, and what TRL and "
    "verl do. Flags change choices; --all prints a table of all algorithms."
)

EXAMPLES = """examples:
  proximo explain dapo
  proximo explain grpo --gate.type SoftGate
  proximo explain --all
"""


def run(arguments: list[str]) -> int:
    """Explain one algorithm, with any of its choices changed, or print the table."""
    names = ", ".join(card.name for card in explain.CARDS)
    if asks_for_help(arguments) and (not arguments or arguments[0].startswith("-")):
        _changed(explain.CARDS[1], ["--help"])
    match arguments:
        case ["--all"]:
            _print_table(_console())
        case ["--all", *rest]:
            refuse(f"explain --all takes nothing else, not {' '.join(rest)}")
        case [name, *flags]:
            card = explain.card(name)
            if card is None:
                refuse(f"no algorithm is called {name!r}{nearest(name, names.split(', '))}; the names are {names}")
            _print_card(_console(), card, _changed(card, flags))
    return 0


def _console() -> Console:
    """A console as wide as the terminal; wide enough for any table if the output goes to a file or a pipe."""
    return on_stdout(200)


def _changed(card: Card, flags: list[str]) -> Algorithm:
    """The card's algorithm with the changes that the flags make."""
    return changed(
        card.value,
        flags,
        prog="proximo explain",
        usage="(NAME | --all)",
        description=DESCRIPTION,
        help_more=f"algorithms:\n{_names()}\n{EXAMPLES}",
    )


def _names() -> str:
    return "\n".join(f"  {card.name:<22} {card.title}" for card in explain.CARDS)


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
    for line in explain.what_the_band_means(algorithm):
        _print_labelled(console, "", line, indent=2)
    console.print()
    for number, (stage, choice, peers) in enumerate(explain.stages(algorithm), start=1):
        _print_labelled(console, f"{number:>2} {stage}", choice, style="bold")
        default = getattr(card.value, stage)
        if default != getattr(algorithm, stage):
            _print_labelled(console, "", f"yours; {card.name} has {explain.choice(default)}", style="yellow")
        elif explain.source(card, stage):
            _print_labelled(console, "      paper", explain.source(card, stage))
        piece = getattr(algorithm, stage)
        for each in piece if isinstance(piece, tuple) else (piece,):
            for label, words in explain.own_words(each):
                _print_labelled(console, f"      {label}", words)
        for peer in peers:
            _print_labelled(console, "      TRL", peer.trl, style="dim")
            _print_labelled(console, "      verl", peer.verl, style="dim")
    console.print(
        "\ndocs/algorithms: derivations, and choices where the paper is silent\n", style="dim", highlight=False
    )


def _print_labelled(console: Console, label: str, text: str, style: str = "", indent: int = 13) -> None:
    """Print a label and the text next to it, wrapped to the terminal."""
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
