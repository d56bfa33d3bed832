"""Seconds of a step, predicted from the limits of a device: bytes over bandwidth, operations over arithmetic, launches.

Predictions, not measurements. On one H200 they were within a third of what was measured for models of 0.6 B to 4 B
(tests/planning/test_times.py has the rows); other devices are assumed to reach the same shares of their limits.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from proximo.learner.optimizer import HALVES
from proximo.learner.rounding import gate_width
from proximo.losses.pieces.protocols import AnchorTraits
from proximo.planning.cards import DeviceCard
from proximo.planning.holdings import Holding
from proximo.planning.memory import MemoryUse, StepSize
from proximo.planning.roofline import training
from proximo.rl.config import RunConfig

KERNELS_PER_LAYER, KERNELS_OTHER = 13, 6
"""Kernels of a decode step: about 370 were counted for 28 layers."""
WIDEST_SHARE, HALF_WIDTH = 0.72, 450
"""Share of a GPU's arithmetic that a training pass of a very wide model would reach, and the hidden size at which half
of it is: fitted to six workloads on one H200, 0.42 to 0.51 at a width of 1024, 0.56 and 0.62 at 2048, 0.69 at 2560."""
CPU_SHARE = 0.7
"""The same on one CPU core, measured."""
TYPICAL_GAP, TYPICAL_GAP_HALF = 1e-6, 2e-3
"""Mean gap between the log-probs of sampler and learner, in float32 and in bfloat16: a gate ten times as wide trusts
the sampler, and the old policy's pass is left out."""

HOST_BANDWIDTH = 50e9
"""Bytes per second between a GPU and pinned memory of its host: assumed, for PCIe 5."""


@dataclass(frozen=True)
class DecodingWork:
    """The work of all decode steps of a rollout, added up."""

    steps: int
    row_steps: int
    """Tokens decoded."""
    prompt_reads: int
    """Prompts whose keys are read, over all steps."""
    own_reads: int
    """Tokens of their own that rows read back, over all steps."""


def decoding(lengths: Sequence[int], slots: int, groups: int, *, shared: bool) -> DecodingWork:
    """The steps of rows with these lengths in `slots` slots; the first token of each comes from reading its prompt.

    With `shared`, a prompt is read once for all its live samples.
    """
    starts, ends, free = Counter[int](), dict[int, list[int]](), [0] * slots
    for length in lengths:
        start = heapq.heappop(free)
        heapq.heappush(free, start + length - 1)
        starts[start] += 1
        ends.setdefault(start + length - 1, []).append(length)
    live = held = row_steps = prompt_reads = own_reads = 0
    steps = max(ends)
    for step in range(steps):
        live += starts[step] - len(ends.get(step, ()))
        held += live - sum(length - 1 for length in ends.get(step, ()))
        row_steps += live
        prompt_reads += min(groups, live) if shared else live
        own_reads += held
    return DecodingWork(steps, row_steps, prompt_reads, own_reads)


