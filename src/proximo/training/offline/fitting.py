"""The training loop shared by the stages that train on files: fine-tuning, reward models, DPO."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.models.adapters.files import save_model
from proximo.models.torch_globals import OwnDraws
from proximo.storage.folders import remove_folder
from proximo.training.learner.optimizer import Optimizer
from proximo.training.offline.schedule import FitOptions, Schedule
from proximo.training.offline.snapshots import BestWeights, read_point, write_point
from proximo.training.runfolder.checkpoints import CHECKPOINTS, Saver, save, saved
from proximo.training.runfolder.log import RunLog
from proximo.training.runfolder.resume import Attempt
from proximo.training.runfolder.signals import Stop, Stopped

REPORT_EVERY = 10
"""Steps between progress lines."""
MAX_SKIPPED = 5
"""Consecutive skipped updates (not finite) that end a stage."""


@runtime_checkable
class Stage(Protocol):
    """What a stage provides: a model, the losses of its training items, and held-out metrics."""

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def size(self) -> int:
        """Number of training items."""
        ...

    def losses(self, items: Sequence[int]) -> Iterator[tuple[Tensor, Mapping[str, float | Tensor]]]:
        """Per micro-batch, a weighted loss and sums: the losses add up to the step's exact loss, the sums to its
        metrics."""
        ...

    def held_out(self) -> dict[str, float]:
        """Metrics on held-out data, including `loss`; empty if there is none."""
        ...


@dataclass(frozen=True)
class Fitted:
    """The result of a finished stage."""

    steps: int
    """Optimizer steps taken."""
    best_step: int
    """Step of the saved weights, those with the best held-out loss; 0: training never improved it."""
    before: dict[str, float]
    """Held-out metrics before training; empty without held-out data."""
    best: dict[str, float]
    """Held-out metrics of the checkpoint."""
    stopped_early: bool
    checkpoint: Path
    seconds: float
    skipped: int = 0
    """Bad rows that were skipped."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"checkpoint": self.checkpoint.name}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any], folder: Path) -> "Fitted":
        """The stored result of the stage in this folder."""
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
    start: Callable[[], None] = lambda: None,
) -> Fitted:
    """Train, evaluate and save the best weights, which the model holds at the end.

    The best weights have the lowest held-out loss, including before training; without held-out data they are the
    last. `point` is the snapshot to resume from; `start` records the start of this attempt once that has loaded.
    """
    with Stop() as stop:
        fitting = _Fitting(stage, options, log, seed, say, stop)
        fitting.begin(point, start)
        fitting.run()
    best = fitting.best
    best.restore(stage.model)
    log.settle()
    checkpoint = save(log.folder, best.step, partial(save_model, stage.model), tokenizer)
    for other in saved(log.folder / CHECKPOINTS):
        if other != checkpoint:  # of an earlier attempt, before something was changed
            remove_folder(other)
    return Fitted(
        steps=fitting.step,
        best_step=best.step,
        before=fitting.before,
        best=best.metrics,
        stopped_early=fitting.step < fitting.schedule.steps,
        checkpoint=checkpoint,
        seconds=fitting.seconds,
    )


def fit_attempt(
    attempt: Attempt,
    stage: Stage,
    options: FitOptions,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    say: Callable[[str], None],
    report: Callable[[], None],
) -> Fitted:
    """Run `fit` as one attempt at a run; the attempt is recorded, and `report` called, once training can start."""

    def start() -> None:
        attempt.start()
        report()

    log, point = attempt.log, attempt.resume_from
    return fit(stage, options, tokenizer=tokenizer, log=log, seed=seed, say=say, point=point, start=start)


