"""Compiled layers on a GPU: one compilation for all layers of a model and all sizes of a micro-batch.

On a CPU nothing is compiled: the compiler takes longer than it saves there.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from proximo.models.model_types import PreTrainedModel
from proximo.models.packing.attention import LayerReader, LayerRun, decoder_layers, head_width, run_layer
from proximo.models.packing.tiles import MAX_WIDTH, Tiles
from proximo.models.routing import routers

VARIANTS = 4096
"""Compilations of a function that torch may keep: of every model of this process, with and without gradient. Beyond
torch's own limit, of 8, a ninth model in a notebook would fail."""

ALLOWED = "_proximo_may_compile"
"""The attribute of a model that holds the choice, so that each model has its own and copies keep it."""


def allow_compiling(model: PreTrainedModel, allowed: bool) -> None:
    """Allow or forbid that passes of this model, and of copies made of it from now on, are compiled."""
    setattr(model, ALLOWED, allowed)


def compiles(model: PreTrainedModel) -> bool:
    """True if passes of this model are compiled: on a GPU, unless that was switched off for it."""
    return getattr(model, ALLOWED, True) and model.device.type == "cuda"


def reads_blocks(model: PreTrainedModel) -> bool:
    """True if a packed row is laid out in blocks, for attention by tiles."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    config = model.config.get_text_config()
    return compiles(model) and head_width(config) <= MAX_WIDTH and weight.dtype != torch.float64


def compiles_layers(model: PreTrainedModel) -> bool:
    """True if its layers are compiled. Those with experts are not: they are chosen by data, which no one graph can
    follow, and hooks listen to their routers."""
    return compiles(model) and not routers(model)


def checkpoint_layers(model: PreTrainedModel, number: int, *, offload: bool = False) -> None:
    """Let the first `number` layers of training passes keep only what enters them, with `offload` in the host's memory,
    and run again in the backward pass.

    The first ones, because the others have given back what they kept by the time a checkpointed layer runs again.
    Unlike transformers' switch this leaves the embeddings alone, so that sampling does not notice.
    """
    run = checkpoint_on_host if offload else checkpoint
    for index, layer in enumerate(decoder_layers(model)):
        settings: Any = layer
        settings.gradient_checkpointing = index < number
        settings._gradient_checkpointing_func = partial(run, use_reentrant=False)


def checkpoints(model: PreTrainedModel) -> bool:
    """True if any layer is checkpointed, here or by transformers' own switch (whose question has two names)."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def checkpoint_on_host(run: Callable[[Tensor], Tensor], hidden: Tensor, **options: Any) -> Tensor:
    """Torch's checkpoint, of which the input waits in the host's memory: pinned, so that copies do not wait."""
    with save_on_cpu(pin_memory=hidden.is_cuda):
        return checkpoint(run, hidden, **options)


def layer_run(model: PreTrainedModel) -> LayerRun:
    """Function that runs each layer of a training pass: compiled where that can be, and again in the backward pass
    where the layer is checkpointed, whether or not it is in training mode."""
    may_compile = compiles_layers(model)

    def run(layer: nn.Module, hidden: Tensor, angles: tuple[Tensor, Tensor], reader: LayerReader) -> Tensor:
        one = run_layer
        if may_compile and isinstance(reader, Tiles):  # only blocks keep the shapes apart from the sizes
            one = compiled_layer if not has_hooks(layer) else compiled_between if INSIDE in vars(layer) else run_layer
        plain = partial(_without_own_checkpoint, one, layer, angles, reader)
        if not (torch.is_grad_enabled() and getattr(layer, "gradient_checkpointing", False)):
            return plain(hidden)
        again: Any = layer._gradient_checkpointing_func
        # Outside of training mode nothing is drawn, and torch's generator is left alone.
        return again(plain, hidden, preserve_rng_state=layer.training)

    return run


def has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def compiled_layer(layer: nn.Module, hidden: Tensor, angles: tuple[Tensor, Tensor], reader: LayerReader) -> Tensor:
    """The number of blocks is marked, so that the first compilation is for any."""
    for tensor in (hidden, *angles):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled()(layer, hidden, angles, reader)


INSIDE = "_proximo_compiles_inside"
"""The attribute of a layer whose forward may be compiled although it has hooks: those run around it."""


def compile_between_hooks(layer: nn.Module) -> None:
    """Let a layer be compiled whose hooks gather its weights: its forward alone, after one hook and before the other.
    Other hooks keep a layer from being compiled."""
    setattr(layer, INSIDE, True)
    layer.forward = partial(_forward_between, layer)
    for module in layer.modules():
        # So marked, torch may skip the guards that tell layers apart (its skip_fsdp_guards).
        setattr(module, "_is_fsdp_managed_module", False)  # noqa: B010 -- torch's types know modules and tensors alone


def compiled_between(layer: nn.Module, hidden: Tensor, angles: tuple[Tensor, Tensor], reader: LayerReader) -> Tensor:
    return nn.Module.__call__(layer, hidden, compiled=(angles, reader))


def _forward_between(layer: nn.Module, hidden: Tensor, *, compiled: Any = None, **plain: Any) -> Tensor:
    """Run what a layer's call runs between its hooks."""
    return compiled_layer(layer, hidden, *compiled) if compiled else type(layer).forward(layer, hidden, **plain)


@cache
def _compiled() -> LayerRun:
    keep_variants()
    return torch.compile(forward, fullgraph=True)


def keep_variants() -> None:
    """Let torch keep compiled code for as many models as a process has."""
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, VARIANTS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, VARIANTS)


def forward(layer: nn.Module, hidden: Tensor, angles: tuple[Tensor, Tensor], reader: LayerReader) -> Tensor:
    """The class's forward, not the layer's call: checkpoints and hooks are handled outside."""
    return type(layer).forward(
        layer, hidden, attention_mask=None, position_embeddings=angles, use_cache=False, reader=reader
    )


def _without_own_checkpoint(
    run: LayerRun, layer: nn.Module, angles: tuple[Tensor, Tensor], reader: LayerReader, hidden: Tensor
) -> Tensor:
    """Run a layer with transformers' switch off, which in training mode would checkpoint it once more, inside ours: in
    the layer's call, or since transformers 5.23 in its forward. The switch is the layer's own and not its class's, on
    or off, so that what was compiled before it was first used still serves."""
    attributes = vars(layer)
    switched = attributes.get("gradient_checkpointing", False)
    attributes["gradient_checkpointing"] = False
    try:
        return run(layer, hidden, angles, reader)
    finally:
        attributes["gradient_checkpointing"] = switched
