"""The plan of a run: full fine-tuning and LoRA side by side, each with its memory, its time and what would fit."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from proximo.learner.footprint import moments_on
from proximo.losses.pieces.protocols import KeepTraits
from proximo.models import Precision
from proximo.models.adapters.lora import Lora
from proximo.planning.cards import GIB, DeviceCard
from proximo.planning.fitting import largest_groups, longest_completions, smallest_card
from proximo.planning.holdings import Component, Holding, holdings
from proximo.planning.memory import MemoryUse, StepSize, memory_use
from proximo.planning.on_ranks import RanksUse, fewest_ranks, ranks_use
from proximo.planning.times import StepTime, step_time
from proximo.rl.config import RunConfig


@dataclass(frozen=True)
class Way:
    """Way to train the policy."""

    name: str
    components: tuple[Component, ...]
    memory: MemoryUse
    time: StepTime | None
    """Predicted time; None if it does not fit."""
    longest: int | None
    """The longest completions that fit with this group size; None if none do."""
    largest_group: int | None
    """The most samples of a prompt that fit with this length; None if none do."""
    smallest_card: str | None
    """The known card with the least memory on which the step as it is fits; None if there is none."""
    asked: RanksUse | None
    """Memory on the ranks of the config; None if it has none."""
    fewest: RanksUse | None
    """The fewest such GPUs with ranks that hold it, where one does not; None if there are none up to 64."""

    @property
    def fits(self) -> bool:
        return self.memory.fits if self.asked is None else self.asked.fits


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run on a device. Everything in it is predicted: nothing was loaded or measured."""

    model: str
    parameters: int
    dtype: str
    card: DeviceCard
    size: StepSize
    full: Way
    lora: Way
    remarks: tuple[str, ...]

    @property
    def ways(self) -> tuple[Way, Way]:
        return self.full, self.lora

    @property
    def verdicts(self) -> list[str]:
        """Verdict on each way in a line: whether it fits, and what would."""
        return [f"{way.name}: {_verdict(way, self.size, self.card)}" for way in self.ways]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with what follows from them."""
        summary = asdict(self)
        for name, way in (("full", self.full), ("lora", self.lora)):
            summary[name] |= {"fits": way.fits, "peak": way.memory.peak, "seconds": way.time and way.time.total}
        return summary | {"verdicts": self.verdicts}


def make_plan(config: RunConfig, card: DeviceCard, *, prompt_tokens: int, mean_tokens: int | None) -> RunPlan:
    """Plan a run; of its models only the configs are read."""
    size = StepSize.of(config, prompt_tokens, mean_tokens)
    moments = moments_on(config.training.adam_moments, is_gpu=card.is_gpu)
    config = replace(config, training=replace(config.training, adam_moments=moments))
    dtype = planned_dtype(config.dtype, card)
    full, small = holdings(config, dtype, compiled=config.compile and card.is_gpu)
    assert small.lora is not None
    return RunPlan(
        model=config.model,
        parameters=full.shape.parameters,
        dtype=str(dtype).removeprefix("torch."),
        card=card,
        size=size,
        full=_way("full fine-tuning", config, full, size, card),
        lora=_way(_lora_name(small.lora), config, small, size, card),
        remarks=tuple(_remarks(config, full, size, card)),
    )


def _lora_name(lora: Lora) -> str:
    return f"LoRA rank {lora.rank}" + (f" on {lora.quantize_base}" if lora.quantize_base else "")


def planned_dtype(precision: Precision, card: DeviceCard) -> torch.dtype:
    """Pick the dtype as a run does: bfloat16 on a GPU, float32 on a CPU, unless its config says otherwise."""
    if precision != "auto":
        return getattr(torch, precision)
    return torch.bfloat16 if card.is_gpu else torch.float32


def _way(name: str, config: RunConfig, holding: Holding, size: StepSize, card: DeviceCard) -> Way:
    use = memory_use(holding, size, card)
    fitting = smallest_card(holding, size)
    return Way(
        name=name,
        components=holding.components,
        memory=use,
        time=step_time(config, holding, size, use, card) if use.fits else None,
        longest=longest_completions(holding, size, card),
        largest_group=largest_groups(holding, size, card),
        smallest_card=fitting and fitting.name,
        asked=_asked(config, holding, size, card),
        fewest=fewest_ranks(config, holding, size, card) if card.is_gpu and not use.fits else None,
    )


def _asked(config: RunConfig, holding: Holding, size: StepSize, card: DeviceCard) -> RanksUse | None:
    ranks = config.ranks
    if ranks is None or ranks.processes < 2 or (holding.lora is not None and holding.lora.quantize_base):
        return None
    return ranks_use(holding, size, card, ranks, config.sampler)


def _verdict(way: Way, size: StepSize, card: DeviceCard) -> str:
    use, has = way.memory, f"{way.memory.usable / GIB:,.1f}"
    more = (
        []
        if way.fewest is None
        else [f"on {way.fewest.processes} such with --ranks {way.fewest.processes}: {way.fewest.numbers}"]
    )
    if way.asked is not None:
        return f"{way.asked.line} ({card.name})" + (f". What would: {more[0]}" if more and not way.fits else "")
    if way.fits:
        return (
            f"fits, with a predicted peak of {use.peak / GIB:,.1f} of {has} GiB; up to {way.longest or 0:,} tokens × "
            f"{size.group_size} samples, or {size.max_tokens:,} tokens × {way.largest_group or 0} samples"
        )
    if use.needed > use.usable:
        why = f"needs at least {use.needed / GIB:,.1f} GiB, and {card.name} has {has}"
    elif use.refused:
        why = f"the keys of one completion of {size.max_tokens:,} tokens are more than the sampler may take"
    else:
        why = f"predicted peak {use.peak / GIB:,.1f} GiB, and {card.name} has {has}"
    shorter = [f"up to {way.longest:,} tokens × {size.group_size} samples"] if way.longest else []
    fewer = [f"{size.max_tokens:,} tokens × up to {way.largest_group} samples"] if way.largest_group else []
    other = [f"this size on {way.smallest_card}"] if way.smallest_card else []
    would = " or ".join([*shorter, *fewer, *other, *more]) or "no card that is known here"
    return f"does not fit: {why}. What would: {would}"


def _remarks(config: RunConfig, holding: Holding, size: StepSize, card: DeviceCard) -> list[str]:
    """List what the numbers leave out."""
    remarks = ["all numbers are predictions; times leave out grading, the first step's compilation and evaluation"]
    if config.ranks is not None and config.ranks.processes > 1:
        remarks.append(
            "bytes and seconds of the table are those of one GPU; seconds on several ranks are not predicted"
        )
    if size.mean_tokens is None:
        remarks.append("all completions are taken to reach sampling.max_tokens; give --mean-tokens if they end sooner")
    if not holding.shape.is_packed:
        kind = type(holding.shape.model).__name__
        remarks.append(f"{kind} is outside the packed fast path: its padded passes take more memory and time than this")
    if KeepTraits.read(config.algorithm.keep).refills:
        rounds = config.training.refill_rounds
        remarks.append(f"groups that are all correct or all wrong are sampled again: up to {rounds} rollouts a step")
    positions = holding.shape.max_positions
    if positions is not None and size.prompt_tokens + size.max_tokens > positions:
        total = size.prompt_tokens + size.max_tokens
        remarks.append(f"prompt and completion have {total:,} tokens, the model {positions:,} positions: a run refuses")
    if not card.is_gpu:
        remarks.append("on a CPU the peak is that of the whole process, and known less exactly than on a GPU")
    return remarks


Switch = Literal["in_flight", "between", "aggregate"]
