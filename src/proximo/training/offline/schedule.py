"""How long a stage learns from its data, in which order and how fast."""

import math
from dataclasses import dataclass

import torch

from proximo.data import stable_hash


@dataclass(frozen=True)
class FitOptions:
    epochs: float = 1.0
    """Passes over the data; 0.5 is half a pass."""
    batch: int = 64
    """Examples, or prompts with their completions, in one optimizer step at most: an epoch is divided evenly."""
    learning_rate: float = 1e-5
    """Of AdamW, at its peak. Models of billions of parameters need about 1e-5 or less, tiny ones 1e-3."""
    warmup_steps: int = 10
    """Steps over which the learning rate grows in a line, half of the run at most; then it falls in a line to 0."""
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    token_budget: int = 16384
    """Tokens in one forward pass: memory only, it cannot change the result."""
    evaluate_every: int | None = None
    """Steps between evaluations on held-out data. None: at the end of each epoch. Always before and at the end."""
    patience: int | None = None
    """Evaluations in a row without a better held-out loss after which training stops early. None: it never does."""
    save_every: int = 100
    """Steps after which everything is saved to be gone on from: one that dies has so many to do again at most."""

    def __post_init__(self) -> None:
        for name in ("batch", "token_budget", "evaluate_every", "patience", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"fit.{name} is {value}: it must be at least 1")
        for name in ("epochs", "learning_rate", "max_gradient_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"fit.{name} is {getattr(self, name)}: it must be positive")
        if self.warmup_steps < 0 or self.weight_decay < 0:
            raise ValueError(
                f"fit.warmup_steps {self.warmup_steps}, fit.weight_decay {self.weight_decay}: neither can be negative"
            )


@dataclass(frozen=True)
class Schedule:
    """Which items each step trains on, how fast, and after which steps it is evaluated. An `index` counts steps from 0,
    a `step` is how many are done."""

    size: int
    options: FitOptions
    seed: int

    @property
    def epoch(self) -> int:
        """Steps of one pass."""
        return math.ceil(self.size / self.options.batch)

    @property
    def steps(self) -> int:
        return math.ceil(self.epoch * self.options.epochs - 1e-9)  # 100 · 1.1 is a little over 110

    def items(self, index: int) -> list[int]:
        """Each epoch visits all items in an order of its own, in batches of equal size, give or take one."""
        epoch, position = divmod(index, self.epoch)
        generator = torch.Generator().manual_seed(stable_hash("fit", self.seed, epoch) % 2**63)
        return torch.randperm(self.size, generator=generator).tensor_split(self.epoch)[position].tolist()

    def learning_rate(self, index: int) -> float:
        warmup = min(self.options.warmup_steps, self.steps // 2)
        share = (index + 1) / warmup if index < warmup else (self.steps - index) / (self.steps - warmup)
        return self.options.learning_rate * share

    def evaluates(self, step: int) -> bool:
        """Whether the model is evaluated after so many steps."""
        return step % (self.options.evaluate_every or self.epoch) == 0 or step == self.steps
