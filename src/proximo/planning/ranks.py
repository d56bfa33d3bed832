"""A learner on several ranks: the bytes that each holds, and the seconds of its passes and of its traffic.

Weights, gradients and moments are sharded in float32 over `shard` ranks, and layers are gathered in the dtype of the
pass while they are used. Whole groups go to ranks, the largest first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from proximo.learner.ranks import deal
from proximo.planning.cards import DeviceCard
from proximo.planning.holdings import Component, Holding
from proximo.planning.memory import MemoryUse, StepSize, head_bytes, largest_pass, memory_use
from proximo.planning.times import learning
from proximo.rl.config import RunConfig

WIDE = 4
"""Bytes of a sharded number: float32, without masters."""
AT_ONCE = 2
"""Layers that are gathered at a time: in the backward pass the one that runs, and the one before it."""


@dataclass(frozen=True)
class RankCount:
    """Number of ranks, and of those over which the weights are sharded."""

    number: int
    shard: int
    """Ranks that share one copy of the weights; the copies sum their gradients."""
    per_node: int = 8
    network: float = 50e9
    """Bytes per second between nodes, for each GPU: 400 Gbit/s."""

    def __post_init__(self) -> None:
        if self.shard < 1 or self.number % self.shard:
            raise ValueError(f"shard is {self.shard}: give a divisor of the {self.number} ranks")


@dataclass(frozen=True)
class RankMemory:
    """Predicted bytes of one rank."""

    shards: int
    """Weights, gradients and moments, and frozen models."""
    gathered: int
    """Layers in use: two as they are gathered and, where they are trained, gradients on their way into shards."""
    root: int
    """Embedding and head, which are gathered for the whole pass."""
    head: int
    """Logits of a chunk, and the head's gradient."""
    activations: int
    pass_tokens: int
    parts: int
    """Passes over each group."""
    checkpointed: int
    offloaded: bool
    usable: int

    @property
    def total(self) -> int:
        return self.shards + self.gathered + self.root + self.head + self.activations

    @property
    def fits(self) -> bool:
        return self.total <= self.usable


def rank_memory(holding: Holding, size: StepSize, card: DeviceCard, ranks: RankCount) -> RankMemory:
    """Memory of one rank while engines sample: its part of the weights, and the activations of its passes in what is
    left."""
    sharded = replace(holding, components=tuple(_sharded(component, ranks.shard) for component in holding.components))
    gathered, root = _gathered(holding, ranks)
    local_size = _share(size, ranks)
    free = card.usable - (sharded.total - sharded.pending) - gathered - root
    largest = largest_pass(sharded, local_size, card, free)
    return RankMemory(
        shards=sharded.total,
        gathered=gathered,
        root=root,
        head=head_bytes(holding, card),
        activations=largest.bytes,
        pass_tokens=largest.tokens,
        parts=largest.parts,
        checkpointed=largest.plan.checkpointed,
        offloaded=largest.plan.offloaded,
        usable=card.usable,
    )


def sampling_rank_memory(holding: Holding, size: StepSize, card: DeviceCard, ranks: RankCount) -> MemoryUse:
    """Memory of one rank that also samples, with a whole copy of the policy."""
    copied = holding.dtype.itemsize * holding.shape.parameters
    more = {"the copy that samples": copied} | dict(zip(("layers", "tables"), _gathered(holding, ranks), strict=True))
    sharded = [_sharded(component, ranks.shard) for component in holding.components]
    frozen = [
        Component(name, 0, trained=False, weights=weights, gradients=0, masters=0, moments=0)
        for name, weights in more.items()
    ]
    return memory_use(replace(holding, components=(*sharded, *frozen)), _share(size, ranks), card)


