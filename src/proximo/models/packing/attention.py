"""Our attention, registered in transformers' public registry.

A model whose config says `proximo` calls `attend` in every layer. The caller decides how attention is computed: it
passes a `ModelReader` along with the tokens, for packed training or for decoding from a KV cache. No model code is
patched.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from proximo.models.model_types import PreTrainedConfig, PreTrainedModel
from proximo.types.tensor_types import Float

NAME = "proximo"


@runtime_checkable
class LayerReader(Protocol):
    """Decides which keys and values each query of one layer attends to."""

    def read(
        self,
        query: Float[Tensor, "R H S D"],
        key: Float[Tensor, "R K S D"],
        value: Float[Tensor, "R K S D"],
        scale: float,
    ) -> Float[Tensor, "R S H D"]:
        """Attention output of each query. H query heads share K key-value heads."""
        ...


@runtime_checkable
class ModelReader(Protocol):
    """Gives each layer its reader, so that a compiled layer does not depend on its number."""

    def layer(self, number: int) -> LayerReader: ...


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    reader: LayerReader,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls; the mask is None because the reader has its own."""
    # Angles have the residual stream's dtype; attention has the weights' dtype.
    return reader.read(query.to(value.dtype), key.to(value.dtype), value, scaling), None


def no_mask(*_: object, **__: object) -> None:
    """No mask: readers know the structure, and a dense mask would cost tokens squared."""


@cache
def registered() -> str:
    """The name under which transformers knows our attention from now on."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, no_mask)
    return NAME


def body(model: nn.Module) -> nn.Module:
    """The decoder without its head: hidden states, never logits."""
    return model.get_submodule("model")


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    layers = body(model).get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    return layers


@runtime_checkable
class LayerRun(Protocol):
    """Runs one decoder layer, compiled or not."""

    def __call__(self, layer: nn.Module, hidden: Tensor, angles: tuple[Tensor, Tensor], reader: LayerReader) -> Tensor:
        """`angles` are the cosines and sines of the positions."""
        ...


def run_layer(layer: nn.Module, hidden: Tensor, angles: tuple[Tensor, Tensor], reader: LayerReader) -> Tensor:
    return layer(hidden, attention_mask=None, position_embeddings=angles, use_cache=False, reader=reader)


def hidden_states(
    model: nn.Module, tokens: Tensor, positions: Tensor, reader: ModelReader, run: LayerRun = run_layer
) -> Float[Tensor, "R S E"]:
    """Run the decoder's layers with our attention; [rows, positions] in, hidden states out.

    The loop over the layers is ours, and the same for all model families of the fast path, so each layer can get its
    own keys and values, and one compilation serves all layers.
    """
    trunk = body(model)
    hidden = trunk.get_submodule("embed_tokens")(tokens)
    dtype = hidden.dtype
    with wide_sums(dtype, hidden.device):
        hidden = hidden.to(torch.promote_types(dtype, torch.float32))
        angles = trunk.get_submodule("rotary_emb")(hidden, positions)
        for number, layer in enumerate(decoder_layers(model)):
            hidden = run(layer, hidden, angles, reader.layer(number))
        return trunk.get_submodule("norm")(hidden).to(dtype)


def wide_sums(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Run half-precision layers with the residual stream in float32.

    Rounding it after each term would be the largest error of a pass, and different in sampler and learner.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(device.type, dtype=dtype) if half else nullcontext()


def head_width(config: PreTrainedConfig) -> int:
    """Width of a head; not every model family's config has it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def uses_our_attention(model: nn.Module) -> bool:
    return model.config._attn_implementation == NAME  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Temporarily use another attention implementation."""
    before = model.config._attn_implementation
    assert before is not None
    if before == name:  # switching visits all modules
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