@dataclass(frozen=True)
class RolloutTime:
    """Seconds of a rollout, by what limits them; they add up."""

    prefill: float
    bytes: float
    arithmetic: float
    launches: float

    @property
    def total(self) -> float:
        return self.prefill + self.bytes + self.arithmetic + self.launches


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step, without grading."""

    rollout: RolloutTime
    scoring: float
    """Passes without gradient: old policy, reference, teacher and reward models."""
    update: float
    """Passes with gradient, and the optimizer."""
    tokens: int
    """Tokens that the step samples."""

    @property
    def total(self) -> float:
        return self.rollout.total + self.scoring + self.update


def step_time(config: RunConfig, holding: Holding, size: StepSize, use: MemoryUse, card: DeviceCard) -> StepTime:
    lengths = size.lengths
    learner = learning(config, holding, size, lengths, card, parts=use.parts, checkpointed=use.checkpointed)
    rollout = _rollout(holding, size, lengths, use.live, card)
    return StepTime(rollout, learner.scoring, learner.passes + learner.optimizer, sum(lengths))


def _rollout(holding: Holding, size: StepSize, lengths: Sequence[int], slots: int, card: DeviceCard) -> RolloutTime:
    shape, machine, width = holding.shape, card.machine, holding.dtype.itemsize
    work = decoding(lengths, slots, size.groups, shared=card.is_gpu)
    prompts = training(size.groups, size.prompt_tokens, ())
    attention = 4 * shape.layers * shape.query_width
    # Of a mixture all experts are read as soon as there are many rows.
    rows = work.row_steps / max(work.steps, 1)
    weights = width * (min(shape.matrices, int(shape.body * max(rows, 1))) + shape.head)
    # Quantised weights are read, and written densely before each product reads them.
    weights += sum(
        component.weights - width * (component.parameters - 2 * component.quantized)
        for component in holding.components
        if component.quantized
    )
    read = work.prompt_reads * size.prompt_tokens + work.own_reads
    attended = work.row_steps * size.prompt_tokens + work.own_reads
    return RolloutTime(
        prefill=(2 * shape.body * prompts.tokens + attention * prompts.attended)
        / reached_arithmetic(holding.shape.hidden, card),
        bytes=(work.steps * weights + shape.kv_bytes(width) * read) / machine.bandwidth,
        arithmetic=(2 * (shape.body + shape.head) * work.row_steps + attention * attended) / machine.arithmetic,
        launches=work.steps * (KERNELS_PER_LAYER * shape.layers + KERNELS_OTHER) * machine.kernel_seconds,
    )


def reached_arithmetic(hidden: int, card: DeviceCard) -> float:
    """Operations per second of a pass over many tokens: wide products use the arithmetic better."""
    share = WIDEST_SHARE * hidden / (hidden + HALF_WIDTH) if card.is_gpu else CPU_SHARE
    return share * card.machine.arithmetic


@dataclass(frozen=True)
class Learning:
    """Seconds of what the learner does in a step, on one device."""

    scoring: float
    """Passes without gradient."""
    passes: float
    """Passes with gradient."""
    optimizer: float


def learning(
    config: RunConfig,
    holding: Holding,
    size: StepSize,
    lengths: Sequence[int],
    card: DeviceCard,
    *,
    parts: int,
    checkpointed: int,
) -> Learning:
    """Predict the seconds of training on completions of these lengths, if each group is split into `parts` and so many
    layers run again in the backward pass."""
    shape, machine = holding.shape, card.machine
    work = training(size.groups * parts, size.prompt_tokens, lengths)  # each part of a group has the prompt
    attention = 4 * shape.layers * shape.query_width * work.attended
    forward = 2 * shape.body * work.tokens + 2 * shape.head * work.scored + attention
    gradient = work.hardware_operations(shape)
    if holding.lora is not None:  # frozen weights have no gradient
        gradient -= 2 * shape.body * work.tokens + 2 * shape.head * work.scored
    again = checkpointed / max(len(holding.cost.layers), 1)
    gradient += again * (2 * shape.body * work.tokens + attention)
    policy, *values = [model for model in holding.components if model.trained]
    gradient += sum(6 * model.parameters * work.tokens for model in values)
    judges = list(holding.components[len(holding.components) - len(config.rewards.models) :])
    judges += [model for model in holding.components if model.role == "teacher"]
    scoring = forward * (config.algorithm.needs_reference + needs_old_pass(config, holding))
    scoring += sum(2 * model.parameters * work.tokens for model in judges)
    reached, updates = reached_arithmetic(holding.shape.hidden, card), config.training.updates
    optimizer = updates * sum(model.total + model.weights + model.masters for model in (policy, *values)) * 1.5
    seconds = optimizer / machine.bandwidth
    if config.training.adam_moments == "cpu":  # two float32 moments to the device and back
        seconds += updates * sum(16 * model.parameters for model in (policy, *values)) / HOST_BANDWIDTH
    return Learning(scoring / reached, config.training.epochs * gradient / reached, seconds)


def needs_old_pass(config: RunConfig, holding: Holding) -> bool:
    """Tell whether each step scores its rows before the updates, with a sampler that is the policy itself."""
    algorithm = config.algorithm
    if config.value_options is not None or algorithm.correct is not None or config.routing_replay == "old_policy":
        return True
    if config.training.updates == 1 or AnchorTraits.read(algorithm.anchor).on_policy:
        return False
    gap = TYPICAL_GAP_HALF if holding.dtype in HALVES else TYPICAL_GAP
    return gap >= gate_width(algorithm) / 10
