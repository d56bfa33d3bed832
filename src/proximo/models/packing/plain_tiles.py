"""Attention over the tiles of a packed row in plain torch, where there are no kernels."""

import torch
from torch import Tensor

from proximo.types.tensor_types import Float, Int

TILE = 128
"""Tokens of a tile."""

Tables = tuple[Int[Tensor, "Q 5"], Int[Tensor, "K 5"], Int[Tensor, "S 4"]]
"""`queries`, `keys` and `sums` of `Tiles`."""


def forward(
    query: Float[Tensor, "N H D"],
    key: Float[Tensor, "N K D"],
    value: Float[Tensor, "N K D"],
    queries: Tensor,
    scale: float,
) -> tuple[Float[Tensor, "N H D"], Float[Tensor, "H N"]]:
    """Attention of each query, and the log-sum-exp of its scores."""
    dtype = query.dtype
    query, key, value = _wide(query), _wide(key), _wide(value)
    output, ends = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    for start, end, span_start, first, last in queries.tolist():
        seen = torch.cat((torch.arange(first, last), torch.arange(span_start, end))).to(query.device)
        scores = _scores(query[start:end], key[seen], torch.arange(start, end), seen, scale)
        ends[:, start:end] = scores.logsumexp(2)
        output[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(2), _repeated(value[seen], query))
    return output.to(dtype), ends


def gradient(
    pull: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, ends: Tensor, tables: Tables, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, from that of the output."""
    (queries, keys, sums), dtype = tables, query.dtype
    pull, query, key, value, output = _wide(pull), _wide(query), _wide(key), _wide(value), _wide(output)
    to_query, to_key, to_value = (torch.empty_like(heads) for heads in (query, key, value))
    drift = (pull * output).sum(2).T

    def slopes(start: int, end: int, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of queries from start to end over these keys, and the gradient of their scores."""
        scores = _scores(query[start:end], key[seen], torch.arange(start, end), seen, scale)
        weights = (scores - ends[:, start:end, None]).exp()
        pulls = torch.einsum("qhd,khd->hqk", pull[start:end], _repeated(value[seen], query))
        return weights, weights * (pulls - drift[:, start:end, None])

    for start, end, span_start, first, last in queries.tolist():
        seen = torch.cat((torch.arange(first, last), torch.arange(span_start, end))).to(query.device)
        _, slope = slopes(start, end, seen)
        to_query[start:end] = scale * torch.einsum("hqk,khd->qhd", slope, _repeated(key[seen], query))
    parts = key.new_zeros(len(sums), 2, TILE, *key.shape[1:])
    for start, end, first, last, slot in keys.tolist():
        weights, slope = slopes(first, last, torch.arange(start, end, device=query.device))
        to_keys = scale * torch.einsum("hqk,qhd->khd", slope, query[first:last])
        held = torch.einsum("hqk,qhd->khd", weights, pull[first:last])
        if slot < 0:
            to_key[start:end], to_value[start:end] = _shared(to_keys, key), _shared(held, key)
        else:
            parts[slot, 0, : end - start], parts[slot, 1, : end - start] = _shared(to_keys, key), _shared(held, key)
    for start, end, slot, number in sums.tolist():
        to_key[start:end], to_value[start:end] = parts[slot : slot + number, :, : end - start].sum(0)
    return to_query.to(dtype), to_key.to(dtype), to_value.to(dtype)


def _scores(query: Tensor, key: Tensor, rows: Tensor, seen: Tensor, scale: float) -> Float[Tensor, "H Q K"]:
    """A query attends to no key behind it."""
    scores = torch.einsum("qhd,khd->hqk", query, _repeated(key, query)) * scale
    return scores.masked_fill(seen > rows.to(seen.device)[:, None], float("-inf"))


def _wide(heads: Tensor) -> Tensor:
    return heads.to(torch.promote_types(heads.dtype, torch.float32))


def _repeated(heads: Float[Tensor, "M K D"], query: Float[Tensor, "N H D"]) -> Float[Tensor, "M H D"]:
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], 1)


def _shared(slope: Float[Tensor, "M H D"], key: Float[Tensor, "N K D"]) -> Float[Tensor, "M K D"]:
    """Summed over the heads that share a key."""
    return slope.unflatten(1, (key.shape[1], -1)).sum(2)
