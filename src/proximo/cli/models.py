"""A model by name for a command: loaded, or refused with one clear error; and the machine it runs on."""

from proximo.api import threads as machines
from proximo.cli.flags import refuse
from proximo.models import Precision, pick_device
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.system import machine


def open_model(
    name: str, device: str = "auto", dtype: Precision = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        return machines.open_model(name, device, dtype)
    except ValueError as error:
        refuse(str(error))


def machine_line(name: str, device: str) -> str:
    """What a run would compute with."""
    chosen = machines.machine_of(name, device)
    if chosen is None:
        return f"machine: {device}"
    threads = f"{chosen.threads} thread{'s' * (chosen.threads > 1)}"
    if pick_device(device) != "cpu":
        return f"machine: {pick_device(device)}, {threads} of the CPU"
    speeds = ", ".join(f"{dtype} {speed:.0f} GFLOP/s" for dtype, speed in machine.readings().speeds.items())
    return f"machine: {threads}, oneDNN {'on' if chosen.onednn else 'off'} ({speeds}; float32 is used)"
