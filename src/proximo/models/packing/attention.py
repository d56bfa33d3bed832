"""Our attention behind transformers' public registry.

A model whose config says `proximo` calls `attend` in every layer. What attention means there is not the
layer's business but the caller's: it passes a `Reader` along with the tokens, for packed training or for
decoding from a cache. No model code is patched.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from proximo.tensor_types import Float

NAME = "proximo"


@runtime_checkable
class LayerReader(Protocol):
    """Decides which keys and values each query of one layer sees."""

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
class Reader(Protocol):
    """A layer's reader for each layer: what a compiled layer sees must not depend on its number."""

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
    """What transformers calls; the mask is None because the reader has its own."""
    # Angles are as wide as the residual stream; attention is as wide as the weights.
    return reader.read(query.to(value.dtype), key.to(value.dtype), value, scaling), None


def no_mask(*_: object, **__: object) -> None:
    """Readers know the structure; a dense mask would cost tokens squared."""


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, no_mask)


def body(model: nn.Module) -> nn.Module:
    """The decoder without its head: hidden states, never logits."""
    return model.get_submodule("model")


@runtime_checkable
class LayerRun(Protocol):
    """Runs one decoder layer; compiled or not."""

    def __call__(self, layer: nn.Module, hidden: Tensor, angles: tuple[Tensor, Tensor], reader: LayerReader) -> Tensor:
        """`angles` are the cosines and sines of the positions."""
        ...


def run_layer(layer: nn.Module, hidden: Tensor, angles: tuple[Tensor, Tensor], reader: LayerReader) -> Tensor:
    return layer(hidden, attention_mask=None, position_embeddings=angles, use_cache=False, reader=reader)


def hidden_states(
    model: nn.Module, tokens: Tensor, positions: Tensor, reader: Reader, run: LayerRun = run_layer
) -> Float[Tensor, "R S E"]:
    """Run the decoder's layers with our attention; [rows, positions] in, hidden states out.

    The loop over the layers is ours, and the same for all families of the fast path: so each layer can be handed
    its own keys and values, and one compilation serves all of them.
    """
    trunk = body(model)
    hidden = trunk.get_submodule("embed_tokens")(tokens)
    layers = trunk.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    dtype = hidden.dtype
    with wide_sums(dtype, hidden.device):
        hidden = hidden.to(torch.promote_types(dtype, torch.float32))
        angles = trunk.get_submodule("rotary_emb")(hidden, positions)
        for number, layer in enumerate(layers):
            hidden = run(layer, hidden, angles, reader.layer(number))
        return trunk.get_submodule("norm")(hidden).to(dtype)


def wide_sums(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Layers of half precision whose sum, the residual stream, is in float32.

    Rounded after each of its terms, it would be the largest error of a pass, and another one in each way of computing
    it: what separates a sampler from a learner.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(device.type, dtype=dtype) if half else nullcontext()


def head_width(config: PreTrainedConfig) -> int:
    """Not every family says it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def uses_our_attention(model: nn.Module) -> bool:
    return model.config._attn_implementation == NAME  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with another attention for a while."""
    before = model.config._attn_implementation
    assert before is not None
    if before == name:  # transformers' switch walks through all modules
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
