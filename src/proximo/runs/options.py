"""Options of saving a run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointOptions:
    """Times at which checkpoints are written, and which are kept. These options do not change a run's results."""

    every: int = 10
    """Steps between checkpoints; at most this many repeat after a crash. The last step is always saved."""
    keep: int = 2
    """Number of newest checkpoints kept; if one is damaged, a resume uses the one before it."""
    keep_best: bool = True
    """Keep the checkpoint with the best evaluation.metric, too; see evaluation.every."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise ValueError(f"checkpoints.every is {self.every}, checkpoints.keep {self.keep}: both are at least 1")
