"""Adapters as peft writes them: adapter_config.json, which names the base model, and adapter_model.safetensors.

Where the base was quantised there is a third file, which peft does not read: it names the quantisation.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from proximo.models.adapters.lora import (
    NAME,
    adapter_parameters,
    has_adapter,
    head_parameters,
    import_peft,
    inject,
    lora_layers,
)
from proximo.models.adapters.quantized import QUANTIZATIONS, Quantization, quantize, quantized_layers
from proximo.models.adapters.targets import SCORE, names_for_peft
from proximo.models.model_types import PreTrainedModel
from proximo.models.progress_bars import bars_for_terminals
from proximo.models.safe_files import ADAPTER as CONFIG
from proximo.models.safe_files import ADAPTER_WEIGHTS as WEIGHTS
from proximo.models.safe_files import json_object, tensors

QUANTIZATION = "base_quantization.json"
"""File with the base model's quantisation while the adapter was trained, and the dtype its weights were rounded to."""
READ = ("r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "use_rslora")
READ += ("fan_in_fan_out", "layers_to_transform", "layers_pattern")
"""Fields of adapter_config.json that say which layers have an adapter, and what they add."""
WITHOUT_EFFECT = ("peft_type", "base_model_name_or_path", "peft_version", "task_type", "inference_mode", "lora_dropout")
WITHOUT_EFFECT += ("auto_mapping", "runtime_config", "megatron_core", "qalora_group_size", "loftq_config")
"""Fields that change nothing about a trained adapter that is read for its outputs."""
SCORES = {"task_type": "SEQ_CLS", "modules_to_save": [SCORE]}
"""Fields of the adapter of a reward model, whose head lies with it."""
HEADS = (SCORE, "classifier")
"""Names that peft gives as those of such a head."""
_PLAIN_NAME = re.compile(r"\^?(?:[\w-]|\\?\.)+", re.ASCII)
"""A layer's name, or its end; peft writes `^` before full names."""
DTYPES = ("float32", "bfloat16", "float16")
PLAIN = {"bias": "none", "init_lora_weights": (True, False, "gaussian"), "revision": "main"}
"""Fields with values that do not make it another kind of adapter."""


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def base_name(folder: Path) -> str:
    """Folder or hub id of the model that an adapter belongs to."""
    config = _read(folder)
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(f"path {str(folder)!r}: {CONFIG} names no base model; set base_model_name_or_path")
    return name


def scores(folder: Path) -> bool:
    """True if the adapter of this folder is a reward model's."""
    return _read(folder).get("task_type") == SCORES["task_type"]


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write the whole model, or its adapter alone where it has one."""
    if not has_adapter(model):
        with bars_for_terminals():
            model.save_pretrained(folder)
        return
    kept: Any = model.peft_config[NAME]
    layers = [name for name, _ in lora_layers(model)]
    head = head_parameters(model)
    config = kept.to_dict() | {"inference_mode": True} | names_for_peft(model, layers) | (SCORES if head else {})
    config = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensors = {name: each.detach().cpu().contiguous() for name, each in (adapter_parameters(model) | head).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if layers := quantized_layers(model):
        _, first = layers[0]
        settings = {"quantization": first.kind, "dtype": str(first.rounded_to).removeprefix("torch.")}
        (folder / QUANTIZATION).write_text(json.dumps(settings) + "\n")


def quantize_as(model: PreTrainedModel, folder: Path, device: str) -> None:
    """Quantise a base model as it was under the adapter of a folder, if it was."""
    if not (folder / QUANTIZATION).is_file():
        return
    settings = json_object(folder / QUANTIZATION)
    kinds: list[Quantization] = [each for each in QUANTIZATIONS if settings.get("quantization") == each]
    if not kinds or settings.get("dtype") not in DTYPES:
        raise ValueError(
            f"path {str(folder)!r}: {QUANTIZATION} holds {str(settings)[:200]}, which this version cannot read"
        )
    quantize(model, kinds[0], device, getattr(torch, settings["dtype"]))


def load_adapter(model: PreTrainedModel, folder: Path) -> set[str]:
    """Add the adapter of a folder to its base model; returns the names of the base's own weights that lie with it."""
    config = _read(folder)
    fields = {name: config[name] for name in READ if config.get(name) is not None}
    _check_fields(folder, fields)
    if weights := config.get("target_parameters"):
        fields["target_modules"] = [
            *fields.get("target_modules", ()),
            *(name.removesuffix(".weight") for name in weights),
        ]
    base = base_name(folder)
    try:
        made = import_peft().LoraConfig(**fields, task_type="CAUSAL_LM", base_model_name_or_path=base)
        inject(model, made)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, MemoryError) as error:
        reason = " ".join(str(error).split())  # peft prints whole modules
        raise ValueError(f"path {str(folder)!r}: the adapter does not fit its base model {base!r}: {reason}") from error
    return read_adapter(model, folder)


