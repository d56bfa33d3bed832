"""Our attention behind transformers' public registry.

A model whose config says `proximo` calls `attend` in every layer. What attention means there is not the
layer's business but the caller's: it passes a `Reader` along with the tokens (`model(..., reader=...)`),
for packed training or for decoding from a cache. No model code is patched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from proximo.shapes import Float

NAME = "proximo"


@runtime_checkable
class Reader(Protocol):
    """Decides which keys and values each query sees."""

    def read(
        self,
        layer: int,
        query: Float[Tensor, "R H S D"],
        key: Float[Tensor, "R K S D"],
        value: Float[Tensor, "R K S D"],
        scale: float,
    ) -> Float[Tensor, "R S H D"]:
        """Attention output of each query. H query heads share K key-value heads."""
        ...


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    reader: Reader,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """What transformers calls; the mask is None because the reader has its own."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    return reader.read(layer, query, key, value, scaling), None


def no_mask(*_: object, **__: object) -> None:
    """Readers know the structure; a dense mask would cost tokens squared."""


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, no_mask)


def body(model: nn.Module) -> nn.Module:
    """The decoder without its head: hidden states, never logits."""
    return model.get_submodule("model")


def hidden_states(model: nn.Module, tokens: Tensor, positions: Tensor, reader: Reader) -> Float[Tensor, "R S E"]:
    """Run the decoder's layers with our attention; [rows, positions] in, hidden states out."""
    output = body(model)(input_ids=tokens, position_ids=positions, use_cache=False, reader=reader)
    return output.last_hidden_state


def uses_our_attention(model: nn.Module) -> bool:
    return model.config._attn_implementation == NAME  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with another attention for a while."""
    before = model.config._attn_implementation
    assert before is not None
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