def _share(size: StepSize, ranks: RankCount) -> StepSize:
    """A rank's groups."""
    return replace(size, groups=max(1, -(-size.groups // ranks.number)))


def _gathered(holding: Holding, ranks: RankCount) -> tuple[int, int]:
    """Bytes of the layers that are gathered at a time, and of embedding and head, which are for the whole pass."""
    if ranks.shard == 1:
        return 0, 0
    shape, width = holding.shape, holding.dtype.itemsize
    tables = 1 if shape.config.tie_word_embeddings else 2
    return _weight_bytes(holding) * shape.matrices // shape.layers, width * tables * shape.head


def _weight_bytes(holding: Holding) -> int:
    """Bytes of a layer's weight while a backward pass is at its fullest, at the end of a layer: 10 in half precision.

    The layer itself and the one before it, which is gathered meanwhile; the layer's gradients, whole and in the dtype
    of the pass; and those of the layer behind it, in float32, which FSDP holds while they are reduced. An adapter's
    are small, and its base has none.
    """
    width = holding.dtype.itemsize
    return AT_ONCE * width + (0 if holding.lora else width + WIDE)


def _sharded(component: Component, shard: int) -> Component:
    """Rank 0's part. Trained weights are in float32 and have no masters; frozen ones keep their dtype."""
    if component.whole:
        return component
    weights = WIDE * component.parameters if component.trained else component.weights
    parts = (weights, component.gradients, 0, component.moments)
    weights, gradients, masters, moments = (-(-count // shard) for count in parts)
    return replace(component, weights=weights, gradients=gradients, masters=masters, moments=moments)


@dataclass(frozen=True)
class RankTime:
    """Predicted seconds of a step's learning."""

    scoring: float
    passes: float
    optimizer: float
    traffic: float
    """Seconds in which weights and gradients travel; hidden behind the passes as far as these take longer."""
    balance: float
    """Tokens of the fullest rank, over the average."""

    @property
    def total(self) -> float:
        return self.optimizer + max((self.scoring + self.passes) * self.balance, self.traffic)


def rank_time(
    config: RunConfig,
    holding: Holding,
    size: StepSize,
    lengths: Sequence[Sequence[int]],
    card: DeviceCard,
    ranks: RankCount,
) -> RankTime:
    """Seconds of one step whose groups have completions of these lengths."""
    memory = rank_memory(holding, size, card, ranks)
    flat = [length for group in lengths for length in group]
    alone = learning(config, holding, size, flat, card, parts=memory.parts, checkpointed=memory.checkpointed)
    fullest = balance([size.prompt_tokens + sum(group) for group in lengths], ranks.number, size.minibatches)
    tokens = (size.groups * size.prompt_tokens + sum(flat)) / ranks.number * fullest
    passes = max(config.training.updates, -(-int(tokens) * config.training.epochs // max(memory.pass_tokens, 1)))
    return RankTime(
        scoring=alone.scoring / ranks.number,
        passes=alone.passes / ranks.number,
        optimizer=alone.optimizer / ranks.shard,
        traffic=_traffic(holding, card, ranks, passes, config.training.updates),
        balance=fullest,
    )


def _traffic(holding: Holding, card: DeviceCard, ranks: RankCount, passes: int, updates: int) -> float:
    """Weights are gathered before the forward and before the backward pass, gradients reduced after it, in each pass;
    copies of the weights sum their gradients once an update."""
    parameters, width = holding.shape.parameters, holding.dtype.itemsize
    link = card.link if ranks.shard <= ranks.per_node else min(card.link, ranks.network)
    within = (2 * width + WIDE) * parameters * (ranks.shard - 1) / ranks.shard / link
    copies = ranks.number // ranks.shard
    between = 2 * WIDE * parameters / ranks.shard * (copies - 1) / copies
    slow = card.link if ranks.number <= ranks.per_node else ranks.network
    return passes * within + updates * between / slow


def balance(groups: Sequence[int], ranks: int, minibatches: int) -> float:
    """Tokens of the fullest rank over the average, if whole groups go to the emptiest rank, the largest first, in each
    mini-batch."""
    total, fullest = sum(groups), 0
    for start in range(minibatches):
        sizes = dict(enumerate(groups[start::minibatches]))
        fullest += max(sum(sizes[number] for number in local_groups) for local_groups in deal(sizes, ranks))
    return fullest * ranks / total
