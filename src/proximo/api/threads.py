"""The machine made ready for a model, and left as it was found."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from proximo.api.messages import keep_quiet, say
from proximo.api.validate import check_free, refuse_used
from proximo.config import toml
from proximo.models import Precision, load_model, load_tokenizer, pick_device, pick_dtype
from proximo.models.loading import base_of
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.packing.support import supports_packing
from proximo.models.safe_files import tensors
from proximo.models.shipped import resolve
from proximo.rl.config import RunConfig
from proximo.runs.webhook import Webhook
from proximo.system import machine
from proximo.system.opening import make_folder, write_new

if TYPE_CHECKING:
    from proximo.distributed.rank0 import OnRanks, StageConfig

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended."""


@contextmanager
def as_found() -> Iterator[None]:
    """Threads, oneDNN and transformers' progress bars may be changed inside, and are afterwards as they were. The bars
    are off inside: they would run through our lines."""
    from transformers.utils import logging

    before, bars = machine.Machine.current(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        before.apply()
        if bars:
            logging.enable_progress_bar()


def open_model(
    name: str, device: str = "auto", dtype: Precision = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer, on the machine as it suits them; ValueError where it cannot be loaded."""
    suit_machine(name, device)
    path, target = resolve(name), pick_device(device)
    model = load_model(path, dtype=pick_dtype(dtype, target), device=target, keep_adapter=True)
    return model, load_tokenizer(path)


def transformers_model(name: str) -> PreTrainedModel:
    """A model for other libraries: with transformers' own attention, which ours cannot replace in `generate`, and an
    adapter merged into the weights. On the GPU if there is one."""
    target = pick_device("auto")
    model = load_model(resolve(name), dtype=pick_dtype("auto", target), device=target)
    if supports_packing(model):
        model.set_attn_implementation("sdpa")
    return model


def suit_machine(name: str | None, device: str = "auto") -> None:
    """Threads and libraries as the model is fastest with here; None is a new one of ours, which is small.

    An invalid model is reported when it is loaded.
    """
    chosen = machine_of(name, device)
    if chosen is not None:
        chosen.apply()


def machine_of(name: str | None, device: str) -> machine.Machine | None:
    """Machine for a model on a device; None where one of them cannot be opened."""
    try:
        if pick_device(device) != "cpu":
            return machine.beside_gpu()
        parameters = 0 if name is None else _num_parameters(resolve(name))
    except ValueError:
        return None
    return machine.machine_for(parameters)


def machine_words(name: str, device: str) -> str:
    """Threads and speed that a run would compute with."""
    chosen = machine_of(name, device)
    if chosen is None:
        return device
    threads = f"{chosen.threads} thread{'s' * (chosen.threads > 1)}"
    if pick_device(device) != "cpu":
        return f"{pick_device(device)}, {threads} of the CPU"
    speeds = ", ".join(f"{dtype} {speed:.0f} GFLOP/s" for dtype, speed in machine.readings().speeds.items())
    return f"{threads}, oneDNN {'on' if chosen.onednn else 'off'} ({speeds}; float32 is used)"


def _num_parameters(path: str) -> int | None:
    return num_parameters(Path(base_of(path) if Path(path).is_dir() else path))


def num_parameters(folder: Path) -> int | None:
    """Number of a model's parameters, from the headers of its files; None where there are none, as of a model that is
    still to be downloaded."""
    shapes = [shape for file in folder.glob("*.safetensors") for shape in tensors(file).values()]
    count = sum(map(math.prod, shapes))
    return count or None


@contextmanager
def on_ranks(config: "RunConfig | StageConfig") -> "Iterator[OnRanks | None]":
    """The object that holds the run on several processes, if it has any; a run of one imports nothing of it."""
    if config.ranks is None:
        yield None
        return
    from proximo.distributed.rank0 import conducting

    with conducting(config) as ranks:
        yield ranks


def on_processes(
    config: RunConfig,
    folder: Path,
    on_step: object,
    resume: bool,
    allow_change: Sequence[str],
    accept_lost: bool,
    track: Sequence[str],
    webhook: Webhook | None,
    *,
    quiet: bool,
) -> bool:
    """Train on several processes, which a call from Python has to start, if the config asks for them: True if `proximo
    train` has trained the run in its folder. ValueError where that failed."""
    if config.ranks is None or config.ranks.processes < 2 or "RANK" in os.environ:
        return False
    if on_step is not None:
        raise ValueError("on_step is given, but ranks are processes of their own: leave it out, or ranks")
    if not resume:
        refuse_used(folder)
    from proximo.distributed.launching import command_of, launch
    from proximo.distributed.on_ray import starting

    check_free(folder)
    arguments = [each for field in allow_change for each in ("--allow-change", field)]
    arguments += [*(["--accept-lost-rows"] if accept_lost else []), *(["--track", *track] if track else [])]
    make_folder(folder.parent)
    with starting(config.ranks) as start, TemporaryDirectory(dir=folder.parent, prefix=".ranks-") as temporary:
        file = Path(temporary) / "run.toml"
        write_new(file, toml.dumps(config).encode())
        command, tell = command_of(["train", str(file), "--run", str(folder), *arguments]), keep_quiet if quiet else say
        status = launch(command, config.ranks.processes, tell, folder, webhook, quiet=quiet, start=start)
    if status == INTERRUPTED:
        raise KeyboardInterrupt(f"stopped and saved; the same call resumes {folder}")
    if status:
        raise ValueError(
            f"ranks.processes is {config.ranks.processes}: `proximo train` ended with status {status}, and said why on "
            "stderr (quiet=False). A function of this process cannot be rewarded there: name it as file.py:function"
        )
    return True
