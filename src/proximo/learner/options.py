"""The learner's own options: how many updates a step has, how the optimizer takes them, and which are left out."""

from dataclasses import dataclass
from typing import Literal

from proximo.learner.schedule import Moments, RateSchedule, check_adam

RoutingReplay = Literal["old_policy", "sampler"]
"""Which pass's choice of experts an update replays."""

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
