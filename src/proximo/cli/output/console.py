"""The console for what goes to stdout."""

import sys

from rich.console import Console


def on_stdout(width: int, *, highlight: bool = True) -> Console:
    """A console as wide as the terminal; `width` columns if the output goes to a file or a pipe."""
    return Console(highlight=highlight) if sys.stdout.isatty() else Console(width=width, highlight=highlight)
