"""LoRA adapters inside a model: added, switched off for a while, and merged into the weights.

The model keeps its class and its own loop over the layers: peft puts a LoRA layer in the place of each chosen linear
layer, and everything that calls layers (packed passes, samplers, value models) computes base plus adapter. peft is
imported only where an adapter is used; the rest of Proximo works without it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from proximo.models.adapters.quantized import Quantization, dequantize, quantized_layers
from proximo.models.adapters.targets import SCORE, short_names, target_layers
from proximo.models.model_types import PreTrainedModel
from proximo.models.torch_globals import guarded

NAME = "default"
"""peft's own name for the one adapter of a model; files do not carry it."""


@dataclass(frozen=True)
class Lora:
    """A LoRA adapter: each chosen linear layer adds (alpha / rank) · B A x to its output, and only A and B are trained.

    Example: Lora(rank=8, alpha=16, targets=("q_proj", "v_proj"))
    """

    rank: int = 16
    """Rank of the adapter: rows of A and columns of B."""
    alpha: int = 32
    """Scale of the adapter; its output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter, such as q_proj. Empty: all but the head, experts and routers."""
    quantize_base: Quantization | None = None
    """Quantisation of the frozen weights under the adapter (QLoRA): `int8`, or `nf4`, which needs the extra qlora.
    None: they are kept in the model's dtype."""

    def __post_init__(self) -> None:
        for name in ("rank", "alpha"):
            if getattr(self, name) < 1:
                raise ValueError(f"adapter.{name} is {getattr(self, name)}: give at least 1")


def import_peft() -> ModuleType:
    """peft, or a ValueError that names the extra to install."""
    try:
        with _without_advice():
            import peft
    except ImportError as error:
        raise ValueError(f"an adapter needs the package peft ({error}): pip install 'proximo[lora]'") from error
    return peft


@contextmanager
def _without_advice() -> Iterator[None]:
    """Import without bitsandbytes' advice to install a package of kernels: peft imports it where it is
    installed, and no adapter of ours computes with it."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def has_adapter(model: nn.Module) -> bool:
    return bool(getattr(model, "peft_config", None))


@torch.no_grad()
def add_lora(model: PreTrainedModel, lora: Lora, *, base: str, seed: int) -> None:
    """Freeze the model and add an adapter that changes nothing yet: A is drawn with this seed, B is 0.

    `base` is the folder or hub id of the model, which the adapter's files name.
    """
    layers = target_layers(model, lora.targets)
    config = import_peft().LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=short_names(model, layers),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    inject(model, config)
    assert {name for name, _ in lora_layers(model)} == set(layers)
    random = torch.Generator().manual_seed(seed)
    for name, parameter in adapter_parameters(model).items():
        if name.endswith("lora_A.weight"):
            # As peft draws it, but from our own generator, and in the same dtype everywhere.
            bound = parameter.shape[1] ** -0.5
            drawn = torch.empty(parameter.shape, dtype=torch.float32)
            parameter.copy_(drawn.uniform_(-bound, bound, generator=random))


def adapter_size(model: PreTrainedModel, lora: Lora) -> int:
    """Parameters that an adapter of this model would have; the model may be a skeleton without weights."""
    layers = [model.get_submodule(name) for name in target_layers(model, lora.targets)]
    return sum(lora.rank * (each.in_features + each.out_features) for each in layers if isinstance(each, nn.Linear))


def inject(model: PreTrainedModel, config: Any) -> None:
    """Put the LoRA layers of a peft config into the model; in half precision they are kept in float32."""
    shell = nn.Module()
    # The model's own parts without its config: by a mixture's, peft would read names of layers as those of experts.
    shell._modules, shell._parameters = model._modules, model._parameters
    with guarded():  # peft draws first weights from torch's own generator; they are overwritten
        import_peft().inject_adapter_in_model(config, shell, adapter_name=NAME)
    model.peft_config = {NAME: config}
    model._hf_peft_config_loaded = True  # transformers' own methods, such as save_pretrained, know of it too
    for parameter in adapter_parameters(model).values():
        # A step of AdamW is often smaller than half precision can add to a weight.
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    for _, layer in lora_layers(model):
        layer.enable_adapters(True)  # as `adapter_off` leaves it, so that compiled layers see no difference
    model.train(model.training)  # new layers begin in training mode


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """A and B of each layer, by the names that peft gives them in files."""
    return {
        f"base_model.model.{name.replace(f'.{NAME}.', '.')}": parameter
        for name, parameter in model.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    }


def head_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a reward model's head, by the names that peft gives them in files; none of other models."""
    head = dict(model.named_children()).get(SCORE)
    return {} if head is None else {f"base_model.model.{SCORE}.{name}": each for name, each in head.named_parameters()}


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was before the adapter, exactly: the adapter's products are left out."""
    layers = [layer for _, layer in lora_layers(model)]
    trained = [each for each in adapter_parameters(model).values() if each.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    for each in trained:  # peft freezes them; what shards them would believe that nothing is trained
        each.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every weight as `merge` would leave them, one at a time; the model is not changed."""
    changed, quantized = dict(lora_layers(model)), dict(quantized_layers(model))
    adapters = {id(parameter) for parameter in adapter_parameters(model).values()}
    for name, parameter in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        if id(parameter) in adapters or (layer in quantized and kind == "scales"):
            continue
        weight, dtype = parameter.detach(), parameter.dtype
        if layer in quantized and kind == "codes":  # the scales come with them
            weight, dtype, kind = quantized[layer].weight.detach(), model.dtype, "weight"
        if kind == "weight" and layer.removesuffix(".base_layer") in changed:
            change = changed[layer.removesuffix(".base_layer")].get_delta_weight(NAME)
            weight = weight.to(change.dtype) + change
        yield f"{layer.removesuffix('.base_layer')}.{kind}", weight.to(dtype)


@torch.no_grad()
def merge(model: PreTrainedModel, dtype: torch.dtype | None = None) -> float:
    """Add the adapter to the weights, each sum rounded once, and remove its layers: a plain model again, also of a
    quantised base. The changed weights have `dtype` afterwards; None: the model's.

    Returns the size of the rounding errors relative to the adapter's change: in half precision, a change much smaller
    than the weights disappears.
    """
    errors, changes = 0.0, 0.0
    for name, layer in list(lora_layers(model)):
        dequantize(layer, torch.float32)
        linear = layer.get_base_layer()
        change = layer.get_delta_weight(NAME)
        exact = linear.weight.to(change.dtype) + change
        rounded = exact.to(dtype or model.dtype)
        errors += float((rounded.to(change.dtype) - exact).square().sum(dtype=torch.float64))
        changes += float(change.square().sum(dtype=torch.float64))
        linear.weight.data = rounded
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, linear)
    dequantize(model, dtype or model.dtype)  # layers without an adapter
    del model.peft_config
    model._hf_peft_config_loaded = False
    model.requires_grad_(True)
    return (errors / changes) ** 0.5 if changes else 0.0


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that have an adapter, by their full names."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))
