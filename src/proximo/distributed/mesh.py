"""The processes of a run: torch.distributed behind two verbs and the mesh that a model is sharded over."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from proximo.distributed.watching import RankWatch

PATIENCE = 365 * 86400.0
"""Seconds that a rank waits for the next order, a year: rank 0 may grade or wait for an engine for hours. If it dies,
its connections close and the wait ends at once; if it hangs, `Watch` sees it."""


class Mesh:
    """The processes of a run, numbered by rank. Close it when the run ends.

    Example:
        mesh = Mesh.join(device="cpu", timeout=600.0)  # in each process that torchrun started
        mesh.scatter(["for rank 0", "for rank 1"] if mesh.rank == 0 else None)
    """

    def __init__(self, *, device: str, timeout: float, shard: int = 0, **how: Any) -> None:
        """Join the group. `how` is what `init_process_group` needs to find the others; `shard` as in [ranks]."""
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **how)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        orders = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE))
        assert isinstance(orders, dist.ProcessGroup)
        self.orders = orders
        """Group of all ranks for what is no pass: orders, answers, checkpoints."""
        shape = (self.size,) if shard in (0, self.size) else (self.size // shard, shard)
        self.shard_size = shape[-1]
        self._watch = RankWatch(self.rank, self.size, timeout) if self.size > 1 else None
        names = ("repeat", "shard")[-len(shape) :]
        self.devices: DeviceMesh = init_device_mesh(device, shape, mesh_dim_names=names)
        """Ranks that a model is sharded over; with two dimensions, shards repeat along the first."""
        self.device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        """This rank's own."""

    @classmethod
    def join(cls, *, device: str, timeout: float, shard: int = 0) -> "Mesh":
        """The group that torchrun, SLURM or `proximo train --ranks` started this process for: RANK is set."""
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return cls(device=device, timeout=timeout, shard=shard)

    @classmethod
    def alone(cls, *, device: str = "cpu", timeout: float = 600.0) -> "Mesh":
        """A group of this process only."""
        if device == "cuda":
            torch.cuda.set_device(torch.cuda.current_device())  # torch warns of a device that nobody chose
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        return cls(device=device, timeout=timeout, store=store, rank=0, world_size=1)

    def scatter(self, parts: Sequence[Any] | None) -> Any:
        """Part for this rank of what rank 0 gives, one part for each rank; others give None."""
        received: list[Any] = [None]
        dist.scatter_object_list(received, None if parts is None else list(parts), src=0, group=self.orders)
        return received[0]

    def gather(self, part: Any) -> list[Any]:
        """Parts that the ranks give, in their order; empty on ranks other than 0."""
        parts: list[Any] = [None] * self.size if self.rank == 0 else []
        dist.gather_object(part, parts or None, dst=0, group=self.orders)
        return parts

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        dist.destroy_process_group()
