"""The schedule of a stage that trains on files: batches, learning rate, evaluations."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from proximo.config.unions import check_kinds
from proximo.data import stable_hash
from proximo.learner.options import Moments, RateSchedule, check_adam, rate_share

FREEZE = "fit.freeze"
"""Name of the field with the parameters that are not trained, for errors."""
LOWER = ("loss", "perplexity", "calibration")
"""Held-out metrics of which a lower value is better."""


@dataclass(frozen=True)
class FitOptions:
    epochs: float = 1.0
    """Passes over the data; 0.5 is half a pass."""
    steps: int | None = None
    """Optimizer steps, whatever `epochs` says. None: as many as the epochs have."""
    batch: int = 64
    """Maximum examples (or prompts with their completions) per optimizer step; an epoch is divided evenly."""
    learning_rate: float = 1e-5
    """AdamW's peak learning rate. Billions of parameters need about 1e-5 or less, tiny models 1e-3."""
    warmup_steps: int = 10
    """Steps of linear warm-up, at most half of the run."""
    learning_rate_schedule: RateSchedule = "linear"
    """Learning rate after the warm-up: `constant`, or falling to 0 at the end, `linear` or as a `cosine`."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    adam_beta1: float = 0.9
    """AdamW's beta1: decay of the mean gradient."""
    adam_beta2: float = 0.95
    """AdamW's beta2: decay of the mean squared gradient."""
    adam_epsilon: float = 1e-8
    """AdamW's epsilon, added to the denominator of each step."""
    adam_moments: Moments = "float32"
    """AdamW's moments between steps: `float32` or `8bit` on the device, or float32 on the `cpu`."""
    max_gradient_norm: float = 1.0
    """Norm to which each update's gradient is clipped."""
    token_budget: int = 16384
    """Tokens per forward pass; affects memory, not results."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: each entry is a part of their names, such as `embed`, and may have wildcards."""
    evaluate_every: int | None = None
    """Steps between held-out evaluations. None: after each epoch. The start and the end are always evaluated."""
    metric: str = "loss"
    """Held-out metric that decides `patience` and which weights are kept, without `held_out/`: `loss`, `accuracy` of
    pairs. Of loss, perplexity and calibration a lower value is better, of all others a higher one."""
    patience: int | None = None
    """Evaluations in a row without a better `metric` that stop training early. None: never stop early."""
    save_every: int = 100
    """Steps between resume points; at most this many repeat after a crash."""

    def is_better(self, value: float, than: float) -> bool:
        """True if a value of the metric is better than another one; NaN is never better, and everything than it."""
        return math.isnan(than) or (value < than if self.metric in LOWER else value > than)

    def __post_init__(self) -> None:
        check_kinds(self, "fit.")
        for name in ("steps", "batch", "token_budget", "evaluate_every", "patience", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"fit.{name} is {value}: it must be at least 1")
        for name in ("epochs", "learning_rate", "max_gradient_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"fit.{name} is {getattr(self, name)}: it must be positive")
        check_adam("fit", self.adam_beta1, self.adam_beta2, self.adam_epsilon)
        if self.warmup_steps < 0 or self.weight_decay < 0:
            raise ValueError(
                f"fit.warmup_steps {self.warmup_steps}, fit.weight_decay {self.weight_decay}: neither can be negative"
            )


def fit_length(options: FitOptions, given: Collection[str]) -> FitOptions:
    """The options with the length that was `given`, by words or dotted fields: epochs count where they are named, and
    not those that a file's steps replace. ValueError where both are named."""
    named = [name for name in ("epochs", "steps") if not {name, f"fit.{name}"}.isdisjoint(given)]
    if len(named) > 1:
        raise ValueError("epochs and steps are both given: give one of them")
    return replace(options, steps=None) if named == ["epochs"] else options


@dataclass(frozen=True)
class Schedule:
    """Items that each step trains on, its learning rate, and which steps are followed by an evaluation. An `index`
    counts steps from 0; a `step` is the number of steps done."""

    size: int
    options: FitOptions
    seed: int

    @property
    def epoch(self) -> int:
        """Steps per epoch."""
        return math.ceil(self.size / self.options.batch)

    @property
    def steps(self) -> int:
        if self.options.steps is not None:
            return self.options.steps
        return math.ceil(self.epoch * self.options.epochs - 1e-9)  # 100 · 1.1 is a little over 110

    def items(self, index: int) -> list[int]:
        """Items of a step. Each epoch visits all items in a new order, in batches whose sizes differ by at most one."""
        epoch, position = divmod(index, self.epoch)
        generator = torch.Generator().manual_seed(stable_hash("fit", self.seed, epoch) % 2**63)
        return torch.randperm(self.size, generator=generator).tensor_split(self.epoch)[position].tolist()

    def learning_rate(self, index: int) -> float:
        warmup = min(self.options.warmup_steps, self.steps // 2)
        schedule = self.options.learning_rate_schedule
        return self.options.learning_rate * rate_share(schedule, index, warmup=warmup, steps=self.steps)

    def evaluates(self, step: int) -> bool:
        """Tell whether the model is evaluated after `step` steps."""
        return step % (self.options.evaluate_every or self.epoch) == 0 or step == self.steps
