"""One loop for the stages that learn from files: fine-tuning, reward models, preferences."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.data import stable_hash
from proximo.training.checkpoints import CHECKPOINTS, Saver, save
from proximo.training.optimizer import Optimizer
from proximo.training.points import BestWeights, read_point, write_point
from proximo.training.runlog import RunLog
from proximo.training.stopping import Stop, Stopped

SAID_EVERY = 10
"""Steps between two lines of progress."""


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


@runtime_checkable
class Stage(Protocol):
    """What is learned: a model, its training items by number, and how well it does on others."""

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def size(self) -> int:
        """Training items."""
        ...

    def losses(self, items: Sequence[int]) -> Iterator[tuple[Tensor, Mapping[str, float | Tensor]]]:
        """A weighted loss for each micro-batch, which add up to the step's exact loss; and sums which add up to its
        metrics."""
        ...

    def held_out(self) -> dict[str, float]:
        """Metrics on held-out data, `loss` among them; empty where there is none."""
        ...


@dataclass(frozen=True)
class Fitted:
    """What a finished stage has to say."""

    steps: int
    """Optimizer steps taken."""
    best_step: int
    """After which of them the checkpoint was taken; 0: held-out loss was never better than before."""
    before: dict[str, float]
    """Held-out metrics before training; empty without held-out data."""
    best: dict[str, float]
    """Held-out metrics of the checkpoint."""
    stopped_early: bool
    checkpoint: Path
    seconds: float
    skipped: int = 0
    """Bad rows that were left out."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"checkpoint": self.checkpoint.name}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any], folder: Path) -> "Fitted":
        """Of a stage in this folder."""
        return cls(**{**facts, "checkpoint": folder / CHECKPOINTS / facts["checkpoint"]})


def fit(
    stage: Stage,
    options: FitOptions,
    *,
    tokenizer: PreTrainedTokenizerBase,
    log: RunLog,
    seed: int,
    say: Callable[[str], None],
    point: Path | None = None,
) -> Fitted:
    """Train, evaluate and save the best weights, which the model holds at the end.

    The best have the lowest held-out loss, before training included; without held-out data they are the last.
    `point` is where an earlier attempt has come to.
    """
    devices = [stage.model.device] if stage.model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), Stop() as stop:
        torch.manual_seed(seed)  # for models with dropout
        fitting = _Fitting(stage, options, log, seed, say, stop)
        fitting.begin(point)
        fitting.run()
    best = fitting.best
    best.restore(stage.model)
    log.settle()
    return Fitted(
        steps=fitting.step,
        best_step=best.step,
        before=fitting.before,
        best=best.metrics,
        stopped_early=fitting.step < fitting.schedule.steps,
        checkpoint=save(log.folder, best.step, stage.model, tokenizer),
        seconds=fitting.seconds,
    )


