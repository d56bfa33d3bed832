"""The learner's own options: how many updates a step has, how the optimizer takes them, and which are left out.

Schedules of the learning rate, AdamW's decays and the form of its moments are shared by all stages.
"""

import math
from dataclasses import dataclass
from typing import Literal

RateSchedule = Literal["constant", "linear", "cosine"]
"""The learning rate after the warm-up: constant, or falling to 0 at the end, in a straight line or as half a cosine."""
Moments = Literal["float32", "8bit", "cpu"]
"""Place of AdamW's two moments between steps: in float32 on the device, there in 8 bits, or in the host's memory."""
BLOCK = 256
"""Moments that share a scale in 8 bits."""
LEAST_QUANTIZED = 4096
"""Weights of a parameter from which on its moments are quantised."""


def rate_share(schedule: RateSchedule, index: int, *, warmup: int, steps: int | None) -> float:
    """The share of the peak learning rate at a step, counted from 0, of `steps`. None: constant ones need no end.

    Example: rate_share("linear", 10, warmup=0, steps=20) is 0.5
    """
    if index < 0:  # what starts later
        return 0.0
    if index < warmup:
        return (index + 1) / warmup
    if schedule == "constant":
        return 1.0
    assert steps is not None
    left = max(steps - index, 0) / (steps - warmup)
    return left if schedule == "linear" else (1 - math.cos(math.pi * left)) / 2


def check_adam(table: str, beta1: float, beta2: float, epsilon: float) -> None:
    """Raise ValueError for decays outside 0 to 1, or an epsilon that is not positive."""
    for name, value in (("adam_beta1", beta1), ("adam_beta2", beta2)):
        if not 0 <= value < 1:
            raise ValueError(f"{table}.{name} is {value}: give a decay from 0 to below 1, such as 0.9")
    if not epsilon > 0:
        raise ValueError(f"{table}.adam_epsilon is {epsilon}: give a positive number, such as 1e-8")


def moment_bytes(moments: Moments, width: int) -> float:
    """Bytes of the device per weight of `width` bytes, of the two moments."""
    return {"float32": 2.0 * width, "8bit": 2 * (1 + 4 / BLOCK), "cpu": 0.0}[moments]


RoutingReplay = Literal["old_policy", "sampler"]
"""Pass whose choice of experts an update replays."""

CPU_TOKENS = 16384
"""Tokens in one forward pass on a CPU, by default."""


@dataclass(frozen=True)
class LearnerOptions:
    """Options of a learner; in a run's config they are fields of the table `training`, as errors call them.

    Example: LearnerOptions(groups=2, minibatches=1, learning_rate=1e-3)
    """

    groups: int = 16
    """Groups of a full step, which its minibatches share out."""
    minibatches: int = 4
    """Optimizer updates per pass over a step's groups. A group is never split."""
    epochs: int = 1
    """Passes over each step's groups."""
    learning_rate: float = 1e-6
    """AdamW's learning rate."""
    warmup_steps: int = 2
    """Steps of linear learning-rate warm-up from 0."""
    learning_rate_schedule: RateSchedule = "constant"
    """Learning rate after the warm-up."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    adam_beta1: float = 0.9
    """AdamW's beta1."""
    adam_beta2: float = 0.95
    """AdamW's beta2."""
    adam_epsilon: float = 1e-8
    """AdamW's epsilon."""
    adam_moments: Moments = "float32"
    """Form of AdamW's moments between steps."""
    max_gradient_norm: float = 1.0
    """Norm to which each update's gradient is clipped."""
    token_budget: int | None = None
    """Tokens per forward pass. None: fitted to the GPU's memory, CPU_TOKENS on a CPU."""
    skip_spikes: float | None = None
    """Multiple of the median gradient norm above which an update is skipped. None: spikes are applied and reported."""
    max_skipped: int = 5
    """Consecutive skipped updates that end the run."""
    freeze: tuple[str, ...] = ()
    """Parts of the names of parameters that are not trained, which may have wildcards."""

    def __post_init__(self) -> None:
        for name in ("groups", "minibatches", "epochs", "token_budget", "max_skipped"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"training.{name} is {getattr(self, name)}: it must be at least 1")
        if self.minibatches > self.groups:
            raise ValueError(
                f"training.minibatches is {self.minibatches}, training.groups {self.groups}: "
                "a minibatch holds whole groups, so there cannot be more of them"
            )
        if self.skip_spikes is not None and not self.skip_spikes > 1:
            raise ValueError(f"training.skip_spikes is {self.skip_spikes}: give a multiple over 1, such as 20, or None")
        for name in ("learning_rate", "max_gradient_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"training.{name} is {getattr(self, name)}: give a number above 0")
        for name in ("warmup_steps", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"training.{name} is {getattr(self, name)}: give 0 or more")
        check_adam("training", self.adam_beta1, self.adam_beta2, self.adam_epsilon)

    @property
    def updates(self) -> int:
        """Optimizer updates per step."""
        return self.minibatches * self.epochs
