"""Stored help of the commands that are asked most. Rendering it imports torch to list every field; reading it does not.

`make pages` writes them anew; a test compares them with what is rendered.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

WIDTH = 80
"""Columns that the pages are rendered for."""
PAGED = ("train", "eval", "sft", "reward-model", "dpo")
"""Commands with a stored page."""


def folder() -> Path:
    """Where the pages are, one text file each."""
    return Path(__file__).with_name("pages")


def stored_help(command: str, arguments: Sequence[str]) -> str | None:
    """The page, where nothing but help is asked for; None where there is none, or another width is needed."""
    if command not in PAGED or list(arguments) not in (["-h"], ["--help"]):
        return None
    if "COLUMNS" in os.environ or shutil.get_terminal_size((WIDTH, 24)).columns < WIDTH:
        return None
    return stored_page(command)


def stored_page(command: str) -> str | None:
    """The page of a command; None where there is none."""
    if command not in PAGED:
        return None
    try:
        return (folder() / f"{command}.txt").read_text(encoding="utf-8")
    except OSError:
        return None


def write_pages() -> None:
    """Render and store all of them."""
    from proximo.cli.helping.completion import help_of

    os.environ["COLUMNS"] = str(WIDTH)
    folder().mkdir(exist_ok=True)
    for command in PAGED:
        (folder() / f"{command}.txt").write_text(help_of(command), encoding="utf-8")
