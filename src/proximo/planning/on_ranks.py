"""A run on several ranks: the predicted peak of each, and the fewest ranks on which a run fits."""

from dataclasses import dataclass, replace
from typing import Any

from proximo.learner.ranks import Ranks
from proximo.planning.cards import GIB, DeviceCard
from proximo.planning.holdings import Holding
from proximo.planning.memory import StepSize
from proximo.planning.ranks import RankCount, rank_memory, sampling_rank_memory
from proximo.rl.config import RunConfig

TRIED = (2, 4, 8, 16, 32, 64)
"""Numbers of ranks that are tried where a run does not fit on one GPU."""


@dataclass(frozen=True)
class RanksUse:
    """Predicted memory of each rank."""

    processes: int
    shard: int
    peak: int
    usable: int
    fits: bool
    only_first: bool
    """True if rank 0 alone has this peak, since it holds whole models that the others do not."""

    @property
    def line(self) -> str:
        """Verdict in words: whether it fits, and the peak."""
        weights = "whole weights" if self.shard == 1 else f"weights in {self.shard} shards"
        return f"{'fits' if self.fits else 'does not fit'} on {self.processes} ranks with {weights}: {self.numbers}"

    @property
    def numbers(self) -> str:
        """The peak beside what there is."""
        each = "rank 0" if self.only_first else "each"
        return f"predicted peak {self.peak / GIB:,.1f} of {self.usable / GIB:,.1f} GiB on {each}"


def ranks_use(holding: Holding, size: StepSize, card: DeviceCard, ranks: Ranks, sampler: Any) -> RanksUse:
    """Predict each rank's memory, of which every one has a GPU like this, or a share of this machine's memory."""
    number, shard = ranks.processes, ranks.shard or ranks.processes
    device = card if card.is_gpu else replace(card, memory=card.memory / number, context=card.context / number)
    if getattr(sampler, "reads_weights_only", False):
        memory = rank_memory(holding, size, device, RankCount(number, shard))
        peak, fits = memory.total, memory.fits
    else:
        use = sampling_rank_memory(holding, size, device, RankCount(number, shard))
        peak, fits = use.peak, use.fits
    return RanksUse(number, shard, peak, device.usable, fits, any(each.whole for each in holding.components))


def fewest_ranks(config: RunConfig, holding: Holding, size: StepSize, card: DeviceCard) -> RanksUse | None:
    """Find the smallest power of two of such GPUs, up to 64, whose ranks hold a run; None if there is none."""
    try:
        Ranks().check_run("training", config.training.adam_moments, holding.lora, config.sampler)
    except ValueError:
        return None
    uses = (ranks_use(holding, size, card, Ranks(number), config.sampler) for number in TRIED)
    return next((use for use in uses if use.fits), None)
