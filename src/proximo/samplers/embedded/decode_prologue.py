"""Decode step on a GPU around attention, in few kernels: starting one takes as long as what it computes.

One kernel plans a step: where each row writes, and how the keys are divided among programs. One kernel a layer takes a
row's joined projections to rotated queries, and to keys and values in its page.

Only imported where triton is.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from proximo.samplers.embedded.attention import MIN_CHUNK, PAGE, PROGRAMS, max_items
from proximo.samplers.embedded.kernels import attended

GROUP = 8
"""Heads that one program takes."""


@triton.jit
def _plan(counts, live, unit_prompt, prompt_lengths, places, lengths, items, first, chunk, rows, num_units,
          HEADS: tl.constexpr, PROGRAMS: tl.constexpr, PAGE: tl.constexpr, MIN_CHUNK: tl.constexpr,
          SPANS: tl.constexpr):  # fmt: skip
    span = tl.arange(0, SPANS)
    row = span - num_units
    is_unit, is_row = span < num_units, (row >= 0) & (row < rows)
    prompt = tl.load(unit_prompt + span, mask=is_unit, other=-1)
    shared = tl.load(prompt_lengths + prompt, mask=prompt >= 0, other=0)
    position = tl.maximum(tl.load(counts + row, mask=is_row, other=1) - 1, 0).to(tl.int32)
    alive = tl.load(live + row, mask=is_row, other=0) != 0
    length = tl.where(is_row, tl.where(alive, position + 1, 1), shared)
    share = (tl.sum(length.to(tl.int64), 0) * HEADS + PROGRAMS - 1) // PROGRAMS
    size = tl.maximum((share + PAGE - 1) // PAGE * PAGE, MIN_CHUNK).to(tl.int32)
    pieces = (length + size - 1) // size
    starts = tl.cumsum(pieces, 0) - pieces
    for piece in range(tl.max(pieces, 0)):
        tl.store(items + starts + piece, span, mask=piece < pieces)
    tl.store(first + span, starts, mask=is_unit | is_row)
    tl.store(first + num_units + rows, tl.sum(pieces, 0))
    tl.store(chunk, size)
    tl.store(places + row, position, mask=is_row)
    tl.store(lengths + row, length, mask=is_row)


def plan_spans(
    counts: Tensor, live: Tensor, unit_prompt: Tensor, prompt_lengths: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`attention.plan_spans` in one kernel."""
    rows, units = len(counts), len(unit_prompt)

    def integers(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=counts.device)

    places, lengths, chunk = integers(rows), integers(rows), integers(1)
    items, first = integers(max_items(units + rows, heads)), integers(units + rows + 1)
    _plan[(1,)](
        counts, live, unit_prompt, prompt_lengths, places, lengths, items, first, chunk, rows, units,
        heads, PROGRAMS, PAGE, MIN_CHUNK, triton.next_power_of_2(units + rows),
    )  # fmt: skip
    return places, lengths, items, first, chunk


