"""The machine's limits: bytes over bandwidth, operations over arithmetic throughput, kernel launches.

Only unavoidable work is counted: weights and live keys and values read once per token, each prompt computed once
per group.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

from proximo.planning.workloads import Workload

KERNELS_PER_LAYER, KERNELS_BESIDE = 9, 6
"""Fewest kernel launches of a decoder without custom kernels."""


class Decoder(Protocol):
    """The sizes that determine a decoder's work."""

    @property
    def layers(self) -> int: ...

    @property
    def body(self) -> int:
        """Weights of the matrix products in the layers."""
        ...

    @property
    def head(self) -> int:
        """Weights of the head."""
        ...

    @property
    def query_width(self) -> int: ...

    def kv_bytes(self, width: int) -> int:
        """Bytes of one token's keys and values in all layers, at `width` bytes per number."""
        ...


@dataclass(frozen=True)
class DeviceLimits:
    """Limits of a device."""

    name: str
    bandwidth: float
    """Bytes per second."""
    arithmetic: float
    """Operations per second, in the precision of training."""
    kernel_seconds: float
    """Seconds from one small kernel of a graph to the next."""
    number_bytes: int
    """Bytes of a weight, key or value."""


KERNEL_SECONDS = 3e-6
H200 = DeviceLimits("NVIDIA H200", 4.3e12, 790e12, KERNEL_SECONDS, 2)
"""Limits of an H200 as measured with a large copy and a large matrix product."""


@dataclass(frozen=True)
class DecodeStep:
    """Step that decodes a token for each of `rows` sequences."""

    rows: int
    context: int
    """Tokens that all rows attend to, added up."""
    read: int
    """Tokens that are read: fewer than the context if completions of a group share a prompt."""

    def bytes(self, shape: Decoder, width: int) -> int:
        return width * (shape.body + shape.head) + shape.kv_bytes(width) * self.read

    def operations(self, shape: Decoder) -> int:
        attention = 4 * shape.layers * shape.query_width * self.context
        return 2 * (shape.body + shape.head) * self.rows + attention

    def seconds(self, shape: Decoder, machine: DeviceLimits) -> float:
        return max(
            self.bytes(shape, machine.number_bytes) / machine.bandwidth,
            self.operations(shape) / machine.arithmetic,
            (KERNELS_PER_LAYER * shape.layers + KERNELS_BESIDE) * machine.kernel_seconds,
        )


def decode_step(workload: Workload, done: int, *, shared: bool, lengths: Sequence[int] | None = None) -> DecodeStep:
    """The step in which each unfinished row has `done` tokens of its own. `lengths`: of the completions, group by
    group; None: the workload's."""
    lengths, size = workload.lengths if lengths is None else lengths, workload.siblings
    groups = [sum(length > done for length in lengths[at : at + size]) for at in range(0, len(lengths), size)]
    rows, live_groups = sum(groups), sum(live > 0 for live in groups)
    completion_tokens, prompts = rows * done, live_groups if shared else rows
    return DecodeStep(rows, rows * workload.prompt + completion_tokens, prompts * workload.prompt + completion_tokens)


def prefill_seconds(workload: Workload, machine: DeviceLimits) -> float:
    """Seconds to prefill each prompt once."""
    shape, tokens = workload.shape, workload.groups * workload.prompt
    attention = 2 * shape.layers * shape.query_width * tokens * workload.prompt
    return (2 * shape.body * tokens + attention) / machine.arithmetic


def decode_seconds(
    workload: Workload, machine: DeviceLimits, *, shared: bool, lengths: Sequence[int] | None = None
) -> float:
    """Seconds of all decode steps, with all rows decoded together; the first token comes from the prefill."""
    lengths = workload.lengths if lengths is None else lengths
    steps = (decode_step(workload, done, shared=shared, lengths=lengths) for done in range(1, max(lengths)))
    return sum(step.seconds(workload.shape, machine) for step in steps)


