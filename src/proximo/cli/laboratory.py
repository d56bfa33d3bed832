"""Commands of the laboratory, a distribution of its own, which are found through its entry points."""

from collections.abc import Callable
from typing import Any

from proximo.cli.flags import refuse

LABORATORY = ("bench", "study")
"""Commands that stand there."""
INSTALL = "in a checkout of Proximo, pip install ./lab"


def laboratory(name: str, asked: str) -> Callable[..., Any]:
    """The function of an entry point; refused where the laboratory is not installed. `asked` is what the user gave."""
    from importlib.metadata import entry_points  # only these commands need it

    found = entry_points(group="proximo.commands", name=name)
    if not found:
        refuse(f"{asked} is in the laboratory, which is not installed: {INSTALL}")
    return next(iter(found)).load()
