"""Where the tokens of a step's completions lie: one completion behind the other, without padding.

Memory then follows the number of tokens. Padded to the longest, one long completion would make room for as many
tokens in each of the others. What needs rows of equal width gets them a few rows at a time, see `parts`.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from proximo.models.packing.packed import similar
from proximo.tensor_types import Bool, Int

PLACES = 1 << 20
"""Rows times width of what is padded at once; a longer completion stands alone."""


@dataclass(frozen=True)
class Layout:
    """N tokens of B rows, a row behind the other."""

    lengths: Int[Tensor, " B"]

    @cached_property
    def starts(self) -> Int[Tensor, " B"]:
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def row(self) -> Int[Tensor, " N"]:
        """Which row each token is of."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    def of(self, row: int) -> slice:
        """The places of a row's tokens."""
        start = int(self.starts[row])
        return slice(start, start + int(self.lengths[row]))

    def place(self, row: int, token: int) -> int:
        assert 0 <= token < int(self.lengths[row]), "a row has no other tokens"
        return int(self.starts[row]) + token

    def token(self, place: int) -> tuple[int, int]:
        """The row and the token of it that lie at a place."""
        row = int(self.row[place])
        return row, place - int(self.starts[row])

    def any(self, tokens: Bool[Tensor, " N"]) -> Bool[Tensor, " B"]:
        """Rows with such a token."""
        found = torch.zeros(len(self.lengths), dtype=torch.bool)
        found[self.row[tokens]] = True
        return found

    def count(self, tokens: Bool[Tensor, " N"]) -> Int[Tensor, " B"]:
        """How many such tokens each row has."""
        return torch.zeros_like(self.lengths).index_add(0, self.row, tokens.to(self.lengths.dtype))

    def parts(self, index: Int[Tensor, " M"]) -> list[Int[Tensor, " K"]]:
        """These rows in parts of similar length: padded to its longest, no part is more than twice its tokens."""
        found = []
        for part in similar(self.lengths[index].clamp(min=1), short=0):
            rows = index[part]
            found += rows.split(max(PLACES // max(int(self.lengths[rows].max()), 1), 1))
        return found

    def grid(self, index: Int[Tensor, " M"]) -> tuple[Int[Tensor, "M T"], Bool[Tensor, "M T"]]:
        """The places of these rows' tokens, padded to the longest of them, and which of them are real."""
        lengths = self.lengths[index].unsqueeze(1)
        steps = torch.arange(max(int(lengths.max()) if len(index) else 0, 1))
        real = steps < lengths
        return torch.where(real, self.starts[index].unsqueeze(1) + steps, 0), real

    def padded(self, tokens: Tensor, index: Int[Tensor, " M"], filler: int = 0) -> Tensor:
        """What is known of these rows' tokens, [M, T] with the filler beyond each row's length."""
        places, real = self.grid(index)
        found = tokens.new_full((*places.shape, *tokens.shape[1:]), filler)
        found[real] = tokens[places[real]]
        return found
