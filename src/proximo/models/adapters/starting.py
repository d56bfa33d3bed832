"""The base model of a new adapter: a whole one. Where training starts from an adapter, that one is merged first."""

from pathlib import Path

import torch

from proximo.models.adapters.lora import Lora, import_peft
from proximo.models.adapters.targets import target_layers
from proximo.models.devices import Precision, pick_dtype
from proximo.models.loading import base_of, has_score, load_model, load_tokenizer, read_config, skeleton
from proximo.models.progress_bars import bars_for_terminals
from proximo.models.reward_models import load_reward_model
from proximo.system.amounts import in_bytes
from proximo.system.folders import write_folder
from proximo.system.opening import check_utf8, names


def base_for(path: str) -> str:
    """Name of the model of this folder or hub id in a new adapter's files: a full path, so that peft finds it from
    anywhere, or the hub id. ValueError where there is no peft."""
    import_peft()
    return str(Path(path).absolute()) if Path(path).is_dir() else path


def check_adapter(path: str, lora: Lora) -> None:
    """ValueError where the model of this folder or hub id cannot have this adapter; its weights are not looked at."""
    import_peft()
    target_layers(skeleton(path), lora.targets)


def whole_base(path: str, folder: Path, dtype: torch.dtype) -> str:
    """Path of the whole model that a new adapter is added to: `path`, or `folder` where `path` is an adapter, which is
    merged into its base and written there once, in `dtype`. A resumed run reads what was written."""
    if base_of(path) == path:
        return path
    if not names(folder):
        _write_merged(path, folder, dtype)
    return str(folder)


def _write_merged(path: str, folder: Path, dtype: torch.dtype) -> None:
    check_utf8(folder)
    model = (load_reward_model if has_score(read_config(path)) else load_model)(path, dtype=dtype)
    tokenizer = load_tokenizer(path)

    def fill(partial: Path) -> None:
        with bars_for_terminals():
            model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)

    write_folder(folder, fill)


def base_dtype(dtype: Precision, device: str, *, sharded: bool) -> torch.dtype:
    """Data type of the model under a new adapter, where it is written: the run's. Shards are made of float32, to which
    each rank merges by itself."""
    return torch.float32 if sharded else pick_dtype(dtype, device)


def merging(path: str, lora: Lora | None, folder: str, dtype: torch.dtype) -> str:
    """Fate of the adapter that training starts from, in words; empty where it starts from a whole model."""
    if base_of(path) == path:
        return ""
    if lora is None:
        return f"{path} is an adapter: it is merged into its base model, and all weights are trained"
    size = sum(each.numel() for each in skeleton(path).parameters()) * dtype.itemsize
    written = f"written to {folder} ({in_bytes(size)})"
    return f"{path} is an adapter: merged into its base model it is the base of the new one, {written}"
