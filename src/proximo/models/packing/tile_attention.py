"""Attention over the tiles of a packed row as one operation of torch, which compiled layers call as it is."""

from typing import Any

import torch
from torch import Tensor

from proximo.models.packing import plain_tiles


@torch.library.custom_op("proximo::packed_attention", mutates_args=())
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of each query, [N, H, D], and the log-sum-exp of its scores, [H, N]; tables are those of `Tiles`."""
    return _implementation(query).forward(query, key, value, queries, scale)


@packed_attention.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    count, heads, _width = query.shape  # not len(): it would tie what is compiled to a number of rows
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape), query.new_empty(heads, count, dtype=wide)


@torch.library.custom_op("proximo::packed_attention_gradient", mutates_args=())
def packed_attention_gradient(
    pull: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    ends: Tensor,
    queries: Tensor,
    keys: Tensor,
    sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; `output` and `ends` are what `packed_attention` returned."""
    tables = (queries, keys, sums)
    return _implementation(query).gradient(pull, query, key, value, output, ends, tables, scale)


@packed_attention_gradient.register_fake
def _(pull: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, pull: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, queries, keys, sums, output, ends = ctx.saved_tensors
    gradients = packed_attention_gradient(pull, query, key, value, output, ends, queries, keys, sums, ctx.scale)
    return *gradients, None, None, None, None


packed_attention.register_autograd(_gradient, setup_context=_keep)


def _implementation(query: Tensor) -> Any:
    if not query.is_cuda:
        return plain_tiles
    from proximo.models.packing import tile_launches  # triton is where a GPU is

    return tile_launches
