"""How far sampling may run ahead of training."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AheadOptions:
    """Running ahead: later steps are sampled while a step is trained. Results are the same on every repetition, and
    the same as those of a sampler that lags: `Mismatched(lag=staleness)`.

    Example: AheadOptions(staleness=1)
    """

    staleness: int = 0
    """Age of the weights that sample a step, in training steps; the first steps sample with the weights of the start.
    0: each step is sampled and then trained. Above 0, use a correction: algorithm.correct."""

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ValueError(f"ahead.staleness is {self.staleness}: give a number of steps, 0 or more")
