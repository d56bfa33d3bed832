"""Launches of the kernels of attention over tiles, with sizes for each head width.

Only imported where triton is.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from proximo.models.packing.plain_tiles import TILE, Tables
from proximo.models.packing.tile_kernels import attend_tiles, key_gradient, query_gradient, sum_parts
from proximo.types.tensor_types import Float

LOG2_E = 1.4426950408889634
SUMMED_ROWS = 16
"""Rows of a program that sums: many programs, since each reads all parts of its rows."""


@dataclass(frozen=True)
class Launch:
    """Sizes of a kernel's program."""

    rows: int
    """Rows of the tile that a program keeps; a divisor of `TILE`."""
    step: int
    """Rows that it takes at a time of those it goes through."""
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Launches:
    forward: Launch
    queries: Launch
    keys: Launch


HALF = {
    64: Launches(Launch(128, 64, 8, 3), Launch(64, 64, 4, 3), Launch(64, 64, 4, 3)),
    128: Launches(Launch(64, 64, 4, 3), Launch(128, 64, 8, 3), Launch(64, 64, 4, 2)),
    256: Launches(Launch(128, 32, 8, 2), Launch(64, 32, 4, 2), Launch(64, 32, 8, 2)),
}
"""Launches by the padded head width, for bfloat16 and float16, as measured on one H200."""
FULL = Launches(Launch(16, 16, 4, 1), Launch(16, 16, 4, 1), Launch(16, 16, 4, 1))
"""Launches for float32, which is for checks: products are written out by numbers, and compile slowly if larger."""


def launches(width: int, dtype: torch.dtype) -> Launches:
    return FULL if dtype == torch.float32 else HALF[min(max(padded_width(width), 64), 256)]


def padded_width(width: int) -> int:
    """The kernels' head width: a power of two, of 16 at least."""
    return max(16, triton.next_power_of_2(width))


def forward(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, scale: float
) -> tuple[Float[Tensor, "N H D"], Float[Tensor, "H N"]]:
    """Attention of each query, and the log-sum-exp of its scores."""
    query, key, value = _plain(query), _plain(key), _plain(value)
    count, heads, width = query.shape
    output, ends = query.new_empty(query.shape), query.new_empty(heads, count, dtype=torch.float32)
    launch = launches(width, query.dtype).forward
    attend_tiles[(heads, queries.shape[0], TILE // launch.rows)](
        query, key, value, output, ends, queries, *_strides(query, key, value), count, scale * LOG2_E,
        *_sizes(query, key, launch), _precision(query), **launch.options,
    )  # fmt: skip
    return output, ends


def gradient(
    pull: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, ends: Tensor, tables: Tables, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, from that of the output."""
    pull, query, key, value = _plain(pull), _plain(query), _plain(key), _plain(value)
    queries, keys, sums = tables
    count, _, width = query.shape
    key_heads, padded = key.shape[1], padded_width(width)
    to_query, to_key, to_value = (heads.new_empty(heads.shape) for heads in (query, key, value))
    drifts = torch.empty_like(ends)
    strides = (*_strides(query, key, value, pull), count, scale * LOG2_E, scale)
    launch = launches(width, query.dtype)
    query_gradient[(query.shape[1], queries.shape[0], TILE // launch.queries.rows)](
        query, key, value, output, pull, ends, drifts, to_query, queries, *strides,
        *_sizes(query, key, launch.queries), _precision(query), **launch.queries.options,
    )  # fmt: skip
    parts = query.new_empty(sums.shape[0], key_heads, 2, TILE, padded, dtype=torch.float32)
    key_gradient[(key_heads, keys.shape[0], TILE // launch.keys.rows)](
        query, key, value, pull, ends, drifts, to_key, to_value, parts, keys, *strides,
        *_sizes(query, key, launch.keys), TILE, _precision(query), **launch.keys.options,
    )  # fmt: skip
    if sums.shape[0]:
        sum_parts[(key_heads, sums.shape[0], TILE // SUMMED_ROWS)](
            parts, to_key, to_value, sums, key_heads, width, padded, SUMMED_ROWS, TILE
        )
    return to_query, to_key, to_value


def _plain(heads: Tensor) -> Tensor:
    """The same with the numbers of a head next to each other."""
    return heads if heads.stride(2) == 1 else heads.contiguous()


def _strides(*heads: Tensor) -> tuple[int, ...]:
    return tuple(stride for each in heads for stride in each.stride()[:2])


def _sizes(query: Tensor, key: Tensor, launch: Launch) -> tuple[int, ...]:
    _, heads, width = query.shape
    return heads, heads // key.shape[1], width, padded_width(width), launch.rows, launch.step


def _precision(query: Tensor) -> str:
    return "ieee" if query.dtype == torch.float32 else "tf32"