@triton.jit
def _front(states, query, keys, values, query_norm, key_norm, cosines, sines, row_pages, places, epsilon,
           table_stride, page_stride, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr,
           HALF: tl.constexpr, GROUP: tl.constexpr, NORMS: tl.constexpr, TURNS: tl.constexpr,
           PAGE: tl.constexpr):  # fmt: skip
    """Turn a row's projections into rotated queries, and keys and values in its page."""
    row = tl.program_id(0)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    dims = tl.arange(0, HALF)
    inside = (head < HEADS + 2 * KEY_HEADS)[:, None] & (dims < WIDTH // 2)[None, :]
    source = states + row * (HEADS + 2 * KEY_HEADS) * WIDTH + head[:, None] * WIDTH + dims[None, :]
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)
    is_query, is_value = (head < HEADS)[:, None], (head >= HEADS + KEY_HEADS)[:, None]
    new_low, new_high = low, high
    if NORMS:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / WIDTH + epsilon)[:, None]
        half = dims < WIDTH // 2
        low_weight = tl.where(is_query, tl.load(query_norm + dims, mask=half)[None, :],
                              tl.load(key_norm + dims, mask=half)[None, :]).to(tl.float32)  # fmt: skip
        high_weight = tl.where(is_query, tl.load(query_norm + WIDTH // 2 + dims, mask=half)[None, :],
                               tl.load(key_norm + WIDTH // 2 + dims, mask=half)[None, :]).to(tl.float32)  # fmt: skip
        new_low, new_high = low * scale * low_weight, high * scale * high_weight
    if TURNS:
        angle = row * WIDTH + dims
        half = dims < WIDTH // 2
        cos_low, cos_high = tl.load(cosines + angle, mask=half), tl.load(cosines + angle + WIDTH // 2, mask=half)
        sin_low, sin_high = tl.load(sines + angle, mask=half), tl.load(sines + angle + WIDTH // 2, mask=half)
        turned_low = new_low * cos_low[None, :] - new_high * sin_low[None, :]
        new_high = new_high * cos_high[None, :] + new_low * sin_high[None, :]
        new_low = turned_low
    new_low, new_high = tl.where(is_value, low, new_low), tl.where(is_value, high, new_high)
    asked = query + (row * HEADS + head)[:, None] * WIDTH + dims[None, :]
    tl.store(asked, new_low, mask=inside & is_query)
    tl.store(asked + WIDTH // 2, new_high, mask=inside & is_query)
    position = tl.load(places + row)
    page = tl.load(row_pages + row * table_stride + position // PAGE).to(tl.int64)
    slot = page * page_stride + ((head - HEADS) % KEY_HEADS * PAGE + position % PAGE)[:, None] * WIDTH + dims[None, :]
    is_key = (head >= HEADS)[:, None] & (head < HEADS + KEY_HEADS)[:, None]
    tl.store(keys + slot, new_low, mask=inside & is_key)
    tl.store(keys + slot + WIDTH // 2, new_high, mask=inside & is_key)
    tl.store(values + slot, new_low, mask=inside & is_value)
    tl.store(values + slot + WIDTH // 2, new_high, mask=inside & is_value)


@torch.library.custom_op("proximo::joined_attention", mutates_args=("keys", "values"))
def joined_attention(
    states: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cosines: Tensor | None,
    sines: Tensor | None,
    epsilon: float,
    keys: Tensor,
    values: Tensor,
    prompt_pages: Tensor,
    prompt_lengths: Tensor,
    row_pages: Tensor,
    places: Tensor,
    lengths: Tensor,
    unit_prompt: Tensor,
    unit_rows: Tensor,
    row_seats: Tensor,
    items: Tensor,
    first: Tensor,
    chunk: Tensor,
    scale: float,
) -> Tensor:
    """Queries, keys and values [R, H + 2K, D] as they come from their product, over pages [N, K, PAGE, D].

    Norms of single heads and rotations are applied where they are given. Returns [R, H, D].
    """
    rows, all_heads, width = states.shape
    kv_heads = keys.shape[1]
    states, heads = states.contiguous(), all_heads - 2 * kv_heads
    query = states.new_empty(rows, heads, width)
    _front[(rows, triton.cdiv(all_heads, GROUP))](
        states, query, keys, values, query_norm, key_norm,
        None if cosines is None else cosines.contiguous(), None if sines is None else sines.contiguous(),
        row_pages, places, epsilon, row_pages.stride(0), keys.stride(0),
        heads, kv_heads, width, triton.next_power_of_2(width // 2), GROUP, query_norm is not None, cosines is not None,
        PAGE, num_warps=2,
    )  # fmt: skip
    return attended(query, keys, values, prompt_pages, prompt_lengths, row_pages, lengths, unit_prompt, unit_rows,
                    row_seats, items, first, chunk, scale)  # fmt: skip


@joined_attention.register_fake
def _(states: Tensor, *rest: object) -> Tensor:
    keys = rest[5]
    assert isinstance(keys, Tensor)
    rows, heads, width = states.shape  # not len(): it would tie what is compiled to a number of rows
    return states.new_empty(rows, heads - 2 * keys.shape[1], width)
