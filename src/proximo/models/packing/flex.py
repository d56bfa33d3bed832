"""Attention over a packed row on a GPU: FlexAttention over blocks of 128 tokens, most of which are skipped.

The row has the shape [blocks, 128], so that a compiled layer knows its length to be a multiple of 128. Which blocks
attend to which is computed from the spans: nothing of size tokens squared ever exists.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from proximo.tensor_types import Bool, Float, Int
from proximo.types import to_device

BLOCK = 128
"""Tokens per block, as FlexAttention's kernels expect."""
SMALL_PART = 64
"""A span is padded to a whole block if that adds no more than this fraction (1 in N) of its tokens."""
LEAST_WIDTH = 16
"""Smallest head width that the kernels accept."""


def padded_length(length: int) -> int:
    """Length in whole blocks; at least two, since torch compiles a size of 1 separately."""
    return max(2, -(-length // BLOCK)) * BLOCK


def filled_up(lengths: Int[Tensor, " S"]) -> Int[Tensor, " S"]:
    """Lengths of the spans in the row: those that end just before a block boundary are padded to it.

    If spans are aligned with blocks, fewer blocks are visited and most of them need no mask. Completions cut at a
    limit, usually a power of two, are one token short of it.
    """
    missing = -lengths % BLOCK
    return torch.where(missing * SMALL_PART <= lengths, lengths + missing, lengths)


@dataclass(frozen=True)
class FlexReader:
    """What each of N = R · 128 positions attends to: its prompt, and its own span up to itself."""

    own_start: Int[Tensor, " N"]
    prompt_start: Int[Tensor, " N"]
    prompt_end: Int[Tensor, " N"]
    """End of what a position attends to before its own span; equal to the start if that is nothing."""
    # The blocks in FlexAttention's form, for queries and, transposed, for keys: how many, and which. `full` blocks are
    # attended to entirely and need no mask; the others in part.
    kv_num: Int[Tensor, "1 1 R"]
    kv_which: Int[Tensor, "1 1 R R"]
    full_kv_num: Int[Tensor, "1 1 R"]
    full_kv_which: Int[Tensor, "1 1 R R"]
    q_num: Int[Tensor, "1 1 R"]
    q_which: Int[Tensor, "1 1 R R"]
    full_q_num: Int[Tensor, "1 1 R"]
    full_q_which: Int[Tensor, "1 1 R R"]

    def layer(self, number: int) -> "FlexReader":
        return self

    def to(self, device: torch.device) -> "FlexReader":
        """Copy to the device, with the sizes that vary between passes marked as dynamic."""
        moved = {name: to_device(tensor, device) for name, tensor in vars(self).items()}
        for tensor in moved.values():
            for place, size in enumerate(tensor.shape):
                if size > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, place)
        return FlexReader(**moved)

    def read(
        self,
        query: Float[Tensor, "R H S D"],
        key: Float[Tensor, "R K S D"],
        value: Float[Tensor, "R K S D"],
        scale: float,
    ) -> Float[Tensor, "R S H D"]:
        if torch.compiler.is_compiling():  # part of a compiled layer
            return attend_blocks(self, query, key, value, scale)
        for heads in (query, key, value):
            torch._dynamo.maybe_mark_dynamic(heads, 0)
        return _compiled_attention()(self, query, key, value, scale)


def attend_blocks(reader: FlexReader, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The compiled function. The mask is built here, so that its sizes are the traced ones."""
    own_start, prompt_start, prompt_end = reader.own_start, reader.prompt_start, reader.prompt_end

    def is_seen(_: Tensor, __: Tensor, place: Tensor, other: Tensor) -> Tensor:
        own = (other >= own_start[place]) & (other <= place)
        return own | ((other >= prompt_start[place]) & (other < prompt_end[place]))

    query, key, value = _one_row(query), _one_row(key), _one_row(value)
    length = query.shape[2]
    blocks = BlockMask(
        seq_lengths=(length, length),
        kv_num_blocks=reader.kv_num,
        kv_indices=reader.kv_which,
        full_kv_num_blocks=reader.full_kv_num,
        full_kv_indices=reader.full_kv_which,
        q_num_blocks=reader.q_num,
        q_indices=reader.q_which,
        full_q_num_blocks=reader.full_q_num,
        full_q_indices=reader.full_q_which,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=is_seen,
    )
    output = flex_attention(
        query,
        key,
        value,
        block_mask=blocks,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output.transpose(1, 2).unflatten(1, (-1, BLOCK))[0]


def _one_row(heads: Float[Tensor, "R H S D"]) -> Float[Tensor, "1 H N D"]:
    """A view as one row: heads come from a projection, where the R · S positions are already one dimension."""
    return heads.transpose(0, 1).flatten(1, 2)[None]


@cache
def _compiled_attention() -> Any:
    """Compiled attention for layers that run uncompiled because of hooks."""
    return torch.compile(attend_blocks, fullgraph=True)


# From spans to blocks


@dataclass(frozen=True)
class Spans:
    """Spans of the row, in order and without gaps; each attends to itself causally, and to all of one earlier range."""

    start: Int[Tensor, " S"]
    end: Int[Tensor, " S"]
    seen_start: Int[Tensor, " S"]
    seen_end: Int[Tensor, " S"]
    """End of that range; equal to its start if it is empty."""


def flex_reader(
    prompt_starts: Int[Tensor, " P"],
    prompt_lengths: Int[Tensor, " P"],
    starts: Int[Tensor, " C"],
    lengths: Int[Tensor, " C"],
    member: Int[Tensor, " C"],
) -> FlexReader:
    """The reader of spans in a packed row, each `filled_up`; completion c belongs to prompt `member[c]`."""
    spans = _spans(prompt_starts, prompt_lengths, starts, lengths, member)
    sizes = spans.end - spans.start
    touched, full = block_matrices(spans)
    kv_num, kv_which = _listed(touched & ~full)
    full_kv_num, full_kv_which = _listed(full)
    q_num, q_which = _listed((touched & ~full).T)
    full_q_num, full_q_which = _listed(full.T)
    return FlexReader(
        own_start=spans.start.repeat_interleave(sizes).int(),
        prompt_start=spans.seen_start.repeat_interleave(sizes).int(),
        prompt_end=spans.seen_end.repeat_interleave(sizes).int(),
        kv_num=kv_num,
        kv_which=kv_which,
        full_kv_num=full_kv_num,
        full_kv_which=full_kv_which,
        q_num=q_num,
        q_which=q_which,
        full_q_num=full_q_num,
        full_q_which=full_q_which,
    )


def _spans(
    prompt_starts: Int[Tensor, " P"],
    prompt_lengths: Int[Tensor, " P"],
    starts: Int[Tensor, " C"],
    lengths: Int[Tensor, " C"],
    member: Int[Tensor, " C"],
) -> Spans:
    """Spans of prompts, of non-empty completions, and of the padding, which attends only to itself."""
    some = lengths > 0
    starts, lengths, member = starts[some], lengths[some], member[some]
    # The padding of a span is never read: only a prompt's tokens are attended to.
    prompt_rooms, rooms = filled_up(prompt_lengths), filled_up(lengths)
    used = prompt_rooms.sum() + rooms.sum()
    nothing, padding = torch.zeros_like(prompt_starts), used.reshape(1)
    start = torch.cat((prompt_starts, starts, padding))
    end = torch.cat((prompt_starts + prompt_rooms, starts + rooms, padding.new_tensor([padded_length(int(used))])))
    seen_start = torch.cat((nothing, prompt_starts[member], padding.new_zeros(1)))
    seen_end = torch.cat((nothing, (prompt_starts + prompt_lengths)[member], padding.new_zeros(1)))
    order = start.argsort(stable=True)
    order = order[(end > start)[order]]  # a row may need no padding
    return Spans(start[order], end[order], seen_start[order], seen_end[order])


def block_matrices(spans: Spans) -> tuple[Bool[Tensor, "R R"], Bool[Tensor, "R R"]]:
    """[queries, keys]: the blocks that are attended to at all, and those that every query attends to entirely."""
    # A piece is the part of one span within one block.
    first, last = spans.start // BLOCK, (spans.end - 1) // BLOCK
    pieces = last - first + 1
    span = torch.arange(len(pieces)).repeat_interleave(pieces)
    block = first[span] + torch.arange(len(span)) - (pieces.cumsum(0) - pieces)[span]
    start, seen_start, seen_end = spans.start[span], spans.seen_start[span], spans.seen_end[span]
    first_query = torch.maximum(start, block * BLOCK)
    rows = int(last[-1]) + 1

    # If the earlier range ends where the span starts, both are one range.
    joined = seen_end == start
    own_start = torch.where(joined & (seen_end > seen_start), seen_start, start)
    seen_end = torch.where(joined, seen_start, seen_end)

    touched = _counted(rows, block, own_start // BLOCK, block)
    touched += _counted(rows, block, seen_start // BLOCK, (seen_end - 1) // BLOCK, seen_end > seen_start)
    inside = _counted(rows, block, -(-own_start // BLOCK), (first_query + 1) // BLOCK - 1)
    inside += _counted(rows, block, -(-seen_start // BLOCK), seen_end // BLOCK - 1)
    return touched > 0, inside == block.bincount(minlength=rows)[:, None]


def _counted(
    rows: int,
    block: Int[Tensor, " M"],
    first: Int[Tensor, " M"],
    last: Int[Tensor, " M"],
    counts: Bool[Tensor, " M"] | None = None,
) -> Int[Tensor, "R R"]:
    """How many pieces of each query block reach each key block from first to last, if any."""
    steps = torch.zeros(rows, rows + 1, dtype=torch.long)
    worth = (last >= first).long() if counts is None else ((last >= first) & counts).long()
    first, beyond = first.clamp(max=rows), (last + 1).clamp(min=0)
    steps.index_put_((block, first), worth, accumulate=True)
    steps.index_put_((block, beyond), -worth, accumulate=True)
    return steps.cumsum(1)[:, :rows]


def _listed(blocks: Bool[Tensor, "R R"]) -> tuple[Int[Tensor, "1 1 R"], Int[Tensor, "1 1 R R"]]:
    """The number of blocks of each row, and their indices: in order, then zeros."""
    row, column = blocks.nonzero(as_tuple=True)
    which = torch.zeros(blocks.shape, dtype=torch.int32)
    which[row, blocks.cumsum(1)[row, column] - 1] = column.int()
    return blocks.sum(1).int()[None, None], which[None, None]
