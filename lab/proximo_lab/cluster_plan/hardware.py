"""Cost of an engine's decode step, from a model's shape and a card's limits."""

from dataclasses import dataclass
from typing import Protocol

from proximo.planning.cards import DeviceCard
from proximo.planning.times import KERNELS_OTHER, KERNELS_PER_LAYER, reached_arithmetic
from proximo_lab.cluster_plan.pool import Engines

OVERHEAD = 2.65e-3
"""Seconds that an inference server adds to each decode step: scheduling, sampling, answering. Fitted so that a rollout
of Qwen2.5-Math-7B on 128 H20 takes as long as published (published.py)."""
ALL_REDUCE, ACROSS = 15e-6, 50e-6
"""Seconds of a small sum over the GPUs of an engine, in a node and across nodes: assumed."""
MEMORY_SHARE = 0.9
"""Share of a card's memory that an engine takes, as vLLM does by default."""
ROOM = 0.35
"""Minimum share of that which is left for keys and values, where the GPUs of an engine are chosen."""
MAX_SLOTS = 256
"""Requests that an engine decodes at a time, at most."""
PUSH_BANDWIDTH = 8e9
"""Bytes per second of a push of all weights to all engines: the slowest that verl measured."""


class Sizes(Protocol):
    """The sizes of a decoder that determine what it costs."""

    @property
    def parameters(self) -> int: ...

    @property
    def layers(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def matrices(self) -> int:
        """Weights of the layers' matrices, all experts included."""
        ...

    @property
    def body(self) -> int:
        """Weights that a token is multiplied with."""
        ...

    @property
    def head(self) -> int: ...

    @property
    def query_width(self) -> int: ...

    def kv_bytes(self, width: int) -> int:
        """Bytes of one token's keys and values in all layers, at `width` bytes per number."""
        ...


@dataclass(frozen=True)
class Engine:
    """One engine of a model on some GPUs."""

    shape: Sizes
    width: int
    """Bytes of a number."""
    card: DeviceCard
    gpus: int
    per_node: int = 8

    @property
    def weights(self) -> int:
        return self.width * self.shape.parameters

    @property
    def room(self) -> int:
        """Tokens whose keys and values fit."""
        memory = MEMORY_SHARE * self.card.usable * self.gpus - self.weights
        return max(0, int(memory / self.shape.kv_bytes(self.width)))

    @property
    def has_room(self) -> bool:
        return self.weights <= (1 - ROOM) * MEMORY_SHARE * self.card.usable * self.gpus

    def slots(self, context: float, longest: int) -> int:
        """Requests of this context on average that fit at the same time; 0 if the longest does not fit alone."""
        return 0 if self.room < longest else max(1, min(MAX_SLOTS, int(self.room / max(context, 1))))

    def engines(self, number: int, slots: int) -> Engines:
        """Engines in this number, by what a decode step costs; of a mixture all experts are read."""
        shape, machine = self.shape, self.card.machine
        sums = 0.0 if self.gpus == 1 else 2 * shape.layers * (ALL_REDUCE if self.gpus <= self.per_node else ACROSS)
        launches = (KERNELS_PER_LAYER * shape.layers + KERNELS_OTHER) * machine.kernel_seconds
        read = self.width * (shape.matrices + shape.head) / (self.gpus * machine.bandwidth)
        attention = 4 * shape.layers * shape.query_width / machine.arithmetic
        return Engines(
            number=number,
            slots=slots,
            base=OVERHEAD + launches + sums + read,
            per_request=2 * (shape.body + shape.head) / (self.gpus * machine.arithmetic),
            per_token=(shape.kv_bytes(self.width) / machine.bandwidth + attention) / self.gpus,
            prefill=2 * shape.body / (self.gpus * reached_arithmetic(shape.hidden, self.card)),
        )

    @property
    def push_seconds(self) -> float:
        return self.weights / PUSH_BANDWIDTH


def smallest_engine(shape: Sizes, width: int, card: DeviceCard, per_node: int = 8, longest: int = 0) -> Engine:
    """Engine on the fewest GPUs, a power of two, that hold the weights and leave room for keys and values, at least
    those of the longest request."""
    gpus = 1
    while not (engine := Engine(shape, width, card, gpus, per_node)).has_room or engine.room < longest:
        gpus *= 2
    return engine
