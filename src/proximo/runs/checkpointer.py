"""Checkpoints of a run in progress: what they hold of its parts, when one is written, and how a resume loads it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from proximo.learner.learner import Learner, PartState
from proximo.learner.named_tensors import by_name, copy_named, parts_by_name, read_tensors, write_tensors
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.runs.checkpoints import CHECKPOINTS, STATE, Saver, checkpoint_path, retain, save
from proximo.runs.log import RunLog
from proximo.runs.options import CheckpointOptions
from proximo.runs.records import Pending
from proximo.runs.state import RunState, read_run_state, write_run_state
from proximo.samplers.sampler import Snapshot
from proximo.tasks import Task

OlderWeights = Literal["none", "trained", "all"]
"""Parameters of older weights that a checkpoint holds: none, those that are trained, or those of the whole policy."""


class HasPending(Protocol):
    """Rollouts that may be sampled for later steps already."""

    @property
    def older_weights(self) -> OlderWeights:
        """State of the older weights that later steps are sampled with."""
        ...

    def pending(self) -> Pending: ...
    def newest(self, pending: Pending, *, interrupt: bool) -> Pending: ...
    def refuse(self, pending: Pending, checkpoint: Path) -> None:
        """Raise ValueError if these rollouts cannot go on with what a checkpoint has."""
        ...

    def restore(self, pending: Pending) -> None: ...


class HasCounts(Protocol):
    """A part whose state is a few numbers."""

    def state(self) -> Mapping[str, int]: ...
    def load(self, state: Mapping[str, int]) -> None: ...


@dataclass(frozen=True)
class StatefulParts:
    """The parts of a run that have a state: what a checkpoint stores of each, and how it is loaded."""

    learner: Learner
    rollouts: HasPending
    failures: HasCounts
    """Counts steps in which too much could not be scored."""

    def snapshot(self, state: RunState) -> RunState:
        """Add the current state of all parts to a run state, without weights."""
        learner, pending = self.learner.state(), self.rollouts.pending()
        parts = {
            "learner": learner.values,
            "unscored": self.failures.state(),
            "sampler": {"versions": [each.version for each in pending.older_weights]},
        }
        return replace(state, parts=parts, tensors=learner.tensors, pending=pending)

    def newest(self, state: RunState, *, interrupt: bool) -> RunState:
        """A snapshot with what was sampled since it was taken; see `InFlight.newest`."""
        return replace(state, pending=self.rollouts.newest(state.pending, interrupt=interrupt))

    def write(self, folder: Path, state: RunState) -> None:
        """Write weights and optimizer state, one file per group of tensors."""
        self.learner.policy.write(folder)
        weights = {
            f"{age}.{name}": weight
            for age, snapshot in enumerate(state.pending.older_weights)
            for name, weight in zip(self._older_weights(), snapshot.weights, strict=True)
        }
        write_tensors(folder / "sampler.safetensors", weights)

    def restore(self, checkpoint: Path, state: RunState) -> None:
        """Load a checkpoint into parts that were newly created from the config."""
        self.rollouts.refuse(state.pending, checkpoint)
        parts = parts_by_name(state.parts)
        self.learner.policy.load(checkpoint, parts["learner"]["policy"])
        self.learner.load(PartState(parts["learner"], state.tensors))
        self.failures.load(parts["unscored"])
        older = () if self.rollouts.older_weights == "none" else self._read(checkpoint, parts["sampler"]["versions"])
        self.rollouts.restore(replace(state.pending, older_weights=older))

    def _read(self, checkpoint: Path, versions: Sequence[int]) -> tuple[Snapshot, ...]:
        stored = read_tensors(checkpoint / STATE / "sampler.safetensors")
        return tuple(self._snapshot(stored, age, version) for age, version in enumerate(versions))

    def _snapshot(self, stored: Mapping[str, Tensor], age: int, version: int) -> Snapshot:
        weights = {name: torch.empty_like(each) for name, each in self._older_weights().items()}
        known = {key.partition(".")[2]: value for key, value in stored.items() if key.startswith(f"{age}.")}
        copy_named(weights, by_name(known, list(weights)), "the sampler's older weights")
        return Snapshot(version, list(weights.values()))

    def _older_weights(self) -> dict[str, Tensor]:
        """The policy's parameters that older weights hold, by name; tied ones appear once."""
        named, everything = self.learner.model.named_parameters(), self.rollouts.older_weights == "all"
        return {name: each.detach() for name, each in named if everything or each.requires_grad}


class Checkpointer:
    """Snapshots run state after every step and writes a checkpoint every N steps.

    A snapshot is small and a copy; weights and moments are not copied. So a step that is given up before its first
    update has changed nothing of what is saved.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        parts: StatefulParts,
        tokenizer: PreTrainedTokenizerBase,
        log: RunLog,
        warned: Callable[[int, str], None],
    ) -> None:
        """`warned` shows the user a warning about a step."""
        self._options, self._parts, self._tokenizer, self._log = options, parts, tokenizer, log
        self._warned, self._saver = warned, Saver(log.event, warned)
        self._saved: int | None = None
        """Step of the newest checkpoint."""
        self._began, self._spent = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        """Seconds spent on the run, including earlier attempts up to the checkpoint that was resumed."""
        return self._spent + time.perf_counter() - self._began

    def restore(self, point: Path, task: Task, seed: int) -> RunState:
        """Load a checkpoint into all parts of the run and return its state; nothing is written."""
        state = read_run_state(point / STATE, task, seed)
        self._parts.restore(point, state)
        self._saved, self._spent = state.step, state.seconds
        return state

    def snapshot(self, state: RunState) -> RunState:
        """Take a snapshot of the current state."""
        return self._parts.snapshot(
            replace(state, sizes=self._log.sizes(), seconds=self.seconds, run=self._log.identity)
        )

    def save_if_due(self, state: RunState, *, last: bool) -> RunState:
        """Save if that is due. If saving fails, the best checkpoint stays the one before."""
        step = state.step
        is_best = self._options.keep_best and state.best is not None and state.best.step == step
        if step and (step % self._options.every == 0 or last or is_best):
            self.save(state, last=last)
        return replace(state, best=state.former_best) if is_best and self._saved != step else state

    def save(self, state: RunState, *, last: bool, again: bool = True) -> None:
        """Save, unless this step is saved already. A failure is reported; the last checkpoint of a run must not fail.
        `last`: whether the run ends here, possibly before its last step. `again`: whether there will be another
        save."""
        step = state.step
        if self._saved == step:
            return
        state = self._parts.newest(state, interrupt=again)  # a run that is told to end does not wait for engines
        if self._saver.save(step, lambda: self._write(state), last=last, again=again):
            self._saved = step
            self._retain(state)

    def path(self, step: int) -> Path:
        return checkpoint_path(self._log.folder / CHECKPOINTS, step)

    def _write(self, state: RunState) -> None:
        sizes = self._log.settle()
        assert sizes == state.sizes, f"rows were written that the state does not know: {sizes}, {state.sizes}"

        def write(folder: Path) -> None:
            write_run_state(folder, state)
            self._parts.write(folder, state)

        save(
            self._log.folder, state.step, self._parts.learner.policy.save, self._tokenizer, write, self._log.standing()
        )

    def _retain(self, state: RunState) -> None:
        try:
            best = None if state.best is None else state.best.step
            retain(self._log.folder, self._options, state.step, best)
        except OSError as error:
            message = f"an old checkpoint cannot be removed: {error}"
            self._log.event(state.step, "remove_failed", message)
            self._warned(state.step, message)