def rollout_seconds(workload: Workload, machine: DeviceLimits, lengths: Sequence[int] | None = None) -> float:
    """The limit of a rollout, with each prompt computed once and read once per step for its group."""
    return prefill_seconds(workload, machine) + decode_seconds(workload, machine, shared=True, lengths=lengths)


@dataclass(frozen=True)
class Training:
    """The work of an update: each prompt once, each completion once."""

    tokens: int
    """Tokens through the layers."""
    scored: int
    """Tokens through the head."""
    attended: float
    """Pairs of a query and a key that it attends to."""

    def model_operations(self, shape: Decoder, *, frozen: bool = False) -> float:
        """Operations of forward and backward pass, without recomputation. Weights that are `frozen` under an adapter
        pass gradients on and have none of their own: 4 operations a weight and token instead of 6. The adapter's own,
        below a hundredth, are left out."""
        each = 4 if frozen else 6
        return each * (shape.body * self.tokens + shape.head * self.scored) + 12 * self._attention(shape)

    def hardware_operations(self, shape: Decoder) -> float:
        """The same with what the backward pass recomputes: logits, and attention's weights."""
        return 6 * shape.body * self.tokens + 8 * shape.head * self.scored + 14 * self._attention(shape)

    def _attention(self, shape: Decoder) -> float:
        return shape.layers * shape.query_width * self.attended

    def use(self, shape: Decoder, machine: DeviceLimits, seconds: float, *, frozen: bool = False) -> float:
        """Model FLOP utilisation: the share of the machine's arithmetic that model operations used."""
        return self.model_operations(shape, frozen=frozen) / (seconds * machine.arithmetic)


def training(groups: int, prompt: int, lengths: Sequence[int]) -> Training:
    """The work for completions of these `lengths`: unique tokens, without padding and with each prompt once."""
    return Training(
        tokens=groups * prompt + sum(lengths),
        scored=sum(lengths),
        attended=groups * prompt**2 / 2 + sum(length * prompt + length**2 / 2 for length in lengths),
    )


Drawn = Sequence[tuple[Sequence[int], float]]
"""The lengths that occurred in each turn, group by group, and its seconds."""


def limit_share(workload: Workload, machine: DeviceLimits, turns: Drawn) -> float:
    """Share of the rollout's limit that was reached for the lengths that occurred: the median over turns."""
    return median(rollout_seconds(workload, machine, lengths) / seconds for lengths, seconds in turns)


def arithmetic_share(workload: Workload, machine: DeviceLimits, turns: Drawn) -> float:
    """Share of the machine's arithmetic that updates used on unique tokens, attention included: the median over
    turns."""
    frozen = workload.adapter is not None
    return median(
        training(workload.groups, workload.prompt, lengths).use(workload.shape, machine, seconds, frozen=frozen)
        for lengths, seconds in turns
    )


def machine_of(device: str) -> DeviceLimits:
    """The device's limits: from a table if known, else measured now."""
    if torch.device(device).type == "cuda":
        name = torch.cuda.get_device_name(device)
        return H200 if H200.name in name else _measured(name, device, torch.bfloat16, kernel_seconds=KERNEL_SECONDS)
    return _measured("cpu", device, torch.float32, kernel_seconds=0.0)


def _measured(name: str, device: str, dtype: torch.dtype, *, kernel_seconds: float) -> DeviceLimits:
    size = 8192 if dtype == torch.bfloat16 else 1024
    drawn = torch.Generator(device).manual_seed(0)  # a run that plans draws the same numbers as one that does not
    matrix = torch.randn(size, size, device=device, dtype=dtype, generator=drawn)
    source = torch.zeros(2**28 if dtype == torch.bfloat16 else 2**26, device=device)
    target = torch.empty_like(source)
    product = _quickest(device, lambda: matrix @ matrix)
    copy = _quickest(device, lambda: target.copy_(source))
    number = matrix.element_size()
    return DeviceLimits(name, 2 * source.nbytes / copy, 2 * size**3 / product, kernel_seconds, number)


def _quickest(device: str, work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
