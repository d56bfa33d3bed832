"""Named tensors as buckets of bytes, and a gloo group between a learner and an engine's workers to send them over.

Imported by vLLM's workers too, so it needs torch alone.
"""

# pyright: reportPrivateImportUsage=false
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 1 << 26
"""Bytes of a bucket; a larger tensor is a bucket of its own."""


@dataclass(frozen=True)
class Layout:
    """Layout of a bucket, one entry for each tensor; as JSON it says what to receive."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]

    def info(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [
            math.prod(shape) * getattr(torch, dtype).itemsize
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        ]


def packed(named: Iterable[tuple[str, Tensor]], limit: int = BUCKET_BYTES) -> Iterator[tuple[Layout, Tensor]]:
    """Weights in buckets, each with its layout, in the memory of the host."""
    held: list[tuple[str, Tensor]] = []
    used = 0
    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        if held and used + size > limit:
            yield _bucket(held)
            held, used = [], 0
        held.append((name, tensor))
        used += size
    if held:
        yield _bucket(held)


def _bucket(named: list[tuple[str, Tensor]]) -> tuple[Layout, Tensor]:
    parts = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for _, tensor in named]
    layout = Layout(
        [name for name, _ in named],
        [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        [list(tensor.shape) for _, tensor in named],
    )
    return layout, torch.cat(parts)


def unpacked(layout: Layout, bucket: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket. They are copies: a slice of bytes need not be aligned for its type."""
    start = 0
    for name, dtype, shape, size in zip(layout.names, layout.dtypes, layout.shapes, layout.sizes, strict=True):
        yield name, bucket[start : start + size].clone().view(getattr(torch, dtype)).view(shape)
        start += size


def open_store(address: str, size: int, deadline: float) -> dist.TCPStore:
    """The learner's end of a meeting place; its port is free and chosen here."""
    _forget_elastic_store()
    return dist.TCPStore(address, 0, size, True, timedelta(seconds=deadline), wait_for_workers=False)


def connect_store(address: str, port: int, size: int, deadline: float) -> dist.TCPStore:
    _forget_elastic_store()
    return dist.TCPStore(address, port, size, False, timedelta(seconds=deadline))


def _forget_elastic_store() -> None:
    """Remove the variable that under torchrun makes each later store a client of the launcher's: joining would hang."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)


def gloo_group(store: dist.Store, rank: int, size: int, deadline: float) -> dist.ProcessGroupGloo:
    """A group of its own, unknown to torch.distributed's default group."""
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=deadline))


def broadcast(group: dist.ProcessGroupGloo, tensor: Tensor) -> dist.Work:
    """Start to send a tensor from rank 0 to all others, or to receive it."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([tensor], options)  # pyright: ignore[reportAttributeAccessIssue]


def receive(group: dist.ProcessGroupGloo, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """One bucket from the learner."""
    bucket = torch.empty(sum(layout.sizes), dtype=torch.uint8)
    broadcast(group, bucket).wait()
    return unpacked(layout, bucket)
