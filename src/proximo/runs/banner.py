"""The banner of a run: labelled lines for a person, before it starts."""

import os
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from proximo.system.safe_text import visible

BannerLine = tuple[str, str]
"""A label, and its text; a text of several lines is one paragraph for each."""

NARROW, WIDE = 40, 120
"""Columns of the narrowest and the widest banner; one that goes to a file or a pipe is wide."""


def banner(lines: Sequence[BannerLine], width: int | None = None) -> list[str]:
    """Lines with their labels in one column and their texts wrapped beside it; those without a text are left out.
    `width` None: as wide as the terminal.

    Example: banner([("model", "tiny"), ("device", "cpu")]) == ["model   tiny", "device  cpu"]
    """
    filled = [(label, text) for label, text in lines if text]
    column = max((len(label) for label, _ in filled), default=0) + 2
    room = (terminal_width() if width is None else width) - column
    return [line for label, text in filled for line in _beside(label.ljust(column), visible(text), room)]


def _beside(label: str, text: str, room: int) -> list[str]:
    wrapped = [piece for paragraph in text.split("\n") for piece in _wrapped(paragraph, room)]
    indent = " " * len(label)
    return [f"{indent if number else label}{piece}".rstrip() for number, piece in enumerate(wrapped)]


def _wrapped(paragraph: str, room: int) -> list[str]:
    return textwrap.wrap(paragraph, room, break_on_hyphens=False) or [""]


def terminal_width() -> int:
    """Columns of the terminal that lines for a person go to, within what is readable."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError, AttributeError):  # no terminal, or a stream without a file
        columns = WIDE
    return min(max(columns, NARROW), WIDE)


def folder_lines(folder: str | Path, shows: str = "curves and every rollout") -> list[BannerLine]:
    """Folder of a run, and the commands to watch, stop and resume it; its page in the browser `shows` this."""
    run = shlex.quote(str(folder))
    return [
        ("run folder", str(folder)),
        ("watch", f"proximo watch {run}, or proximo view {run} for curves and every rollout in the browser"),
        ("stop", f"Ctrl-C saves the run; proximo resume {run} goes on with it"),
    ]
