"""Decode attention on a GPU: a prompt's keys are read once for all of its samples, and no key beyond a row's end.

Three small kernels. One writes each row's new key and value. One attends: a program takes an item of work for one
key-value head, which is a piece of a prompt with the queries of several of its samples, or a piece of one row's own
tokens. The last merges the pieces by their log-sum-exp, which is exact. Items of all spans have the same length, so
that the GPU is busy whether many rows are short or a few are long. Lengths are read on the device: a captured graph
serves every length.

Only imported where triton is.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from proximo.samplers.embedded.attention import PAGE

LOG2_E = 1.4426950408889634
STAGES = 3
"""Stages of the loop over keys; where a page is found comes one stage before what lies in it."""
SHARED_BYTES = 100 * 1024
"""Shared memory for the keys and values that a program has under way: two programs fit on a multiprocessor."""
PIECES = 8
"""Pieces merged at a time."""


@triton.jit
def _write(key, value, keys, values, row_pages, places, key_stride, value_stride, table_stride, page_stride,
           WIDTH: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, PADDED)
    inside = dims < WIDTH
    position = tl.load(places + row)
    page = tl.load(row_pages + row * table_stride + position // PAGE).to(tl.int64)
    source = head * WIDTH + dims
    target = page * page_stride + (head * PAGE + position % PAGE) * WIDTH + dims
    tl.store(keys + target, tl.load(key + row * key_stride + source, mask=inside), mask=inside)
    tl.store(values + target, tl.load(value + row * value_stride + source, mask=inside), mask=inside)


@triton.jit
def _span(query, keys, values, pages, start, stop, page_stride, scale, LANES: tl.constexpr, WIDTH: tl.constexpr,
          PADDED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Attention of LANES queries over tokens start to stop, with the logarithm (base 2) of its normaliser."""
    dims, steps = tl.arange(0, PADDED), tl.arange(0, BLOCK)
    within = dims < WIDTH
    peak = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    mixed = tl.zeros([LANES, PADDED], tl.float32)
    for begin in range(start, stop, BLOCK):
        page = tl.load(pages + begin // PAGE).to(tl.int64)
        inside = begin + steps < stop
        offset = page * page_stride + (begin % PAGE) * WIDTH
        key_mask, value_mask = inside[None, :], inside[:, None]
        if PADDED != WIDTH:
            key_mask, value_mask = key_mask & within[:, None], value_mask & within[None, :]
        key = tl.load(keys + offset + steps[None, :] * WIDTH + dims[:, None], mask=key_mask, other=0.0)
        scores = tl.dot(query, key, input_precision=PRECISION) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp2(peak - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(values + offset + steps[:, None] * WIDTH + dims[None, :], mask=value_mask, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        peak = higher
    return mixed / total[:, None], peak + tl.log2(total)


@triton.jit
def _read_prompt(query, keys, values, prompt_pages, prompt_lengths, unit_prompt, unit_rows, far, far_weights, scale,
                 item, head, unit, start, size, prompt_stride, page_stride,
                 HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
                 MEMBERS: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """A piece of a prompt, with the queries of all rows of a unit."""
    dims, lanes = tl.arange(0, PADDED), tl.arange(0, LANES)
    within, seated = dims < WIDTH, lanes < MEMBERS * REPEATS
    prompt = tl.load(unit_prompt + unit)
    stop = tl.minimum(start + size, tl.load(prompt_lengths + prompt))
    row = tl.load(unit_rows + unit * MEMBERS + lanes // REPEATS, mask=seated, other=-1)
    index = (row * HEADS + head) * REPEATS + lanes % REPEATS
    asked = tl.load(query + index[:, None] * WIDTH + dims[None, :], mask=(row >= 0)[:, None] & within[None, :],
                    other=0.0)  # fmt: skip
    mixed, weight = _span(asked, keys, values, prompt_pages + prompt * prompt_stride, start, stop, page_stride, scale,
                          LANES, WIDTH, PADDED, PAGE, BLOCK, PRECISION)  # fmt: skip
    target = (item * HEADS + head) * MEMBERS * REPEATS + lanes
    tl.store(far + target[:, None] * WIDTH + dims[None, :], mixed, mask=seated[:, None] & within[None, :])
    tl.store(far_weights + target, weight, mask=seated)


@triton.jit
def _read_own(query, keys, values, row_pages, lengths, near, near_weights, scale,
              item, head, row, start, size, row_stride, page_stride,
              HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
              LANES: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """A piece of a row's own tokens."""
    dims, lanes = tl.arange(0, PADDED), tl.arange(0, LANES)
    within, taken = dims < WIDTH, lanes < REPEATS
    stop = tl.minimum(start + size, tl.load(lengths + row).to(tl.int32))
    index = (row * HEADS + head) * REPEATS + lanes
    asked = tl.load(query + index[:, None] * WIDTH + dims[None, :], mask=taken[:, None] & within[None, :],
                    other=0.0)  # fmt: skip
    mixed, weight = _span(asked, keys, values, row_pages + row * row_stride, start, stop, page_stride, scale,
                          LANES, WIDTH, PADDED, PAGE, BLOCK, PRECISION)  # fmt: skip
    target = (item * HEADS + head) * REPEATS + lanes
    tl.store(near + target[:, None] * WIDTH + dims[None, :], mixed, mask=taken[:, None] & within[None, :])
    tl.store(near_weights + target, weight, mask=taken)


@triton.jit
def _attend(query, keys, values, prompt_pages, prompt_lengths, row_pages, lengths, unit_prompt, unit_rows,
            items, first, chunk, far, far_weights, near, near_weights, scale,
            prompt_stride, row_stride, page_stride, num_units, num_spans,
            HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
            MEMBERS: tl.constexpr, LANES: tl.constexpr, OWN_LANES: tl.constexpr, PAGE: tl.constexpr,
            BLOCK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    item, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    if item < tl.load(first + num_spans):
        span = tl.load(items + item)
        size = tl.load(chunk)
        start = (item - tl.load(first + span)) * size
        keys += head * PAGE * WIDTH
        values += head * PAGE * WIDTH
        if span < num_units:
            _read_prompt(query, keys, values, prompt_pages, prompt_lengths, unit_prompt, unit_rows, far, far_weights,
                         scale, item, head, span, start, size, prompt_stride, page_stride,
                         HEADS, REPEATS, WIDTH, PADDED, MEMBERS, LANES, PAGE, BLOCK, PRECISION)  # fmt: skip
        else:
            _read_own(query, keys, values, row_pages, lengths, near, near_weights, scale,
                      item, head, span - num_units, start, size, row_stride, page_stride,
                      HEADS, REPEATS, WIDTH, PADDED, OWN_LANES, PAGE, BLOCK, PRECISION)  # fmt: skip


@triton.jit
def _gather(pieces, weights, start, stop, lane, stride, peak, total, mixed, WIDTH: tl.constexpr, PADDED: tl.constexpr,
            PIECES: tl.constexpr):  # fmt: skip
    """Add the pieces of items start to stop, of one lane, to a running softmax."""
    steps, dims = tl.arange(0, PIECES), tl.arange(0, PADDED)
    for begin in range(start, stop, PIECES):
        item = begin + steps
        inside = item < stop
        index = item * stride + lane
        weight = tl.load(weights + index, mask=inside, other=float("-inf"))
        piece = tl.load(pieces + index[:, None] * WIDTH + dims[None, :],
                        mask=inside[:, None] & (dims < WIDTH)[None, :], other=0.0)  # fmt: skip
        higher = tl.maximum(peak, tl.max(weight, 0))
        shrink = tl.exp2(peak - higher)
        share = tl.exp2(weight - higher)
        total = total * shrink + tl.sum(share, 0)
        mixed = mixed * shrink + tl.sum(piece * share[:, None], 0)
        peak = higher
    return peak, total, mixed


@triton.jit
def _merge(far, far_weights, near, near_weights, first, row_seats, output, num_units,
           HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
           MEMBERS: tl.constexpr, PIECES: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0) // (HEADS * REPEATS), tl.program_id(0) % (HEADS * REPEATS)
    seat, span = tl.load(row_seats + row), num_units + row
    start, stop = tl.load(first + span), tl.load(first + span + 1)
    peak, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    mixed = tl.zeros([PADDED], tl.float32)
    # Its own pieces first: there is at least one, so that the peak is finite from there on.
    peak, total, mixed = _gather(near, near_weights, start, stop, head, HEADS * REPEATS, peak, total, mixed,
                                 WIDTH, PADDED, PIECES)  # fmt: skip
    if seat >= 0:
        unit = seat // MEMBERS
        lane = (head // REPEATS * MEMBERS + seat % MEMBERS) * REPEATS + head % REPEATS
        peak, total, mixed = _gather(far, far_weights, tl.load(first + unit), tl.load(first + unit + 1), lane,
                                     HEADS * MEMBERS * REPEATS, peak, total, mixed, WIDTH, PADDED, PIECES)  # fmt: skip
    dims = tl.arange(0, PADDED)
    mixed = (mixed / total).to(output.dtype.element_ty)
    tl.store(output + tl.program_id(0) * WIDTH + dims, mixed, mask=dims < WIDTH)


@torch.library.custom_op("proximo::decode_attention", mutates_args=("keys", "values"))
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    """[R, H, D] queries over pages [N, K, PAGE, D]; `Spans` says what the other tensors are."""
    query, key, value, width = query.contiguous(), _heads_together(key), _heads_together(value), query.shape[2]
    _write[(len(query), key.shape[1])](
        key, value, keys, values, row_pages, places, key.stride(0), value.stride(0), row_pages.stride(0),
        keys.stride(0), width, triton.next_power_of_2(width), PAGE, num_warps=1,
    )  # fmt: skip
    return attended(query, keys, values, prompt_pages, prompt_lengths, row_pages, lengths, unit_prompt, unit_rows,
                    row_seats, items, first, chunk, scale)  # fmt: skip


def attended(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    prompt_pages: Tensor,
    prompt_lengths: Tensor,
    row_pages: Tensor,
    lengths: Tensor,
    unit_prompt: Tensor,
    unit_rows: Tensor,
    row_seats: Tensor,
    items: Tensor,
    first: Tensor,
    chunk: Tensor,
    scale: float,
) -> Tensor:
    """Attention, where new keys and values have been written."""
    rows, heads, width = query.shape
    kv_heads, repeats = keys.shape[1], heads // keys.shape[1]
    units, members = unit_rows.shape
    padded = triton.next_power_of_2(width)
    lanes, own_lanes = max(16, triton.next_power_of_2(members * repeats)), max(16, triton.next_power_of_2(repeats))
    # Items of prompts come first, and there are no more of them than there would be without rows.
    far, far_weights = _scratch(query, len(items) - rows, kv_heads * members * repeats, width)
    near, near_weights = _scratch(query, len(items), heads, width)
    _attend[(len(items) * kv_heads,)](
        query, keys, values, prompt_pages, prompt_lengths, row_pages, lengths, unit_prompt, unit_rows,
        items, first, chunk, far, far_weights, near, near_weights, scale * LOG2_E,
        prompt_pages.stride(0), row_pages.stride(0), keys.stride(0), units, units + rows,
        kv_heads, repeats, width, padded, members, lanes, own_lanes, PAGE, _block(padded, keys.element_size()),
        "ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=2 if lanes <= 32 else 4, num_stages=STAGES,
    )  # fmt: skip
    output = torch.empty_like(query)
    _merge[(rows * heads,)](
        far, far_weights, near, near_weights, first, row_seats, output, units,
        kv_heads, repeats, width, padded, members, PIECES, num_warps=1,
    )  # fmt: skip
    return output


@decode_attention.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape)


def _scratch(query: Tensor, items: int, lanes: int, width: int) -> tuple[Tensor, Tensor]:
    """Pieces and their weights."""
    pieces = query.new_empty(items, lanes, width, dtype=torch.float32)
    return pieces, query.new_empty(items, lanes, dtype=torch.float32)


def _heads_together(tensor: Tensor) -> Tensor:
    """Rows may stand apart, as parts of a wider product do: a copy of them would be a kernel of its own."""
    return tensor if tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous()


def _block(width: int, size: int) -> int:
    """Keys read at a time: a page, or less where heads are wide and numbers long."""
    fits = SHARED_BYTES // (STAGES * 2 * width * size)
    return max(16, min(PAGE, 1 << (fits.bit_length() - 1)))
