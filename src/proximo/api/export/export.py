"""`proximo.export`: a trained model for other programs, without optimizer state and with a model card."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch

from proximo.api.export.card import model_card
from proximo.api.export.gguf_file import TYPES, refuse_gguf, write_gguf
from proximo.api.export.hub import Hub, ready_hub, upload
from proximo.api.export.merging import merge
from proximo.api.threads import as_found
from proximo.insight.folder import RunFolder
from proximo.insight.report.run_details import RunDetails, gather
from proximo.models import load_model, load_tokenizer, with_precision
from proximo.models.adapters.files import is_adapter
from proximo.models.model_types import PreTrainedModel
from proximo.models.shipped import resolve
from proximo.system.folders import MANIFEST, whole_file, write_folder
from proximo.system.opening import blob_of, check_utf8, copy_file, names, remove, write_new
from proximo.system.secrets import masked

CARD, CONFIG = "README.md", "proximo.config.toml"
FORMS = ("folder", "adapter", "hub", *(f"gguf:{name}" for name in TYPES))
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Exported:
    """Record of what was written."""

    place: str
    """The folder or file, or the address on the hub."""
    form: str
    rounding: float | None = None
    """Rounding errors of a merge, relative to the adapter's change; None if nothing was merged."""


def export(
    model: str | Path,
    to: str = "folder",
    out: str | Path | None = None,
    *,
    dtype: Precision | None = None,
    public: bool = False,
    api: Hub | None = None,
) -> Exported:
    """Write a model for other programs, without optimizer state and with a model card; what `proximo export` does.

    model   a run folder, one of its checkpoints, or any model that Proximo takes
    to      "folder": as transformers and vLLM load it; a LoRA adapter is merged into its base model
            "adapter": the adapter alone, as peft writes it
            "gguf:f32", "gguf:f16" or "gguf:q8_0": one file for llama.cpp; llama, qwen2 and qwen3 models
            "hub": upload to the Hugging Face hub, as "folder"
    out     the folder or file to write, which must not exist; for the hub the repository, USER/NAME. None: next to the
            run folder
    dtype   data type of the weights in a folder; None: as they are, and float32 after a merge
    public  make a new repository on the hub public
    api     in the place of huggingface_hub.HfApi

    Example:
        exported = proximo.export("runs/mine", to="folder", out="models/mine")
        proximo.evaluate(exported.place)
    """
    if to not in FORMS:
        raise ValueError(f"`to={to!r}`: give one of {', '.join(FORMS)}")
    path, details = Path(resolve(str(model))), _details(Path(model))
    if to == "hub":
        repository = _repository(out)
        hub = ready_hub(api)
        with TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            rounding = _write_whole(path, folder, dtype, details)
            return Exported(upload(hub, folder, repository, public), to, rounding)
    target = _target(Path(model), to, out)
    if to == "folder":
        return Exported(str(target), to, _write_whole(path, target, dtype, details))
    if dtype is not None:
        raise ValueError(f"dtype is {dtype!r}, and to is {to!r}: it is for a folder or the hub")
    if to == "adapter":
        if not is_adapter(path):
            raise ValueError(f"{str(model)!r} is a whole model, not an adapter: give `to='folder'`")
        write_folder(target, partial(_fill, path, path.name, details))
        return Exported(str(target), to)
    refuse_gguf()
    with as_found(), whole_file(target) as part:
        write_gguf(load_model(str(path)), load_tokenizer(str(path)), part, to.partition(":")[2], name=target.stem)
    return Exported(str(target), to)


def _write_whole(path: Path, target: Path, dtype: Precision | None, details: RunDetails | None) -> float | None:
    """Write a whole model. Its weights are copied unless they have to change; returns the rounding of a merge."""
    with TemporaryDirectory() as temporary:
        source, rounding = path, None
        if is_adapter(path):
            source = Path(temporary) / "model"
            rounding = merge(path, source, dtype=dtype or "float32").rounding
        elif dtype is not None or not path.is_dir():
            source = Path(temporary) / "model"
            with as_found():
                load_as(str(path), dtype or "float32").save_pretrained(source)
                load_tokenizer(str(path)).save_pretrained(source)
        write_folder(target, partial(_fill, source, path.name, details))
    return rounding


def load_as(path: str, dtype: Precision) -> PreTrainedModel:
    return with_precision(load_model(path), getattr(torch, dtype))


def _fill(source: Path, checkpoint: str, details: RunDetails | None, target: Path) -> None:
    """Copy a model's own files, which lie at the top of its folder, and add the card and the config of its run."""
    for name in names(source):
        file = source / name
        if file.is_file() and name != MANIFEST:
            copy_file(blob_of(file), target / name)
    if details is not None:
        step = re.fullmatch(r"step-([0-9]+)", checkpoint)
        card = model_card(details, int(step[1]) if step else None)
        for name, content in ((CARD, card), (CONFIG, masked(details.run.config_text))):
            remove(target / name)  # the model may have one
            write_new(target / name, content.encode())


def _details(model: Path) -> RunDetails | None:
    """Details of the run that a run folder or a checkpoint in it belongs to; None for other models."""
    for folder in (model, *model.absolute().parents[:2]):
        if (folder / "run.json").is_file():
            return gather(RunFolder(folder))
    return None


def _repository(out: str | Path | None) -> str:
    if out is None or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(out)):
        raise ValueError(f"out is {None if out is None else str(out)!r}: for the hub give the repository, USER/NAME")
    return str(out)


def _target(model: Path, to: str, out: str | Path | None) -> Path:
    """The path to write to; ValueError if something is there."""
    form, _, kind = to.partition(":")
    ending = f".{kind}.gguf" if kind else {"folder": "-exported"}.get(form, f"-{form}")
    whole = model.absolute()
    target = (whole.parent if whole.exists() else Path()) / f"{whole.name}{ending}" if out is None else Path(out)
    check_utf8(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir()) or kind):
        raise ValueError(f"out is {str(target)!r}, which is there already: give a new name")
    return target
