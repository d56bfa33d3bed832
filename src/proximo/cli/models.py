"""A model by name for a command: loaded, or refused with one clear error; and the machine it runs on."""

import sys

from rich.console import Console

from proximo.api import threads as machines
from proximo.cli.arguments import refusing
from proximo.models import Precision, pick_device
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.system import machine


def open_model(
    name: str, device: str = "auto", dtype: Precision = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with refusing():
        return machines.open_model(name, device, dtype)


def machine_line(name: str, device: str) -> str:
    """Line on what a run would compute with."""
    chosen = machines.machine_of(name, device)
    if chosen is None:
        return f"machine: {device}"
    threads = f"{chosen.threads} thread{'s' * (chosen.threads > 1)}"
    if pick_device(device) != "cpu":
        return f"machine: {pick_device(device)}, {threads} of the CPU"
    speeds = ", ".join(f"{dtype} {speed:.0f} GFLOP/s" for dtype, speed in machine.readings().speeds.items())
    return f"machine: {threads}, oneDNN {'on' if chosen.onednn else 'off'} ({speeds}; float32 is used)"


# The console


def on_stdout(width: int, *, highlight: bool = True) -> Console:
    """A console as wide as the terminal; `width` columns if the output goes to a file or a pipe."""
    return Console(highlight=highlight) if sys.stdout.isatty() else Console(width=width, highlight=highlight)
