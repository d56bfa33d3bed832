"""Snapshots a run's state after every step, and writes a checkpoint every few steps."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.rl.checkpoint_state import Parts
from proximo.rl.config import RunConfig
from proximo.runs.checkpoints import CHECKPOINTS, STATE, Saver, place, retain, save, step_of
from proximo.runs.files import METRICS
from proximo.runs.log import RunLog
from proximo.runs.records import Answered, Collected, Evaluation
from proximo.runs.state import Best, RunState, read_run_state, write_run_state
from proximo.system.lines import Lines
from proximo.tasks import Task


class Checkpointer:
    """Snapshots run state after every step and writes a checkpoint every N steps.

    A snapshot is small and a copy; weights and moments are not copied. So a step that is given up before its first
    update has changed nothing of what is saved.
    """

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        tokenizer: PreTrainedTokenizerBase,
        log: RunLog,
        warned: Callable[[int, str], None],
    ) -> None:
        """`warned` shows the user a warning about a step."""
        self._config, self._parts, self._tokenizer, self._log = config, parts, tokenizer, log
        self._warned, self._saver = warned, Saver(log.event, warned)
        self._saved: int | None = None
        """Step of the newest checkpoint."""
        self._former_best: Best | None = None
        """Best checkpoint before the last evaluation."""
        self._began, self._spent = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        """Seconds spent on the run, including earlier attempts up to the checkpoint that was resumed."""
        return self._spent + time.perf_counter() - self._began

    def restore(self, point: Path, task: Task) -> RunState:
        """Load a checkpoint into all parts of the run and return its state; nothing is written."""
        refuse_fewer_steps(self._config, point)
        state = read_run_state(point / STATE, task, self._config.seed)
        self._parts.restore(point, state)
        self._saved, self._spent = state.step, state.seconds
        return state

    def snapshot(self, state: RunState) -> RunState:
        """Take a snapshot of the current state."""
        return self._parts.snapshot(
            replace(state, sizes=self._log.sizes(), seconds=self.seconds, run=self._log.identity)
        )

    def after_step(self, state: RunState, collected: Collected) -> RunState:
        """Snapshot after a step."""
        generated = state.generated + collected.sampled_tokens
        step = state.step + 1
        return self.snapshot(replace(state, step=step, cursor=collected.cursor, generated=generated, evaluated=False))

    def after_evaluation(self, state: RunState, found: Evaluation, answers: Sequence[Answered]) -> RunState:
        """Snapshot after an evaluation between two steps."""
        best, value = state.best, found.value(self._config.evaluation.metric)
        self._former_best = best
        if best is None or value > best.value:  # NaN is not better than anything
            best = best if math.isnan(value) else Best(state.step, value, found, answers)
        return self.snapshot(replace(state, evaluated=True, best=best))

    def best_before(self, state: RunState) -> Best:
        """The best evaluation so far; step 0 is before training."""
        start = Best(0, state.before.value(self._config.evaluation.metric), state.before, state.answers)
        return start if state.best is None or start.value > state.best.value else state.best

    def is_last(self, state: RunState) -> bool:
        """Whether the run ends here: all steps are done, or all tokens are sampled."""
        most = self._config.max_generated_tokens
        return state.step >= self._config.steps or (most is not None and state.generated >= most)

    def early_end(self, state: RunState) -> str | None:
        """Why the run ends before its last step: evaluation.target is reached, or the last evaluations, as many as
        evaluation.patience, found nothing better. None: it does not."""
        options, best = self._config.evaluation, state.best
        if options.every is None or not state.evaluated or best is None:
            return None
        found = f"{options.metric} {best.value:.3g} after step {best.step}"
        if options.target is not None and best.value >= options.target:
            return f"the run ends here: {found} reaches evaluation.target, {options.target:g}"
        if options.patience is not None and state.step - best.step >= options.patience * options.every:
            return f"the run ends here: {options.patience} evaluations in a row found nothing better than {found}"
        return None

    def save_if_due(self, state: RunState) -> RunState:
        """Save if that is due. If saving fails, the best checkpoint stays the one before."""
        options, step = self._config.checkpoints, state.step
        is_best = options.keep_best and state.best is not None and state.best.step == step
        if step and (step % options.every == 0 or self.is_last(state) or is_best):
            self.save(state)
        return replace(state, best=self._former_best) if is_best and self._saved != step else state

    def save(self, state: RunState, *, again: bool = True, last: bool = False) -> None:
        """Save, unless this step is saved already. A failure is reported; the last checkpoint of a run must not fail.
        `again`: whether there will be another save. `last`: whether the run ends here, possibly before its last
        step."""
        step, last = state.step, last or self.is_last(state)
        if self._saved == step:
            return
        state = self._parts.newest(state, interrupt=again)  # a run that is told to end does not wait for engines
        if self._saver.save(step, lambda: self._write(state), last=last, again=again):
            self._saved = step
            self._retain(state)

    def path(self, step: int) -> Path:
        return place(self._log.folder / CHECKPOINTS, step)

    def _write(self, state: RunState) -> None:
        found = self._log.settle()
        assert found == state.sizes, f"rows were written that the state does not know: {found}, {state.sizes}"

        def write(folder: Path) -> None:
            write_run_state(folder, state)
            self._parts.write(folder, state)

        save(
            self._log.folder, state.step, self._parts.learner.policy.save, self._tokenizer, write, self._log.standing()
        )

    def _retain(self, state: RunState) -> None:
        try:
            best = None if state.best is None else state.best.step
            retain(self._log.folder, self._config.checkpoints, state.step, best)
        except OSError as error:
            message = f"an old checkpoint cannot be removed: {error}"
            self._log.event(state.step, "remove_failed", message)
            self._warned(state.step, message)


def refuse_fewer_steps(config: RunConfig, point: Path | None) -> None:
    """Raise ValueError if the run should end before the checkpoint that it resumes from."""
    if point is None:
        return
    if step_of(point) > config.steps:
        raise ValueError(
            f"steps is {config.steps}, but {step_of(point)} are done: give at least as many, or use the checkpoint "
            f"{point} as it is"
        )
    if config.max_generated_tokens is not None and (before := _generated_before(point)) >= config.max_generated_tokens:
        raise ValueError(
            f"max_generated_tokens is {config.max_generated_tokens}, but {before} tokens were sampled before the last "
            f"of the {step_of(point)} steps that are done: give more than that, or use the checkpoint {point} as it is"
        )


def _generated_before(point: Path) -> int:
    """Tokens sampled before a checkpoint's last step: with a limit below that, the step would not have been made.
    Damaged rows are ignored, since resuming does not need them."""
    metrics, total = point.parents[1] / METRICS, 0
    for row in Lines(metrics).readable():
        step, tokens = row.get("step"), row.get("sampled_tokens")
        if isinstance(step, int) and isinstance(tokens, int) and step < step_of(point):
            total += tokens
    return total
