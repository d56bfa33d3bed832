"""The nouns that flow through Proximo."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stats:
    """What one loss call saw, as numbers that add up exactly over micro-batches.

    Tensors stay on their device until `floats` is called, so that counting costs no synchronisation.

    Example: stats = stats_of_first_half + stats_of_second_half; stats.floats()["blocked"] -> 0.031
    """

    totals: dict[str, Tensor] = field(default_factory=dict)
    """Losses and counts: added as they are."""
    token_sums: dict[str, Tensor] = field(default_factory=dict)
    """Sums over sampled tokens: read as means over `totals["tokens"]`."""
    peaks: dict[str, Tensor] = field(default_factory=dict)
    """Largest values."""

    def __add__(self, other: "Stats") -> "Stats":
        return Stats(
            totals=_merged(self.totals, other.totals, torch.add),
            token_sums=_merged(self.token_sums, other.token_sums, torch.add),
            peaks=_merged(self.peaks, other.peaks, torch.maximum),
        )

    def floats(self) -> dict[str, float]:
        """Every statistic by name; shares and means are over the sampled tokens."""
        tokens = max(float(self.totals["tokens"]), 1.0)
        return (
            {name: float(value) for name, value in self.totals.items()}
            | {name: float(value) / tokens for name, value in self.token_sums.items()}
            | {name: float(value) for name, value in self.peaks.items()}
        )


def _merged(ours: dict[str, Tensor], theirs: dict[str, Tensor], how) -> dict[str, Tensor]:
    both = {name: how(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}
    return ours | theirs | both
