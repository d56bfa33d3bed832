"""A model by name for a command: loaded, or refused with one clear error."""

import sys

from rich.console import Console

from proximo.api import threads as machines
from proximo.cli.arguments import refusing
from proximo.models import Precision
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase


def open_model(
    name: str, device: str = "auto", dtype: Precision = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with refusing():
        return machines.open_model(name, device, dtype)


# The console


def on_stdout(width: int, *, highlight: bool = True) -> Console:
    """A console as wide as the terminal; `width` columns if the output goes to a file or a pipe."""
    return Console(highlight=highlight) if sys.stdout.isatty() else Console(width=width, highlight=highlight)