def _check_fields(folder: Path, fields: dict[str, Any]) -> None:
    """Refuse sizes that the adapter's weights do not have, before layers are made of them, and patterns. peft matches
    those against the name of each layer, and one that is made for it never ends: instead of a pattern, the layers are
    those that the weights name."""
    stored = tensors(folder / WEIGHTS)
    ranks = {shape[0] for name, shape in stored.items() if ".lora_A." in name and shape}
    patterns = [fields.get(name, {}) for name in ("rank_pattern", "alpha_pattern")]
    if not all(isinstance(each, dict) for each in patterns):
        raise ValueError(f"path {str(folder)!r}: {CONFIG} has a rank_pattern or alpha_pattern that is no object")
    for rank in (fields.get("r", 8), *patterns[0].values()):
        if type(rank) is not int or (ranks and not 1 <= rank <= max(ranks)):
            shown = str(rank)[:50]
            raise ValueError(
                f"path {str(folder)!r}: {CONFIG} has rank {shown}, its weights have {max(ranks, default=0)}"
            )
    keys = [key for each in patterns for key in each]
    layers = fields.get("layers_pattern") or ()
    for key in (*keys, *([layers] if isinstance(layers, str) else layers)):
        if not isinstance(key, str) or not _PLAIN_NAME.fullmatch(key):
            raise ValueError(f"path {str(folder)!r}: {CONFIG} has the pattern {str(key)[:100]!r}: name layers instead")
    chosen = (fields.get("target_modules"), fields.get("exclude_modules"))
    if any(isinstance(each, str) for each in chosen):
        fields.pop("exclude_modules", None)
        fields["target_modules"] = sorted(
            {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in stored if ".lora_" in name}
        )


@torch.no_grad()
def read_adapter(model: PreTrainedModel, folder: Path) -> set[str]:
    """Copy the numbers of a folder's adapter, and of a head that lies with it, into those of the model; ValueError
    where they are of another shape. Returns the names of the head's weights."""
    head = head_parameters(model) if scores(folder) else {}
    known = adapter_parameters(model) | head
    for name, tensor in adapter_tensors(known, folder).items():
        known[name].copy_(tensor)
    return {name.removeprefix("base_model.model.") for name in head}


def adapter_tensors(known: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's adapter; ValueError where they do not fit those of a model."""
    stored = load_file(folder / WEIGHTS)
    if others := sorted(stored.keys() ^ known.keys()):
        raise ValueError(
            f"path {str(folder)!r}: {WEIGHTS} and the model differ in {others[0]} ({len(others)} names in all): "
            "the adapter is of another model, or has more than A and B"
        )
    for name, parameter in known.items():
        if stored[name].shape != parameter.shape:
            shapes = f"{tuple(stored[name].shape)}, in the model {tuple(parameter.shape)}"
            raise ValueError(f"path {str(folder)!r}: {name} has the shape {shapes}: the adapter is of another model")
        if not stored[name].isfinite().all():
            raise ValueError(f"path {str(folder)!r}: NaN or infinity in {name}; fetch or save the adapter again")
    return stored


def _read(folder: Path) -> dict[str, Any]:
    """The config of a plain LoRA adapter; other kinds are refused, since they compute something else."""
    config = json_object(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"path {str(folder)!r}: {CONFIG} has peft_type {config.get('peft_type')!r}; only LORA is read")
    for key, value in config.items():
        plain = value in PLAIN[key] if isinstance(PLAIN.get(key), tuple) else value == PLAIN.get(key)
        plain = plain or (key == "target_parameters" and _name_layers(config))
        plain = plain or (key == "modules_to_save" and _names_head(config))
        if value and key not in (*READ, *WITHOUT_EFFECT) and not plain:
            raise ValueError(
                f"path {str(folder)!r}: {CONFIG} has {key} {value!r}: only plain LoRA is read; "
                "merge it with peft, and give the merged model"
            )
    return config


def _names_head(config: dict[str, Any]) -> bool:
    """True if `modules_to_save` is a reward model's head, by the names that peft has for it."""
    names = config["modules_to_save"]
    return config.get("task_type") == SCORES["task_type"] and isinstance(names, list) and set(names) <= set(HEADS)


def _name_layers(config: dict[str, Any]) -> bool:
    """True if `target_parameters` are weights of layers, as `names_for_peft` writes them, and no experts."""
    weights, modules = config["target_parameters"], config.get("target_modules") or []
    return all(isinstance(each, list) for each in (weights, modules)) and all(
        isinstance(name, str) and name.endswith(".weight") for name in weights
    )
