"""Options of a run on several processes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """Processes that hold the model in shards between them (FSDP2). Rank 0 conducts the run, the others follow."""

    processes: int = 2
    """Number of processes, one for each GPU, or any number on a CPU."""
    shard: int = 0
    """Processes that hold one copy of the model between them: a divisor of `processes`, such as the GPUs of one node.
    0: all of them."""
    timeout: float = 600.0
    """Seconds that a process waits for the others inside a pass before the run fails."""

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ValueError(f"ranks.processes is {self.processes}: give at least 1")
        if self.shard < 0 or (self.shard and self.processes % self.shard):
            raise ValueError(
                f"ranks.shard is {self.shard}, ranks.processes {self.processes}: give a divisor of the processes, or 0"
            )
        if self.timeout <= 0:
            raise ValueError(f"ranks.timeout is {self.timeout}: give a number of seconds above 0")
