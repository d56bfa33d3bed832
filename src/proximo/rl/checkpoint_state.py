"""The parts of a run that have a state: what a checkpoint stores of each, and how it is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from proximo.learner.learner import Learner, PartState
from proximo.learner.named_tensors import by_name, copy_named, parts_by_name, read_tensors, write_tensors
from proximo.rl.async_sampling.in_flight import InFlight
from proximo.rl.async_sampling.one_step_ahead import Ahead
from proximo.rl.grader_failures import UnscoredWatch
from proximo.runs.checkpoints import STATE
from proximo.runs.state import RunState
from proximo.samplers.sampler import Snapshot, WeightHistory


@dataclass(frozen=True)
class Parts:
    """The parts of a run that have a state."""

    learner: Learner
    unscored: UnscoredWatch
    history: WeightHistory | None
    """Older weights that later steps sample with; None if they need none."""
    ahead: Ahead | None = None
    """Orders of later steps; None if none are sampled ahead."""
    in_flight: InFlight | None = None
    """Groups that are sampled while weights change; None if none are."""

    def snapshot(self, state: RunState) -> RunState:
        """Add the current state of all parts to a run state, without weights."""
        own = self.learner.state()
        kept = [] if self.history is None else self.history.kept()
        parts = {
            "learner": own.values,
            "unscored": self.unscored.state(),
            "sampler": {"versions": [each.version for each in kept]},
        }
        graded = () if self.ahead is None else self.ahead.graded()
        active = () if self.in_flight is None else self.in_flight.active()
        return replace(state, parts=parts, tensors=own.tensors, snapshots=tuple(kept), ahead=graded, active=active)

    def newest(self, state: RunState, *, interrupt: bool) -> RunState:
        """A snapshot with what was sampled since it was taken; see `InFlight.newest`."""
        if self.in_flight is None:
            return state
        return replace(state, active=self.in_flight.newest(state.active, interrupt=interrupt))

    def write(self, folder: Path, state: RunState) -> None:
        """Write weights and optimizer state, one file per group of tensors."""
        self.learner.policy.write(folder)
        weights = {
            f"{age}.{name}": weight
            for age, snapshot in enumerate(state.snapshots)
            for name, weight in zip(self._weights(), snapshot.weights, strict=True)
        }
        write_tensors(folder / "sampler.safetensors", weights)

    def restore(self, checkpoint: Path, state: RunState) -> None:
        """Load a checkpoint into parts that were newly created from the config."""
        if state.active and self.in_flight is None:
            raise ValueError(
                f"{checkpoint} has {len(state.active)} groups that were being sampled, whose prompts would be lost: "
                'keep ahead.switch = "in_flight" and ahead.staleness, or use a checkpoint of a run without'
            )
        parts, folder = parts_by_name(state.parts), checkpoint / STATE
        self.learner.policy.load(checkpoint, parts["learner"]["policy"])
        self.learner.load(PartState(parts["learner"], state.tensors))
        self.unscored.load(parts["unscored"])
        if self.history is not None:
            stored = read_tensors(folder / "sampler.safetensors")
            versions: list[int] = parts["sampler"]["versions"]
            self.history.load([self._snapshot(stored, age, version) for age, version in enumerate(versions)])
        if self.ahead is not None:
            self.ahead.restore(state.ahead)
        if self.in_flight is not None:
            self.in_flight.restore(state.active)

    def _snapshot(self, stored: Mapping[str, Tensor], age: int, version: int) -> Snapshot:
        weights = {name: torch.empty_like(each) for name, each in self._weights().items()}
        known = {key.partition(".")[2]: value for key, value in stored.items() if key.startswith(f"{age}.")}
        copy_named(weights, by_name(known, list(weights)), "the sampler's older weights")
        return Snapshot(version, list(weights.values()))

    def _weights(self) -> dict[str, Tensor]:
        """The policy's parameters that snapshots hold, by name; tied weights appear once."""
        named, everything = self.learner.model.named_parameters(), self.ahead is None
        return {name: each.detach() for name, each in named if everything or each.requires_grad}
