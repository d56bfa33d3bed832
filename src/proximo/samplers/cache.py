"""Keys and values of a decode batch, and the readers that fill and read them.

A slot holds one row. Live rows always occupy the first slots, so a layer reads a plain slice of the cache:
no gather, no page table, and rows that have ended cost nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from proximo.shapes import Bool, Float, Int

ALIGNMENT = 16
"""Lengths are rounded up to it: kernels like aligned masks, and fewer shapes occur."""


def aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


class PrefillReader:
    """Causal attention over prompts padded on the right, remembering every layer's keys and values.

    A real token never looks at the padding behind it, so no mask is needed.
    """

    def __init__(self) -> None:
        self._layers: list[Float[Tensor, "2 R K S D"]] = []

    @property
    def memory(self) -> Float[Tensor, "N 2 R K S D"]:
        """Of all N layers: keys and values."""
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


class Cache:
    """All layers' keys and values in one tensor, so that moving a row is one operation."""

    def __init__(self, prefix: Float[Tensor, "N 2 K S D"], slots: int, length: int) -> None:
        """Room for `slots` rows of `length` tokens, of the kind that `prefix` is."""
        layers, two, heads, _, width = prefix.shape
        # Zeros, since attention multiplies what lies behind a row's end by 0: it must not be NaN.
        self.memory = prefix.new_zeros(layers, two, slots, heads, aligned(length), width)

    def enter(self, prefix: Float[Tensor, "N 2 K S D"], *, first: int, count: int) -> None:
        """Put a prompt into `count` slots from the first on."""
        self.memory[:, :, first : first + count, :, : prefix.shape[3]] = prefix.unsqueeze(2)

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of rows to other slots."""
        assert not set(sources) & set(targets)
        if sources:
            self.memory[:, :, targets, :, :length] = self.memory[:, :, sources, :, :length]


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
        slots = torch.arange(len(self.positions), device=self.positions.device)
        self.keys[slots, :, self.positions] = key.squeeze(2)
        self.values[slots, :, self.positions] = value.squeeze(2)
        # The H / K query heads of a key-value head stand in for positions: each key is then read once
        # for all of them, by any attention kernel and with no repeated copy.
        rows, heads, _, width = query.shape
        output = scaled_dot_product_attention(
            query.reshape(rows, key.shape[1], -1, width), self.keys, self.values, attn_mask=self.visible, scale=scale
        )
        return output.reshape(rows, 1, heads, width)


def decode_reader(cache: Cache, positions: Int[Tensor, " R"], longest: int) -> DecodeReader:
    """`positions` are the new tokens' places in their rows, all under `longest`."""
    span = aligned(longest)
    visible = torch.arange(span, device=positions.device) <= positions.unsqueeze(1)
    return DecodeReader(cache.memory[:, :, : len(positions), :, :span], positions, visible[:, None, None])
