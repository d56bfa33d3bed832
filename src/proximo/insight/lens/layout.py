"""Layout of a step's tokens: completions are concatenated, without padding.

Memory is then proportional to the number of tokens; with padding, one long completion would multiply it. Code that
needs rows of equal width gets a few rows at a time, see `parts`.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from proximo.models.packing.packed import similar
from proximo.types.tensor_types import Bool, Int

PLACES = 3 << 14
"""Maximum of rows times width that is padded at once; a longer completion is padded alone."""

LONG = 64
"""Mean tokens of rows that are copied one by one: for long rows many times as fast as by an index."""


@dataclass(frozen=True)
class TokenLayout:
    """N tokens of B rows, concatenated."""

    lengths: Int[Tensor, " B"]

    @cached_property
    def starts(self) -> Int[Tensor, " B"]:
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def total(self) -> int:
        """Number of tokens."""
        return int(self.lengths.sum())

    @property
    def is_small(self) -> bool:
        """True if all tokens may be held once more, and are computed faster than a thread starts."""
        return self.total <= PLACES

    @cached_property
    def row(self) -> Int[Tensor, " N"]:
        """Row of each token."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    def of(self, row: int) -> slice:
        """Positions of a row's tokens."""
        start = int(self.starts[row])
        return slice(start, start + int(self.lengths[row]))

    def position(self, row: int, token: int) -> int:
        assert 0 <= token < int(self.lengths[row]), "a row has no other tokens"
        return int(self.starts[row]) + token

    def token(self, position: int) -> tuple[int, int]:
        """Row, and token within the row, at a position."""
        row = int(self.row[position])
        return row, position - int(self.starts[row])

    def any(self, tokens: Bool[Tensor, " N"]) -> Bool[Tensor, " B"]:
        """Rows with at least one of these tokens."""
        return self.count(tokens) > 0

    def count(self, tokens: Bool[Tensor, " N"]) -> Int[Tensor, " B"]:
        """Number of these tokens in each row."""
        by_row, some = torch.zeros_like(self.lengths), self.lengths > 0
        if self.total:  # in place of a running sum, which would take eight bytes for each token
            counts = np.add.reduceat(tokens.numpy(), self.starts[some].numpy(), dtype=np.int64)
            by_row[some] = torch.from_numpy(counts).to(by_row.dtype)
        return by_row

    def parts(self, index: Int[Tensor, " M"]) -> list[Int[Tensor, " K"]]:
        """Divide these rows into parts of similar length, so that padding at most doubles the number of tokens."""
        parts = []
        for part in similar(self.lengths[index].clamp(min=1), short=0):
            rows = index[part]
            parts += rows.split(max(PLACES // max(int(self.lengths[rows].max()), 1), 1))
        return parts

    def blocks(self) -> list[slice]:
        """All rows, in order, in blocks that fit into a cache; a longer row is alone. One empty block if none."""
        blocks, first, tokens = [], 0, 0
        for row, length in enumerate(self.lengths.tolist()):
            if row > first and tokens + length > PLACES:
                blocks.append(slice(first, row))
                first, tokens = row, 0
            tokens += length
        return [*blocks, slice(first, len(self.lengths))]

    def _stretch(self, index: Int[Tensor, " M"]) -> slice | None:
        """Positions of these rows' tokens, if the rows follow each other and are equally long."""
        if not len(index) or len(index) != int(index[-1]) - int(index[0]) + 1 or not bool((index.diff() == 1).all()):
            return None
        lengths = self.lengths[int(index[0]) : int(index[-1]) + 1]
        if int(lengths[0]) == 0 or not bool((lengths == lengths[0]).all()):
            return None
        start = int(self.starts[index[0]])
        return slice(start, start + int(lengths[0]) * len(index))

    def grid(self, index: Int[Tensor, " M"]) -> tuple[Int[Tensor, "M T"], Bool[Tensor, "M T"]]:
        """Positions of these rows' tokens, padded to the longest row, and which of them are real."""
        lengths = self.lengths[index].unsqueeze(1)
        steps = torch.arange(max(int(lengths.max()) if len(index) else 0, 1))
        real = steps < lengths
        return torch.where(real, self.starts[index].unsqueeze(1) + steps, 0), real

    def padded(self, tokens: Tensor, index: Int[Tensor, " M"], filler: int | float = 0) -> Tensor:
        """Values of these rows' tokens, [M, T], with the filler beyond each row's length."""
        lengths = self.lengths[index]
        if int(lengths.sum()) < LONG * len(index):
            places, real = self.grid(index)
            values = tokens.new_full((*places.shape, *tokens.shape[1:]), filler)
            values[real] = tokens[places[real]]
            return values
        if stretch := self._stretch(index):
            return tokens[stretch].reshape(len(index), -1, *tokens.shape[1:]).clone()
        values = tokens.new_full(
            (len(index), max(int(lengths.max()), 1) if len(index) else 1, *tokens.shape[1:]), filler
        )
        for row, start, length in zip(values, self.starts[index].tolist(), lengths.tolist(), strict=True):
            row[:length] = tokens[start : start + length]
        return values

    def write(self, tokens: Tensor, index: Int[Tensor, " M"], values: Tensor) -> None:
        """The inverse of `padded`: put values, [M, T], at these rows' tokens."""
        lengths = self.lengths[index]
        if int(lengths.sum()) < LONG * len(index):
            places, real = self.grid(index)
            tokens[places[real]] = values[real].to(tokens.dtype)
            return
        if stretch := self._stretch(index):
            tokens[stretch] = values[:, : (stretch.stop - stretch.start) // len(index)].flatten(0, 1)
            return
        for row, start, length in zip(values, self.starts[index].tolist(), lengths.tolist(), strict=True):
            tokens[start : start + length] = row[:length]
