"""Options of a run on several processes, and which of them gets which groups."""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from proximo.models.adapters.lora import Lora


@dataclass(frozen=True)
class Ranks:
    """Processes that hold the model in shards between them (FSDP2). Rank 0 conducts the run, the others follow."""

    processes: int = 0
    """Number of processes, one for each GPU, or any number on a CPU. 0: as many as --ranks, torchrun or SLURM start."""
    shard: int = 0
    """Processes that hold one copy of the model between them: a divisor of `processes`, such as the GPUs of one node.
    0: all of them."""
    timeout: float = 600.0
    """Seconds that a process waits for the others inside a pass before the run fails."""
    cluster: Literal["local", "ray"] = "local"
    """Place where the processes are started. `local`: on this machine. `ray`: on the nodes of a Ray cluster, which all
    see the run folder and have the same Python. Ray places them and notices losses; no data passes through it."""
    address: str = "auto"
    """Address of the Ray cluster, such as 10.0.0.1:6379; `ray` only. auto: the one that this machine belongs to."""

    def __post_init__(self) -> None:
        if self.processes < 0:
            raise ValueError(f"ranks.processes is {self.processes}: give at least 1, or 0 to leave it to --ranks")
        if self.shard < 0 or (self.shard and self.processes % self.shard):
            raise ValueError(
                f"ranks.shard is {self.shard}, ranks.processes {self.processes}: give a divisor of the processes, or 0"
            )
        if self.cluster == "local" and self.address != "auto":
            raise ValueError(
                f'ranks.address is {self.address!r}, but ranks.cluster is "local": use "ray", or leave it out'
            )
        if self.timeout <= 0:
            raise ValueError(f"ranks.timeout is {self.timeout}: give a number of seconds above 0")

    def check_run(self, section: str, moments: str, adapter: Lora | None = None, sampler: Any = None) -> None:
        """Refuse what shards cannot be; ValueError. `section` of the config has the moments."""
        if moments != "float32":
            raise ValueError(
                f"{section}.adam_moments is {moments!r}: with ranks they are float32 in shards; leave one out"
            )
        if adapter is not None and adapter.quantize_base is not None:
            raise ValueError("ranks: a quantised base cannot be sharded: leave adapter.quantize_base out, or ranks")
        if getattr(sampler, "keeps_older_weights", False):
            kind = type(sampler).__name__
            raise ValueError(f"sampler.type is {kind}, which keeps older weights, and ranks do not: leave one out")


def deal(sizes: Mapping[int, int], ranks: int) -> list[list[int]]:
    """Numbers of groups for each rank: the largest group first, each to the rank with the fewest tokens so far."""
    filled, dealt = [(0, rank) for rank in range(ranks)], [list[int]() for _ in range(ranks)]
    for number in sorted(sizes, key=lambda number: (-sizes[number], number)):
        tokens, rank = filled[0]
        dealt[rank].append(number)
        heapq.heapreplace(filled, (tokens + sizes[number], rank))
    return dealt