class _Fitting:
    """A stage in progress. Between steps, its whole state is here, in the model and in the optimizer."""

    def __init__(
        self, stage: Stage, options: FitOptions, log: RunLog, seed: int, say: Callable[[str], None], stop: Stop
    ) -> None:
        self.stage, self.options, self.log, self.say, self.stop = stage, options, log, say, stop
        self.schedule = Schedule(stage.size, options, seed)
        parameters = [each for each in stage.model.parameters() if each.requires_grad]
        self.optimizer = Optimizer(
            [parameters],
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            betas=(options.adam_beta1, options.adam_beta2),
            epsilon=options.adam_epsilon,
        )
        self.draws = OwnDraws(seed, stage.model.device)
        """For models with dropout."""
        self.saver = Saver(log.event, lambda step, message: say(f"warning after step {step}: {message}"))
        self.start, self.spent = time.perf_counter(), 0.0
        self.step, self.is_evaluated, self.saved = 0, True, 0
        """Steps done, whether the evaluation after the last one is done, and the step of the last snapshot."""
        self.skipped = 0
        """Consecutive updates skipped so far."""

    @property
    def seconds(self) -> float:
        return self.spent + time.perf_counter() - self.start

    def begin(self, point: Path | None, start: Callable[[], None]) -> None:
        """Start from scratch, or resume from a snapshot."""
        if point is None:
            start()
            self.log.rewind({}, 0)
            self.before = self._evaluate(0)
            patience = self.options.patience
            if patience is not None and not self.before:
                raise ValueError(f"fit.patience is {patience}, but no data is held out: leave it out, or hold some")
            self.best = BestWeights(self.before, self.stage.model)
            return
        facts, weights = read_point(point, self.stage.model, self.optimizer, self.draws)
        start()
        self.log.rewind(facts["sizes"], facts["step"])
        self.step, self.is_evaluated, self.saved = facts["step"], facts["is_evaluated"], facts["step"]
        self.before, self.spent, self.skipped = facts["before"], facts["seconds"], facts["skipped"]
        self.best = BestWeights(facts["best"], self.stage.model)
        self.best.step, self.best.misses, self.best.weights = facts["best_step"], facts["misses"], weights

    def run(self) -> None:
        """Run all steps, or as many as patience allows."""
        try:
            while not self._is_over():
                self.stop.check()
                self._step(self.step)
                self.step, self.is_evaluated = self.step + 1, False
        except Stopped:
            self._save(again=False)
            raise

    def _is_over(self) -> bool:
        """Do what is due between two steps (evaluate, save), then say whether training is over."""
        done, last = self.step, self.step == self.schedule.steps
        if done and not self.is_evaluated and self.schedule.evaluates(done):
            found = self._evaluate(done)
            self.best.see(done, found, self.stage.model)
        self.is_evaluated = True
        if done and self.best.misses == self.options.patience:
            self.say(f"stopped early: held-out loss was best after step {self.best.step}")
            return True
        if done and not last and done % self.options.save_every == 0:
            self._save()
        return last

    def _save(self, *, again: bool = True) -> None:
        """Save a snapshot unless nothing was done since the last. `again`: whether more saves will follow."""
        if self.step != self.saved and self.saver.save(self.step, self._write, again=again):
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
            "skipped": self.skipped,
            "sizes": self.log.settle(),
            "seconds": self.seconds,
        }
        write_point(self.log.folder, facts, self.stage.model, self.optimizer, self.draws, best.weights)

    def _step(self, index: int) -> None:
        start, step = time.perf_counter(), index + 1
        rate = self.schedule.learning_rate(index)
        self.optimizer.set_rates(rate)
        self.stage.model.train()
        self.optimizer.zero_grad()
        total, sums = torch.zeros(()), dict[str, float | Tensor]()
        with self.draws.active():
            for loss, part in self.stage.losses(self.schedule.items(index)):
                loss.backward()
                total = total.to(loss) + loss.detach()
                sums |= {name: sums.get(name, 0.0) + value for name, value in part.items()}
        norm = self.optimizer.clip(0, self.options.max_gradient_norm)
        self.skipped = 0 if total.isfinite() and norm.isfinite() else self.skipped + 1
        if not self.skipped:
            self.optimizer.step()
        metrics = {"loss": float(total)} | {name: float(value) for name, value in sums.items()}
        self.log.metrics(step, metrics | {"gradient_norm": float(norm), "learning_rate": rate})
        self.log.timings(step, {"update": time.perf_counter() - start})
        if step % REPORT_EVERY == 0 or step == self.schedule.steps:
            self.say(f"step {step}/{self.schedule.steps}  {_summary(metrics)}")
        if self.skipped:
            self._tell_skipped(step)

    def _tell_skipped(self, step: int) -> None:
        """Report a skipped update; raises ValueError after too many in a row."""
        message = "loss or gradient is not finite; weights untouched"
        self.log.event(step, "skipped_update", message)
        self.say(f"warning after step {step}: the update was skipped: {message}")
        if self.skipped >= MAX_SKIPPED:
            raise ValueError(
                f"{self.skipped} updates in a row were skipped, since loss or gradient is not finite: lower "
                "fit.learning_rate, and check the data for completions that no model could generate"
            )

    def _evaluate(self, step: int) -> dict[str, float]:
        """Held-out metrics after `step` steps."""
        self.stage.model.eval()
        with self.stop.anywhere():
            metrics = self.stage.held_out()
        if metrics:
            self.log.metrics(step, {f"held_out/{name}": value for name, value in metrics.items()})
            self.say(f"held-out {f'after step {step}' if step else 'before'}: {_summary(metrics)}")
        return metrics


def _summary(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
