"""Kernels of attention over the tiles of a packed row, and of its gradient, without atomics: the same bits each time.

Forward, and for the queries' gradient, a program takes a tile of queries of one head through its prompt's keys, then
its own. For the gradient of keys and values, one takes a tile of keys through queries that attend to it, of all heads
that share it. Scores and log-sum-exps are in base 2.

Only imported where triton is.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

import triton
import triton.language as tl


@triton.jit
def _rows(pointer, rows, until, dims, row_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Rows of a head, [rows, dims]; with MASKED, 0 from `until` on."""
    places = pointer + rows[:, None].to(tl.int64) * row_stride + dims[None, :]
    if MASKED and PADDED != WIDTH:
        return tl.load(places, mask=(rows < until)[:, None] & (dims < WIDTH)[None, :], other=0.0)
    if MASKED:
        return tl.load(places, mask=(rows < until)[:, None], other=0.0)
    if PADDED != WIDTH:
        return tl.load(places, mask=(dims < WIDTH)[None, :], other=0.0)
    return tl.load(places)


@triton.jit
def _attended(mixed, total, peak, query, rows, key, value, begin, until, key_stride, value_stride, scale,
              WIDTH: tl.constexpr, PADDED: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """One step of the forward pass: the keys from `begin` on. MASKED: those up to `until` and up to the query."""
    dims, keys = tl.arange(0, PADDED), begin + tl.arange(0, STEP)
    near = _rows(key, keys, until, dims, key_stride, WIDTH, PADDED, MASKED)
    scores = tl.dot(query, tl.trans(near), input_precision=PRECISION) * scale
    if MASKED:
        scores = tl.where((keys < until)[None, :] & (keys[None, :] <= rows[:, None]), scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    shrink = tl.exp2(peak - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * shrink + tl.sum(weights, 1)
    held = _rows(value, keys, until, dims, value_stride, WIDTH, PADDED, MASKED)
    mixed = mixed * shrink[:, None]
    mixed = tl.dot(weights.to(held.dtype), held, mixed, input_precision=PRECISION)
    return mixed, total, higher


@triton.jit
def attend_tiles(query, key, value, output, sums, tiles, query_stride, query_head, key_stride, key_head, value_stride,
             value_head, count, scale, HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr,
             PADDED: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    head, tile = tl.program_id(0), tiles + tl.program_id(1) * 5
    start, end, span_start = tl.load(tile) + tl.program_id(2) * ROWS, tl.load(tile + 1), tl.load(tile + 2)
    first, last = tl.load(tile + 3), tl.load(tile + 4)
    if start >= end:
        return
    rows, dims = start + tl.arange(0, ROWS), tl.arange(0, PADDED)
    asked = _rows(query + head * query_head, rows, end, dims, query_stride, WIDTH, PADDED, True)
    key += head // REPEATS * key_head
    value += head // REPEATS * value_head
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED], tl.float32)
    whole = first + (last - first) // STEP * STEP
    for begin in range(first, whole, STEP):
        mixed, total, peak = _attended(mixed, total, peak, asked, rows, key, value, begin, last, key_stride,
                                       value_stride, scale, WIDTH, PADDED, STEP, False, PRECISION)  # fmt: skip
    for begin in range(whole, last, STEP):
        mixed, total, peak = _attended(mixed, total, peak, asked, rows, key, value, begin, last, key_stride,
                                       value_stride, scale, WIDTH, PADDED, STEP, True, PRECISION)  # fmt: skip
    whole = span_start + (start - span_start) // STEP * STEP
    for begin in range(span_start, whole, STEP):
        mixed, total, peak = _attended(mixed, total, peak, asked, rows, key, value, begin, end, key_stride,
                                       value_stride, scale, WIDTH, PADDED, STEP, False, PRECISION)  # fmt: skip
    for begin in range(whole, tl.minimum(start + ROWS, end), STEP):
        mixed, total, peak = _attended(mixed, total, peak, asked, rows, key, value, begin, end, key_stride,
                                       value_stride, scale, WIDTH, PADDED, STEP, True, PRECISION)  # fmt: skip
    inside = rows < end
    target = output + (rows[:, None].to(tl.int64) * HEADS + head) * WIDTH + dims[None, :]
    tl.store(target, (mixed / total[:, None]).to(output.dtype.element_ty),
             mask=inside[:, None] & (dims < WIDTH)[None, :])  # fmt: skip
    tl.store(sums + head * count + rows, peak + tl.log2(total), mask=inside)


@triton.jit
def _to_queries(slope, query, pull, ends, drift, rows, key, value, begin, until, key_stride, value_stride, scale,
                WIDTH: tl.constexpr, PADDED: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """One step of the queries' gradient: what the keys from `begin` on add to it."""
    dims, keys = tl.arange(0, PADDED), begin + tl.arange(0, STEP)
    near = _rows(key, keys, until, dims, key_stride, WIDTH, PADDED, MASKED)
    held = _rows(value, keys, until, dims, value_stride, WIDTH, PADDED, MASKED)
    scores = tl.dot(query, tl.trans(near), input_precision=PRECISION) * scale
    weights = tl.exp2(scores - ends[:, None])
    if MASKED:
        weights = tl.where((keys < until)[None, :] & (keys[None, :] <= rows[:, None]), weights, 0.0)
    pulls = tl.dot(pull, tl.trans(held), input_precision=PRECISION)
    slopes = weights * (pulls - drift[:, None])
    return tl.dot(slopes.to(near.dtype), near, slope, input_precision=PRECISION)


@triton.jit
def query_gradient(query, key, value, output, gradient, sums, drifts, result, tiles, query_stride, query_head,
                    key_stride, key_head, value_stride, value_head, gradient_stride, gradient_head, count, scale,
                    factor, HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
                    ROWS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Also the product of output and gradient of each row, which the gradient of the keys needs."""
    head, tile = tl.program_id(0), tiles + tl.program_id(1) * 5
    start, end, span_start = tl.load(tile) + tl.program_id(2) * ROWS, tl.load(tile + 1), tl.load(tile + 2)
    first, last = tl.load(tile + 3), tl.load(tile + 4)
    if start >= end:
        return
    rows, dims = start + tl.arange(0, ROWS), tl.arange(0, PADDED)
    inside = rows < end
    asked = _rows(query + head * query_head, rows, end, dims, query_stride, WIDTH, PADDED, True)
    pull = _rows(gradient + head * gradient_head, rows, end, dims, gradient_stride, WIDTH, PADDED, True)
    answer = _rows(output + head * WIDTH, rows, end, dims, HEADS * WIDTH, WIDTH, PADDED, True)
    drift = tl.sum(answer.to(tl.float32) * pull.to(tl.float32), 1)
    tl.store(drifts + head * count + rows, drift, mask=inside)
    ends = tl.load(sums + head * count + rows, mask=inside, other=float("inf"))
    key += head // REPEATS * key_head
    value += head // REPEATS * value_head
    slope = tl.zeros([ROWS, PADDED], tl.float32)
    whole = first + (last - first) // STEP * STEP
    for begin in range(first, whole, STEP):
        slope = _to_queries(slope, asked, pull, ends, drift, rows, key, value, begin, last, key_stride, value_stride,
                            scale, WIDTH, PADDED, STEP, False, PRECISION)  # fmt: skip
    for begin in range(whole, last, STEP):
        slope = _to_queries(slope, asked, pull, ends, drift, rows, key, value, begin, last, key_stride, value_stride,
                            scale, WIDTH, PADDED, STEP, True, PRECISION)  # fmt: skip
    whole = span_start + (start - span_start) // STEP * STEP
    for begin in range(span_start, whole, STEP):
        slope = _to_queries(slope, asked, pull, ends, drift, rows, key, value, begin, end, key_stride, value_stride,
                            scale, WIDTH, PADDED, STEP, False, PRECISION)  # fmt: skip
    for begin in range(whole, tl.minimum(start + ROWS, end), STEP):
        slope = _to_queries(slope, asked, pull, ends, drift, rows, key, value, begin, end, key_stride, value_stride,
                            scale, WIDTH, PADDED, STEP, True, PRECISION)  # fmt: skip
    target = result + (rows[:, None].to(tl.int64) * HEADS + head) * WIDTH + dims[None, :]
    tl.store(target, (slope * factor).to(result.dtype.element_ty), mask=inside[:, None] & (dims < WIDTH)[None, :])


@triton.jit
def _to_keys(key_slope, value_slope, key, value, keys, query, gradient, sums, drifts, begin, until, query_stride,
             gradient_stride, scale, WIDTH: tl.constexpr, PADDED: tl.constexpr, STEP: tl.constexpr,
             MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One step of the keys' and values' gradient: what the queries from `begin` on add to it."""
    dims, rows = tl.arange(0, PADDED), begin + tl.arange(0, STEP)
    asked = _rows(query, rows, until, dims, query_stride, WIDTH, PADDED, MASKED)
    pull = _rows(gradient, rows, until, dims, gradient_stride, WIDTH, PADDED, MASKED)
    if MASKED:  # a row that is not there weighs nothing
        ends = tl.load(sums + rows, mask=rows < until, other=float("inf"))
        drift = tl.load(drifts + rows, mask=rows < until, other=0.0)
    else:
        ends, drift = tl.load(sums + rows), tl.load(drifts + rows)
    scores = tl.dot(key, tl.trans(asked), input_precision=PRECISION) * scale
    weights = tl.exp2(scores - ends[None, :])
    if MASKED:
        weights = tl.where(keys[:, None] <= rows[None, :], weights, 0.0)
    value_slope = tl.dot(weights.to(pull.dtype), pull, value_slope, input_precision=PRECISION)
    pulls = tl.dot(value, tl.trans(pull), input_precision=PRECISION)
    slopes = weights * (pulls - drift[None, :])
    return tl.dot(slopes.to(asked.dtype), asked, key_slope, input_precision=PRECISION), value_slope


@triton.jit
def key_gradient(query, key, value, gradient, sums, drifts, key_result, value_result, parts, tiles, query_stride,
                  query_head, key_stride, key_head, value_stride, value_head, gradient_stride, gradient_head, count,
                  scale, factor, HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr,
                  PADDED: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    head, tile = tl.program_id(0), tiles + tl.program_id(1) * 5
    begin = tl.program_id(2) * ROWS
    start, end = tl.load(tile) + begin, tl.load(tile + 1)
    first, last, part_slot = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    if start >= end:
        return
    keys, dims = start + tl.arange(0, ROWS), tl.arange(0, PADDED)
    near = _rows(key + head * key_head, keys, end, dims, key_stride, WIDTH, PADDED, True)
    held = _rows(value + head * value_head, keys, end, dims, value_stride, WIDTH, PADDED, True)
    key_slope = tl.zeros([ROWS, PADDED], tl.float32)
    value_slope = tl.zeros([ROWS, PADDED], tl.float32)
    # Queries before all of these keys attend to none; those behind all of them need no mask, but at the end. All heads
    # in one loop, so that the next one's queries are on their way when one ends.
    first += (tl.maximum(start - first, 0)) // STEP * STEP
    free = tl.minimum(first + (tl.maximum(start + ROWS - first, 0) + STEP - 1) // STEP * STEP, last)
    whole = free + (last - free) // STEP * STEP
    steps = (free - first + STEP - 1) // STEP
    for index in range(steps * REPEATS):
        asker, at = head * REPEATS + index // steps, first + index % steps * STEP
        key_slope, value_slope = _to_keys(
            key_slope, value_slope, near, held, keys, query + asker * query_head, gradient + asker * gradient_head,
            sums + asker * count, drifts + asker * count, at, last, query_stride, gradient_stride, scale,
            WIDTH, PADDED, STEP, True, PRECISION)  # fmt: skip
    steps = (whole - free) // STEP
    for index in range(steps * REPEATS):
        asker, at = head * REPEATS + index // steps, free + index % steps * STEP
        key_slope, value_slope = _to_keys(
            key_slope, value_slope, near, held, keys, query + asker * query_head, gradient + asker * gradient_head,
            sums + asker * count, drifts + asker * count, at, last, query_stride, gradient_stride, scale,
            WIDTH, PADDED, STEP, False, PRECISION)  # fmt: skip
    if whole < last:
        for repeat in range(REPEATS):
            asker = head * REPEATS + repeat
            key_slope, value_slope = _to_keys(
                key_slope, value_slope, near, held, keys, query + asker * query_head, gradient + asker * gradient_head,
                sums + asker * count, drifts + asker * count, whole, last, query_stride, gradient_stride, scale,
                WIDTH, PADDED, STEP, True, PRECISION)  # fmt: skip
    key_slope = key_slope * factor
    if part_slot < 0:
        inside = (keys < end)[:, None] & (dims < WIDTH)[None, :]
        target = (keys[:, None].to(tl.int64) * (HEADS // REPEATS) + head) * WIDTH + dims[None, :]
        tl.store(key_result + target, key_slope.to(key_result.dtype.element_ty), mask=inside)
        tl.store(value_result + target, value_slope.to(value_result.dtype.element_ty), mask=inside)
    else:
        slot = ((part_slot.to(tl.int64) * (HEADS // REPEATS) + head) * 2 * TILE + begin + tl.arange(0, ROWS)) * PADDED
        part = parts + slot[:, None] + dims[None, :]
        tl.store(part, key_slope)
        tl.store(part + TILE * PADDED, value_slope)


@triton.jit
def sum_parts(parts, key_result, value_result, table, HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
            ROWS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """The parts of a tile's gradient, in their order."""
    head, item = tl.program_id(0), table + tl.program_id(1) * 4
    begin = tl.program_id(2) * ROWS
    start, end = tl.load(item) + begin, tl.load(item + 1)
    first, number = tl.load(item + 2), tl.load(item + 3)
    if first != tl.program_id(1):  # the first part's program sums them
        return
    steps, dims = tl.arange(0, ROWS), tl.arange(0, PADDED)
    key_slope = tl.zeros([ROWS, PADDED], tl.float32)
    value_slope = tl.zeros([ROWS, PADDED], tl.float32)
    for part in range(first, first + number):
        slot = ((tl.cast(part, tl.int64) * HEADS + head) * 2 * TILE + begin + steps) * PADDED
        source = parts + slot[:, None] + dims[None, :]
        key_slope += tl.load(source)
        value_slope += tl.load(source + TILE * PADDED)
    inside = (start + steps < end)[:, None] & (dims < WIDTH)[None, :]
    target = ((start + steps)[:, None].to(tl.int64) * HEADS + head) * WIDTH + dims[None, :]
    tl.store(key_result + target, key_slope.to(key_result.dtype.element_ty), mask=inside)
    tl.store(value_result + target, value_slope.to(value_result.dtype.element_ty), mask=inside)
