"""Keys and values of a decode batch in slots, and the readers that fill and read them.

A slot has room for the longest row. Live rows always occupy the first slots, so a layer reads a plain slice of the
cache: fast on a CPU. On a GPU keys and values lie in pages, see paged.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from proximo.models.model_types import PreTrainedModel
from proximo.models.packing.attention import head_width
from proximo.samplers.embedded.row_state import DecodeTable
from proximo.types.tensor_types import Bool, Float, Int

ALIGNMENT = 16
"""Lengths are rounded up to it: kernels like aligned masks, and fewer shapes occur."""


def aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class KeyShape:
    """Shape of a model's keys and values."""

    layers: int
    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return self.layers * 2 * self.heads * self.width * self.dtype.itemsize

    def zeros(self, rows: int, tokens: int) -> Float[Tensor, "N 2 R K S D"]:
        """Zeros, not empty memory: attention multiplies what lies behind a row's end by 0, so it must not be NaN."""
        shape = (self.layers, 2, rows, self.heads, aligned(tokens), self.width)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def key_shape(model: PreTrainedModel) -> KeyShape:
    config, weight = model.config, model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return KeyShape(
        config.num_hidden_layers, config.num_key_value_heads, head_width(config), weight.dtype, weight.device
    )


class PrefillReader:
    """Causal attention over prompts padded on the right, remembering every layer's keys and values.

    A real token never looks at the padding behind it, so no mask is needed.
    """

    def __init__(self) -> None:
        self._layers: list[Float[Tensor, "2 R K S D"]] = []

    @property
    def memory(self) -> Float[Tensor, "N 2 R K S D"]:
        """Keys and values of all N layers."""
        return torch.stack(self._layers)

    def layer(self, number: int) -> "PrefillReader":
        assert number == len(self._layers)
        return self

    def read(
        self,
        query: Float[Tensor, "R H S D"],
        key: Float[Tensor, "R K S D"],
        value: Float[Tensor, "R K S D"],
        scale: float,
    ) -> Float[Tensor, "R S H D"]:
        self._layers.append(torch.stack((key, value)))
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return output.transpose(1, 2)


class SlotCache:
    """Prompt and own tokens of each row side by side, all layers in one tensor: moving a row is one operation."""

    def __init__(self, shape: KeyShape, max_prompt_tokens: int, slots: int, room: int) -> None:
        self._memory = shape.zeros(slots, max_prompt_tokens + room)
        self._prompt_room, self._live = max_prompt_tokens, 0

    def clear(self) -> None:
        """No rows."""
        self._live = 0

    def reserve(self, prompt: tuple[int, ...], entering: int) -> bool:
        """Each slot has room for a prompt."""
        return True

    def grow(self, needs: Sequence[int]) -> bool:
        """Each slot has room for the longest completion."""
        return True

    def enter(self, prompt: tuple[int, ...], prefix: Float[Tensor, "N 2 K T D"], *, count: int) -> None:
        """Rows of a prompt, behind those that are there."""
        self._memory[:, :, self._live : self._live + count, :, : len(prompt)] = prefix.unsqueeze(2)
        self._live += count

    def release(
        self, gone: Sequence[int], sources: Sequence[int], targets: Sequence[int], own_tokens: int, left: int
    ) -> None:
        """Rows leave; others, of at most `own_tokens` own tokens, move into holes; the first `left` slots stay."""
        assert not set(sources) & set(targets)
        length = self._prompt_room + own_tokens
        if sources:
            self._memory[:, :, targets, :, :length] = self._memory[:, :, sources, :, :length]
        self._live = left

    def settle(self) -> None:
        """Do nothing: no notes are kept about rows."""

    def reader(self, rows: int, table: DecodeTable, longest: int) -> "DecodeReader":
        """`longest` is the length of the longest row, its new token included."""
        positions = table.positions(rows)
        span = min(aligned(longest), self._memory.shape[4])
        visible = torch.arange(span, device=positions.device) <= positions.unsqueeze(1)
        return DecodeReader(self._memory[:, :, :rows, :, :span], positions, visible[:, None, None])


@dataclass(frozen=True)
class DecodeReader:
    """One new token for each of the first R slots: remembers its key and value, and looks at all before it."""

    memory: Float[Tensor, "N 2 R K S D"]
    positions: Int[Tensor, " R"]
    visible: Bool[Tensor, "R 1 1 S"]
    """The same for all heads and layers."""

    def layer(self, number: int) -> "DecodeLayer":
        keys, values = self.memory[number]
        return DecodeLayer(keys, values, self.positions, self.visible)


@dataclass(frozen=True)
class DecodeLayer:
    keys: Float[Tensor, "R K S D"]
    values: Float[Tensor, "R K S D"]
    positions: Int[Tensor, " R"]
    visible: Bool[Tensor, "R 1 1 S"]

    def read(
        self,
        query: Float[Tensor, "R H 1 D"],
        key: Float[Tensor, "R K 1 D"],
        value: Float[Tensor, "R K 1 D"],
        scale: float,
    ) -> Float[Tensor, "R 1 H D"]:
        here = self.positions[:, None, None, None].expand_as(key)
        self.keys.scatter_(2, here, key)
        self.values.scatter_(2, here, value)
        # The H / K query heads of a key-value head stand in for positions: each key is then read once
        # for all of them, by any attention kernel and with no repeated copy.
        rows, heads, _, width = query.shape
        output = scaled_dot_product_attention(
            query.reshape(rows, key.shape[1], -1, width), self.keys, self.values, attn_mask=self.visible, scale=scale
        )
        return output.reshape(rows, 1, heads, width)