@dataclass(frozen=True)
class Schedule:
    """Which items each step trains on, how fast, and after which steps it is evaluated."""

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

    def items(self, step: int) -> list[int]:
        """Each epoch visits all items in an order of its own, in batches of equal size, give or take one."""
        epoch, position = divmod(step, self.epoch)
        generator = torch.Generator().manual_seed(stable_hash("fit", self.seed, epoch) % 2**63)
        return torch.randperm(self.size, generator=generator).tensor_split(self.epoch)[position].tolist()

    def learning_rate(self, step: int) -> float:
        warmup = min(self.options.warmup_steps, self.steps // 2)
        share = (step + 1) / warmup if step < warmup else (self.steps - step) / (self.steps - warmup)
        return self.options.learning_rate * share

    def evaluates(self, step: int) -> bool:
        """Whether the model is evaluated after this step."""
        return (step + 1) % (self.options.evaluate_every or self.epoch) == 0 or step + 1 == self.steps


class _Fitting:
    """A stage on its way: between two steps all that the next depends on is here, in the model and in the optimizer."""

    def __init__(
        self, stage: Stage, options: FitOptions, log: RunLog, seed: int, say: Callable[[str], None], stop: Stop
    ) -> None:
        self.stage, self.options, self.log, self.say, self.stop = stage, options, log, say, stop
        self.schedule = Schedule(stage.size, options, seed)
        parameters = [each for each in stage.model.parameters() if each.requires_grad]
        self.optimizer = Optimizer([parameters], learning_rate=options.learning_rate, weight_decay=options.weight_decay)
        self.saver = Saver(log.event, lambda step, message: say(f"warning after step {step + 1}: {message}"))
        self.start, self.spent = time.perf_counter(), 0.0
        self.step, self.is_evaluated, self.saved = 0, True, 0
        """Steps done, whether the evaluation after the last has been made, and how many steps were done when saved."""

    @property
    def seconds(self) -> float:
        return self.spent + time.perf_counter() - self.start

    def begin(self, point: Path | None) -> None:
        """From nothing, or from where an earlier attempt has come to."""
        if point is None:
            self.log.rewind({}, 0)
            self.before = self._evaluate(-1)
            patience = self.options.patience
            if patience is not None and not self.before:
                raise ValueError(f"fit.patience is {patience}, but no data is held out: leave it out, or hold some")
            self.best = BestWeights(self.before, self.stage.model)
            return
        facts, weights = read_point(point, self.stage.model, self.optimizer)
        self.log.rewind(facts["sizes"], facts["step"])
        self.step, self.is_evaluated, self.saved = facts["step"], facts["is_evaluated"], facts["step"]
        self.before, self.spent = facts["before"], facts["seconds"]
        self.best = BestWeights(facts["best"], self.stage.model)
        self.best.step, self.best.misses, self.best.weights = facts["best_step"], facts["misses"], weights

    def run(self) -> None:
        """All steps, or as many as patience allows."""
        try:
            while not self._is_over():
                self.stop.check()
                self._step(self.step)
                self.step, self.is_evaluated = self.step + 1, False
        except Stopped:
            self._save()
            raise

    def _is_over(self) -> bool:
        """After what is due between two steps: an evaluation, a save."""
        done, last = self.step, self.step == self.schedule.steps
        if done and not self.is_evaluated and self.schedule.evaluates(done - 1):
            found = self._evaluate(done - 1)
            self.best.see(done, found, self.stage.model)
        self.is_evaluated = True
        if done and self.best.misses == self.options.patience:
            self.say(f"stopped early: held-out loss was best after step {self.best.step}")
            return True
        if done and not last and done % self.options.save_every == 0:
            self._save()
        return last

    def _save(self) -> None:
        """Unless nothing was done since the last time."""
        if self.step != self.saved and self.saver.save(self.step, self._write):
            self.saved = self.step

    def _write(self) -> None:
        best = self.best
        facts = {
            "run": self.log.identity,
            "step": self.step,
            "is_evaluated": self.is_evaluated,
            "before": self.before,
            "best": best.metrics,
            "best_step": best.step,
            "misses": best.misses,
            "sizes": self.log.settle(),
            "seconds": self.seconds,
        }
        write_point(self.log.folder, facts, self.stage.model, self.optimizer, best.weights)

    def _step(self, step: int) -> None:
        start = time.perf_counter()
        rate = self.schedule.learning_rate(step)
        self.optimizer.set_rates(rate)
        self.stage.model.train()
        self.optimizer.zero_grad()
        total, sums = torch.zeros(()), dict[str, float | Tensor]()
        for loss, part in self.stage.losses(self.schedule.items(step)):
            loss.backward()
            total = total.to(loss) + loss.detach()
            sums |= {name: sums.get(name, 0.0) + value for name, value in part.items()}
        norm = self.optimizer.clip(0, self.options.max_gradient_norm)
        if total.isfinite() and norm.isfinite():
            self.optimizer.step()
        else:
            self.log.event(step, "skipped_update", "loss or gradient is not finite; weights untouched")
        metrics = {"loss": float(total)} | {name: float(value) for name, value in sums.items()}
        self.log.metrics(step, metrics | {"gradient_norm": float(norm), "learning_rate": rate})
        self.log.timings(step, {"update": time.perf_counter() - start})
        if (step + 1) % SAID_EVERY == 0 or step + 1 == self.schedule.steps:
            self.say(f"step {step + 1}/{self.schedule.steps}  {_summary(metrics)}")

    def _evaluate(self, step: int) -> dict[str, float]:
        """Held-out metrics after a step; −1 is before the first."""
        self.stage.model.eval()
        with self.stop.anywhere():
            metrics = self.stage.held_out()
        if metrics:
            self.log.metrics(step, {f"held_out/{name}": value for name, value in metrics.items()})
            self.say(f"held-out {f'after step {step + 1}' if step >= 0 else 'before'}: {_summary(metrics)}")
        return metrics


def _summary(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
