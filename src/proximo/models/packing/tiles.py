"""Attention over a packed row on a GPU: the row's spans cut into tiles, each the work of one program.

No tile reaches over the end of a span, so nothing is computed that a mask would throw away but on the diagonal, and
nothing of size tokens squared ever exists, neither on the host nor on the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.models.packing.plain_tiles import TILE
from proximo.models.packing.tile_attention import packed_attention
from proximo.types.batches import to_device
from proximo.types.tensor_types import Float, Int

BLOCK = 128
"""The row has the shape [blocks, 128], so that a compiled layer knows its length to be a multiple of 128."""
CHUNK = 2048
"""Queries that one program takes to its keys in the backward pass. A prompt's keys are attended to by every completion
of its group: one program for all of them would still be at work when the others are done."""
MAX_WIDTH = 256
"""Largest head width of the kernels."""


def padded_length(length: int) -> int:
    """Length in whole blocks; at least two, since torch compiles a size of 1 separately."""
    return max(2, -(-length // BLOCK)) * BLOCK


@dataclass(frozen=True)
class Tiles:
    """Work of the programs of each kernel, the largest shares first: a program that starts last should end soon."""

    queries: Int[Tensor, "Q 5"]
    """Tiles of queries: start, end, start of their span, start and end of their prompt, which are equal without one."""
    keys: Int[Tensor, "K 5"]
    """Tiles of keys with some of the queries that attend to them: start and end of the keys, start and end of the
    queries, and the place where the gradient is kept until it is summed, or −1 where it is all of it."""
    sums: Int[Tensor, "S 4"]
    """Tile that each place is a part of: start and end of the keys, the first of the places to sum, how many."""

    def layer(self, number: int) -> "Tiles":
        return self

    def to(self, device: torch.device) -> "Tiles":
        """Copy to the device, with the sizes that vary between passes marked as dynamic."""
        moved = {name: to_device(tensor, device) for name, tensor in vars(self).items()}
        for tensor in moved.values():
            if len(tensor) > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return Tiles(**moved)

    def read(
        self,
        query: Float[Tensor, "R H S D"],
        key: Float[Tensor, "R K S D"],
        value: Float[Tensor, "R K S D"],
        scale: float,
    ) -> Float[Tensor, "R S H D"]:
        rows = (_tokens(query), _tokens(key), _tokens(value))
        output, _ = packed_attention(*rows, self.queries, self.keys, self.sums, scale)
        return output.unflatten(0, (-1, BLOCK))


def _tokens(heads: Float[Tensor, "R H S D"]) -> Float[Tensor, "N H D"]:
    """A view: heads come from a projection, where the R · S positions are already one dimension."""
    return heads.transpose(1, 2).flatten(0, 1)


def tiles(
    prompt_starts: Int[Tensor, " P"],
    prompt_lengths: Int[Tensor, " P"],
    starts: Int[Tensor, " C"],
    lengths: Int[Tensor, " C"],
    member: Int[Tensor, " C"],
) -> Tiles:
    """The tiles of spans in a packed row; completion c belongs to prompt `member[c]` and lies behind it, with no other
    prompt in between."""
    ends = starts + lengths
    group_ends = (prompt_starts + prompt_lengths).scatter_reduce(0, member, ends, "amax")
    used = group_ends.max() if len(group_ends) else torch.tensor(0)
    # The row's padding is a span of its own: it attends to itself, and its gradient is zero.
    padding = used.reshape(1)
    row_end = padding.new_tensor([padded_length(int(used))])
    nothing = torch.zeros_like(prompt_starts)
    spans = PackedSpans(
        start=torch.cat((prompt_starts, starts, padding)),
        end=torch.cat((prompt_starts + prompt_lengths, ends, row_end)),
        prompt_start=torch.cat((nothing, prompt_starts[member], padding.new_zeros(1))),
        prompt_end=torch.cat((nothing, (prompt_starts + prompt_lengths)[member], padding.new_zeros(1))),
        seen_until=torch.cat((group_ends, ends, row_end)),
    )
    return Tiles(_queries(spans), *_keys(spans))


@dataclass(frozen=True)
class PackedSpans:
    """Prompts, completions and the padding. Each attends to itself causally, and to all of its prompt."""

    start: Int[Tensor, " S"]
    end: Int[Tensor, " S"]
    prompt_start: Int[Tensor, " S"]
    prompt_end: Int[Tensor, " S"]
    seen_until: Int[Tensor, " S"]
    """End of the queries that attend to its keys: each from its own place on."""


def _queries(spans: PackedSpans) -> Int[Tensor, "Q 5"]:
    span, start = _cut(spans.start, spans.end, TILE)
    end = torch.minimum(start + TILE, spans.end[span])
    span_start, first, last = spans.start[span], spans.prompt_start[span], spans.prompt_end[span]
    order = (end - span_start + last - first).argsort(descending=True, stable=True)
    return torch.stack((start, end, span_start, first, last), 1)[order].int()


def _keys(spans: PackedSpans) -> tuple[Int[Tensor, "K 5"], Int[Tensor, "S 4"]]:
    span, start = _cut(spans.start, spans.end, TILE)
    end, until = torch.minimum(start + TILE, spans.end[span]), spans.seen_until[span]
    tile, first = _cut(start, until, CHUNK)
    last = torch.minimum(first + CHUNK, until[tile])
    parts = tile.bincount(minlength=len(start))
    is_part = (parts > 1)[tile]
    slot = torch.where(is_part, is_part.cumsum(0) - 1, -1)
    order = (last - first).argsort(descending=True, stable=True)
    keys = torch.stack((start[tile], end[tile], first, last, slot), 1)[order]
    split = tile[is_part]
    before = (torch.where(parts > 1, parts, 0).cumsum(0) - parts)[split]
    sums = torch.stack((start[split], end[split], before, parts[split]), 1)
    return keys.int(), sums.int()


def _cut(start: Int[Tensor, " S"], end: Int[Tensor, " S"], size: int) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"]]:
    """Ranges in pieces of `size`: of which range each is, and where it starts."""
    pieces = (end - start + size - 1).clamp(min=0) // size
    which = torch.arange(len(pieces)).repeat_interleave(pieces)
    return which, start[which] + size * (torch.arange(len(which)) - (pieces.cumsum(0) - pieces)[which])
