"""The training loop shared by the stages that train on files: fine-tuning, reward models, DPO."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.out_of_memory import explaining_memory
from proximo.runs.checkpoints import CHECKPOINTS, Saver, save
from proximo.runs.files import RESULT
from proximo.runs.log import RunLog
from proximo.runs.session import RunSession
from proximo.runs.signals import Stop, Stopped
from proximo.supervised.kept_checkpoints import KeptCheckpoints, remove_later, retain
from proximo.supervised.pace import RowPace
from proximo.supervised.schedule import FitOptions, Schedule
from proximo.supervised.snapshots import BestStep, read_point, write_point
from proximo.supervised.stage_model import HoldsStages, Stage, StageModel, StageOptions, WholeStageModel
from proximo.system.opening import as_written, inside

MAX_SKIPPED = 5
"""Consecutive skipped updates (not finite) that end a stage."""


@dataclass(frozen=True)
class Fitted:
    """The result of a finished stage."""

    steps: int
    """Optimizer steps taken."""
    best_step: int
    """Step of the saved weights, those with the best held-out metric; 0: training never improved it."""
    before: dict[str, float]
    """Held-out metrics before training; empty without held-out data."""
    best: dict[str, float]
    """Held-out metrics of the checkpoint."""
    stopped_early: bool
    checkpoint: Path
    seconds: float
    skipped: int = 0
    """Bad rows that were skipped."""
    last: Path | None = None
    """Newest checkpoint, where that is not the result; None where it is."""

    def to_dict(self) -> dict[str, Any]:
        names = {"checkpoint": self.checkpoint.name, **({} if self.last is None else {"last": self.last.name})}
        return {name: value for name, value in asdict(self).items() if name != "last"} | names

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], folder: Path) -> "Fitted":
        """The stored result of the stage in this folder."""
        with as_written(folder / RESULT):
            named = {name: stored[name] for name in ("checkpoint", "last") if name in stored}
            return cls(**{**stored, **{name: inside(folder / CHECKPOINTS, each) for name, each in named.items()}})


def fit(
    stage: Stage,
    options: FitOptions,
    *,
    tokenizer: PreTrainedTokenizerBase,
    log: RunLog,
    seed: int,
    say: Callable[[str], None],
    held: StageModel | None = None,
    ranks: HoldsStages | None = None,
    point: Path | None = None,
    start: Callable[[], None] = lambda: None,
    kept: KeptCheckpoints | None = None,
) -> Fitted:
    """Train, evaluate and save the best weights, which the model holds at the end.

    The best weights have the best held-out `options.metric`, including before training; without held-out data they are
    the last. `held` is how the stage's model is held; None: whole, in this process. `point` is the snapshot to resume
    from; `start` records the start of this attempt once that has loaded. `kept` are the checkpoints that stay beside
    the result.
    """
    held = held or WholeStageModel(stage.model, options, seed)
    with Stop() as stop:
        if ranks is not None:
            ranks.hold_signals(stop.held)
        fitting = _Fitting(stage, held, options, log, seed, say, stop, kept, tokenizer)
        fitting.begin(point, start)
        fitting.run()
    best = fitting.best
    held.restore_best()
    log.settle()
    checkpoint = save(log.folder, best.step, held.save, tokenizer, None, log.standing())
    # Without any that are kept, others are of an earlier attempt, before something was changed.
    newest, *_ = retain(log.folder, 0 if kept is None else kept.keep, checkpoint)
    return Fitted(
        steps=fitting.step,
        best_step=best.step,
        before=fitting.before,
        best=best.metrics,
        stopped_early=fitting.step < fitting.schedule.steps,
        checkpoint=checkpoint,
        seconds=fitting.seconds,
        last=None if newest == checkpoint else newest,
    )


def fit_session(
    session: RunSession,
    stage: Stage,
    held: StageModel,
    config: StageOptions,
    tokenizer: PreTrainedTokenizerBase,
    say: Callable[[str], None],
    report: Callable[[], None],
    ranks: HoldsStages | None,
) -> Fitted:
    """Run `fit` as one attempt at a run; the attempt is recorded, and `report` called, once training can start."""
    steps = Schedule(stage.size, config.fit, config.seed).steps

    def start() -> None:
        session.start({"steps": steps, "items": stage.size})
        report()

    return fit(
        stage,
        config.fit,
        tokenizer=tokenizer,
        log=session.log,
        seed=config.seed,
        say=say,
        held=held,
        ranks=ranks,
        point=session.resume_from,
        start=start,
        kept=config.checkpoints,
    )


class _Fitting:
    """A stage in progress. Between steps, its whole state is here and in the stage's model."""

    def __init__(
        self,
        stage: Stage,
        held: StageModel,
        options: FitOptions,
        log: RunLog,
        seed: int,
        say: Callable[[str], None],
        stop: Stop,
        kept: KeptCheckpoints | None,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.stage, self.held, self.options, self.log, self.say, self.stop = stage, held, options, log, say, stop
        self.kept, self.tokenizer = kept, tokenizer
        self.schedule = Schedule(stage.size, options, seed)
        self.saver = Saver(log.event, lambda step, message: say(f"warning after step {step}: {message}"))
        self.start, self.spent, self.pace = time.perf_counter(), 0.0, RowPace()
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
            self._remove_later()
            self.before = self._evaluate(0)
            patience = self.options.patience
            if patience is not None and not self.before:
                raise ValueError(f"fit.patience is {patience}, but no data is held out: leave it out, or hold some")
            self.best = BestStep(0, self.before)
            if self.before:  # without held-out data the last weights are the best, and none are kept
                self.held.keep_best()
            return
        values = read_point(point, self.held)
        self._refuse_fewer_steps(values["step"], is_over=values["is_evaluated"])
        start()
        self.log.rewind(values["sizes"], values["step"])
        self.step, self.is_evaluated, self.saved = values["step"], values["is_evaluated"], values["step"]
        self._remove_later()
        self.before, self.spent, self.skipped = values["before"], values["seconds"], values["skipped"]
        self.best = BestStep(values["best_step"], values["best"], values["misses"])

    def _refuse_fewer_steps(self, done: int, *, is_over: bool) -> None:
        """Raise ValueError where nothing is left to do: a run that ends at a step that is done has no result there."""
        if done > self.schedule.steps - is_over:
            raise ValueError(
                f"the run has {self.schedule.steps} steps now, and {done} are done: give a larger fit.steps or "
                "fit.epochs, or those that it began with"
            )

    def run(self) -> None:
        """Run all steps, or as many as patience allows."""
        self.pace = RowPace()
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
            metrics = self._evaluate(done)
            self.best = self.best.after(done, metrics, self.options)
            if metrics and self.best.step == done:
                self.held.keep_best()
        self.is_evaluated = True
        has_stopped = done > 0 and self.best.misses == self.options.patience
        self._keep(last=last or has_stopped)
        if has_stopped:
            self.say(f"stopped early: held-out {self.options.metric} was best after step {self.best.step}")
            return True
        if done and not last and done % self.options.save_every == 0:
            self._save()
        return last

    def _remove_later(self) -> None:
        """Remove checkpoints that are written again."""
        if self.kept is not None:
            remove_later(self.log.folder, self.step)

    def _keep(self, *, last: bool) -> None:
        """Write a checkpoint if one is due, and remove older ones."""
        step, folder = self.step, self.log.folder
        if self.kept is None or not step or (step % self.kept.every and not last):
            return
        self.log.settle()
        self.saver.save(step, lambda: save(folder, step, self.held.save, self.tokenizer, None, self.log.standing()))
        retain(folder, self.kept.keep)

    def _save(self, *, again: bool = True) -> None:
        """Save a snapshot unless nothing was done since the last. `again`: whether more saves will follow."""
        if self.step != self.saved and self.saver.save(self.step, self._write, again=again):
            self.saved = self.step

    def _write(self) -> None:
        best = self.best
        values = {
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
        write_point(self.log.folder, values, self.held, self.log.standing())

    def _step(self, index: int) -> None:
        start, step = time.perf_counter(), index + 1
        rate = self.schedule.learning_rate(index)
        with explaining_memory(self._smaller):
            result = self.held.gradients(self.stage, self.schedule.items(index))
            is_finite = math.isfinite(result.loss)
            norm = self.held.apply(rate, self.options.max_gradient_norm, lambda norm: is_finite and math.isfinite(norm))
        self.skipped = 0 if is_finite and math.isfinite(norm) else self.skipped + 1
        metrics = {"loss": result.loss, **result.sums}
        self.log.metrics(step, metrics | {"gradient_norm": norm, "learning_rate": rate})
        self.log.timings(step, {"update": time.perf_counter() - start})
        self._report(step, metrics, rate)
        if self.skipped:
            self._tell_skipped(step)

    def _report(self, step: int, metrics: Mapping[str, float], rate: float) -> None:
        """Say how far the stage is, every few steps."""
        steps = self.schedule.steps
        self.pace.stepped(len(self.schedule.items(step - 1)))
        if self.pace.is_due(step, steps):
            speed = self.pace.line(steps - step)
            self.say(f"step {step}/{steps}  {_summary(metrics)}  learning rate {rate:.3g}  {speed}")

    @property
    def _smaller(self) -> str:
        """Remedy where memory runs out."""
        return (
            f"set a smaller fit.token_budget, it is {self.options.token_budget} tokens a pass; where one row is too "
            "long, train an adapter, or leave long rows out"
        )

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
        with self.stop.anywhere(), explaining_memory(self._smaller):
            metrics = self.held.held_out(self.stage)
        if metrics:
            self.log.metrics(step, {f"held_out/{name}": value for name, value in metrics.items()})
            self.say(f"held-out {f'after step {step}' if step else 'before'}: {_summary(metrics)}")
        return metrics


def _summary(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
