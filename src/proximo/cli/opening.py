"""A model by name for a command: loaded, or refused with one clear error; and the machine made ready for it."""

import math
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo import machine
from proximo.cli.flags import refuse
from proximo.models import Precision, load_model, load_tokenizer, pick_device, pick_dtype
from proximo.models.shipped import resolve


def open_model(
    name: str, device: str = "auto", dtype: Precision = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    suit_machine(name, device)
    try:
        path, place = resolve(name), pick_device(device)
        return load_model(path, dtype=pick_dtype(dtype, place), device=place), load_tokenizer(path)
    except ValueError as error:
        refuse(str(error))


def suit_machine(name: str | None, device: str = "auto") -> None:
    """Threads and libraries as the model is fastest with on this CPU; None is a new one of ours, which is small.

    What is wrong with a model is said when it loads.
    """
    chosen = _machine(name, device)
    if chosen is not None:
        chosen.apply()


def machine_line(name: str, device: str) -> str:
    """What a run would compute with."""
    chosen = _machine(name, device)
    if chosen is None:
        return f"machine: {device}"
    speeds = ", ".join(f"{dtype} {speed:.0f} GFLOP/s" for dtype, speed in machine.readings().speeds.items())
    return f"machine: {chosen.threads} threads, oneDNN {'on' if chosen.onednn else 'off'} ({speeds}; float32 is used)"


def _machine(name: str | None, device: str) -> machine.Machine | None:
    """None on a GPU, and where the model or the device cannot be opened."""
    try:
        place = pick_device(device)
        parameters = 0 if name is None else num_parameters(Path(resolve(name)))
    except (SafetensorError, ValueError):
        return None
    return machine.machine_for(parameters) if place == "cpu" else None


def num_parameters(folder: Path) -> int | None:
    """From the headers of its files; None where there are none, as of a model that is still to be downloaded."""
    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            count += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.offset_keys())
    return count or None
