"""`proximo.merge`: an adapter and its base model, written as one whole model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from proximo.api.folders import PathLike
from proximo.api.threads import as_found
from proximo.models import load_model, load_tokenizer, with_precision
from proximo.models.adapters.lora import has_adapter
from proximo.models.adapters.lora import merge as merged_weights
from proximo.models.adapters.quantized import Quantization, quantized_layers
from proximo.models.loading import has_score, read_config
from proximo.models.reward_models import load_reward_model
from proximo.models.shipped import resolve
from proximo.runs.checkpoints import write_checkpoint
from proximo.system.opening import check_utf8, without_links


@dataclass(frozen=True)
class Merged:
    """A model that was written."""

    folder: Path
    rounding: float
    """Size of the rounding errors in the changed weights, relative to the adapter's change: 1 is as large as it."""
    quantization: Quantization | None = None
    """Quantisation of the base model whose weights the adapter was added to, after they were made dense again."""


def merge(adapter: PathLike, out: PathLike, *, dtype: Literal["float32", "bfloat16"] = "float32") -> Merged:
    """Write the base model of an adapter with the adapter added to its weights; what `proximo merge` does. An adapter
    that was trained on a quantised base is added to the same quantised weights, made dense again.

    adapter  a run folder, one of its checkpoints, or any folder or hub id of a LoRA adapter as peft writes it
    out      the folder to write, which must not exist or be empty; transformers, vLLM and Proximo load it
    dtype    data type of the written weights. bfloat16 halves the size, but a change much smaller than the weights is
             rounded away: `rounding` says how much

    Example:
        merged = proximo.merge("runs/lora", "models/merged")
        proximo.evaluate(merged.folder)
    """
    folder, path = without_links(out), resolve(str(adapter))
    check_utf8(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out is {str(out)!r}, which is there already: give a new folder")
    with as_found():
        tokenizer = load_tokenizer(path)
        scores = has_score(read_config(path))
        model = (load_reward_model if scores else load_model)(path, keep_adapter=True)
        if not has_adapter(model):
            raise ValueError(f"{str(adapter)!r} is a whole model, not an adapter: there is nothing to merge")
        kind: torch.dtype = getattr(torch, dtype)
        kinds: list[Quantization] = [layer.kind for _, layer in quantized_layers(model)]
        quantization = kinds[0] if kinds else None
        rounding = merged_weights(model, kind)
        write_checkpoint(folder, with_precision(model, kind).save_pretrained, tokenizer)
    return Merged(folder, rounding, quantization)
