"""A model by name for a command: loaded, or refused with one clear error; and the machine made ready for it."""

import math
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo import machine
from proximo.cli.flags import refuse
from proximo.models import Precision, load_model, load_tokenizer, pick_device, pick_dtype
from proximo.models.inspecting import tensors
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
    """Threads and libraries as the model is fastest with here; None is a new one of ours, which is small.

    What is wrong with a model is said when it loads.
    """
    chosen = machine_of(name, device)
    if chosen is not None:
        chosen.apply()


def machine_line(name: str, device: str) -> str:
    """What a run would compute with."""
    chosen = machine_of(name, device)
    if chosen is None:
        return f"machine: {device}"
    if pick_device(device) != "cpu":
        return f"machine: {pick_device(device)}, {chosen.threads} CPU thread{'s' * (chosen.threads > 1)} beside it"
    speeds = ", ".join(f"{dtype} {speed:.0f} GFLOP/s" for dtype, speed in machine.readings().speeds.items())
    return f"machine: {chosen.threads} threads, oneDNN {'on' if chosen.onednn else 'off'} ({speeds}; float32 is used)"


def machine_of(name: str | None, device: str) -> machine.Machine | None:
    """None where the model or the device cannot be opened."""
    try:
        if pick_device(device) != "cpu":
            return machine.beside_gpu()
        parameters = 0 if name is None else num_parameters(Path(resolve(name)))
    except ValueError:
        return None
    return machine.machine_for(parameters)


def num_parameters(folder: Path) -> int | None:
    """From the headers of its files; None where there are none, as of a model that is still to be downloaded."""
    shapes = [shape for file in folder.glob("*.safetensors") for shape in tensors(file).values()]
    count = sum(map(math.prod, shapes))
    return count or None
