"""Decode attention on a GPU: a prompt's keys are read once for all of its samples, and no key beyond a row's end.

Three small kernels. One writes each row's new key and value. One attends: a program takes a piece of a prompt with
the queries of several of its samples, or a piece of one row's own tokens. The last merges the pieces by their
log-sum-exp, which is exact. Lengths are read on the device, so that a captured graph serves every length.

Only imported where triton is.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
PROGRAMS = 528
"""Work is cut into at least so many pieces, a few for each multiprocessor of a large GPU."""
BLOCK = 64
"""Keys read at a time."""
STAGES = 3


@triton.jit
def _write(key, value, keys, values, places, key_stride, value_stride, row_stride, head_stride, WIDTH: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, WIDTH)
    source = head * WIDTH + dims
    target = row.to(tl.int64) * row_stride + head * head_stride + tl.load(places + row) * WIDTH + dims
    tl.store(keys + target, tl.load(key + row * key_stride + source))
    tl.store(values + target, tl.load(value + row * value_stride + source))


@triton.jit
def _span(query, keys, values, start, stop, scale, LANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    """Attention of LANES queries over tokens start to stop, with the logarithm (base 2) of its normaliser."""
    dims, steps = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    peak = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    mixed = tl.zeros([LANES, WIDTH], tl.float32)
    for first in range(start, stop, BLOCK):
        places = first + steps
        inside = places < stop
        key = tl.load(keys + places[None, :] * WIDTH + dims[:, None], mask=inside[None, :], other=0.0)
        scores = tl.dot(query, key, input_precision=PRECISION) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp2(peak - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(values + places[:, None] * WIDTH + dims[None, :], mask=inside[:, None], other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        peak = higher
    return mixed / total[:, None], peak + tl.log2(total)


@triton.jit
def _attend(query, prefix_keys, prefix_values, prefix_lengths, keys, values, places, unit_prefix, unit_rows,
            pieces, weights, scale, prefix_stride, prefix_head_stride, row_stride, head_stride, num_units,
            HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr, MEMBERS: tl.constexpr,
            LANES: tl.constexpr, OWN_LANES: tl.constexpr, PREFIX_PIECES: tl.constexpr, OWN_PIECES: tl.constexpr,
            BLOCK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    PIECES: tl.constexpr = PREFIX_PIECES + OWN_PIECES
    program = tl.program_id(0)
    dims = tl.arange(0, WIDTH)
    if program < num_units * HEADS * PREFIX_PIECES:
        piece = program % PREFIX_PIECES
        head = (program // PREFIX_PIECES) % HEADS
        unit = program // (PREFIX_PIECES * HEADS)
        prefix = tl.load(unit_prefix + unit)
        if prefix >= 0:
            lanes = tl.arange(0, LANES)
            row = tl.load(unit_rows + unit * MEMBERS + lanes // REPEATS, mask=lanes < MEMBERS * REPEATS, other=-1)
            place = (row * HEADS + head) * REPEATS + lanes % REPEATS
            taken = row >= 0
            length = tl.load(prefix_lengths + prefix)
            chunk = tl.cdiv(tl.cdiv(length, PREFIX_PIECES), BLOCK) * BLOCK
            start = piece * chunk
            stop = tl.minimum(start + chunk, length)
            if start < stop:
                asked = tl.load(query + place[:, None] * WIDTH + dims[None, :], mask=taken[:, None], other=0.0)
                base = prefix.to(tl.int64) * prefix_stride + head * prefix_head_stride
                mixed, weight = _span(asked, prefix_keys + base, prefix_values + base, start, stop, scale, LANES,
                                      WIDTH, BLOCK, PRECISION)  # fmt: skip
                target = place * PIECES + piece
                tl.store(pieces + target[:, None] * WIDTH + dims[None, :], mixed, mask=taken[:, None])
                tl.store(weights + target, weight, mask=taken)
            else:
                tl.store(weights + place * PIECES + piece, tl.full([LANES], float("-inf"), tl.float32), mask=taken)
    else:
        program -= num_units * HEADS * PREFIX_PIECES
        piece = program % OWN_PIECES
        head = (program // OWN_PIECES) % HEADS
        row = program // (OWN_PIECES * HEADS)
        lanes = tl.arange(0, OWN_LANES)
        place = (row * HEADS + head) * REPEATS + lanes
        taken = lanes < REPEATS
        length = tl.load(places + row) + 1
        chunk = tl.cdiv(tl.cdiv(length, OWN_PIECES), BLOCK) * BLOCK
        start = piece * chunk
        stop = tl.minimum(start + chunk, length)
        target = place * PIECES + PREFIX_PIECES + piece
        if start < stop:
            asked = tl.load(query + place[:, None] * WIDTH + dims[None, :], mask=taken[:, None], other=0.0)
            base = row.to(tl.int64) * row_stride + head * head_stride
            mixed, weight = _span(asked, keys + base, values + base, start, stop, scale, OWN_LANES, WIDTH, BLOCK,
                                  PRECISION)  # fmt: skip
            tl.store(pieces + target[:, None] * WIDTH + dims[None, :], mixed, mask=taken[:, None])
            tl.store(weights + target, weight, mask=taken)
        else:
            tl.store(weights + target, tl.full([OWN_LANES], float("-inf"), tl.float32), mask=taken)


@triton.jit
def _merge(pieces, weights, output, PIECES: tl.constexpr, ROOM: tl.constexpr, WIDTH: tl.constexpr):
    place = tl.program_id(0)
    steps, dims = tl.arange(0, ROOM), tl.arange(0, WIDTH)
    inside = steps < PIECES
    weight = tl.load(weights + place * PIECES + steps, mask=inside, other=float("-inf"))
    share = tl.exp2(weight - tl.max(weight, 0))
    share = share / tl.sum(share, 0)
    # A piece without tokens was not written: what lies there must not be touched, it may be NaN.
    written = inside & (share > 0)
    piece = tl.load(
        pieces + (place * PIECES + steps)[:, None] * WIDTH + dims[None, :], mask=written[:, None], other=0.0
    )
    mixed = tl.sum(piece * share[:, None], 0)
    tl.store(output + place * WIDTH + dims, mixed.to(output.dtype.element_ty))


@torch.library.custom_op("proximo::decode_attention", mutates_args=("keys", "values"))
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    prefix_lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    unit_prefix: Tensor,
    unit_rows: Tensor,
    scale: float,
) -> Tensor:
    """[R, H, D] queries; keys of prompts [Q, K, P, D] and of rows [R, K, S, D]; a unit is a prompt and some rows."""
    rows, heads, width = query.shape
    kv_heads, repeats = key.shape[1], heads // key.shape[1]
    num_units, members = unit_rows.shape
    query, key, value = query.contiguous(), _heads_together(key), _heads_together(value)
    _write[(rows, kv_heads)](
        key, value, keys, values, places, key.stride(0), value.stride(0), keys.stride(0), keys.stride(1), width
    )

    prefix_pieces = _pieces(num_units * kv_heads, prefix_keys.shape[2])
    own_pieces = _pieces(rows * kv_heads, keys.shape[2])
    count = prefix_pieces + own_pieces
    pieces = query.new_empty(rows * heads * count, width, dtype=torch.float32)
    weights = query.new_empty(rows * heads * count, dtype=torch.float32)
    lanes = max(16, triton.next_power_of_2(members * repeats))
    grid = kv_heads * (num_units * prefix_pieces + rows * own_pieces)
    _attend[(grid,)](
        query, prefix_keys, prefix_values, prefix_lengths, keys, values, places, unit_prefix, unit_rows,
        pieces, weights, scale * LOG2_E, prefix_keys.stride(0), prefix_keys.stride(1), keys.stride(0), keys.stride(1),
        num_units, kv_heads, repeats, width, members,
        lanes, max(16, triton.next_power_of_2(repeats)),
        prefix_pieces, own_pieces, BLOCK, "ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=2 if lanes <= 32 else 4, num_stages=STAGES,
    )  # fmt: skip
    output = torch.empty_like(query)
    _merge[(rows * heads,)](pieces, weights, output, count, triton.next_power_of_2(count), width, num_warps=1)
    return output


@decode_attention.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape)


def _heads_together(tensor: Tensor) -> Tensor:
    """Rows may stand apart, as parts of a wider product do: a copy of them would be a kernel of its own."""
    return tensor if tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous()


def _pieces(spans: int, length: int) -> int:
    """How many programs share a span, so that few long spans keep a GPU busy too."""
    return max(1, min(-(-PROGRAMS // spans), -(-length // (2 * BLOCK)), 16))
