"""The parts of a run that have a memory: what a checkpoint holds of them, and how they are brought back to it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from proximo.models import load_model, supports_packing
from proximo.models.compiling import checkpoint_layers
from proximo.models.packing.attention import body
from proximo.samplers import Snapshot, WeightHistory
from proximo.training.learner.learner import Learner
from proximo.training.rl.unscored import UnscoredWatch
from proximo.training.runfolder.checkpoints import STATE
from proximo.training.runfolder.state import (
    RunState,
    copy_into,
    numbered,
    read_tensors,
    write_tensors,
)


@dataclass(frozen=True)
class Holders:
    """What of a run has a memory."""

    learner: Learner
    unscored: UnscoredWatch
    history: WeightHistory | None
    """Older weights that the sampler needs; None where it needs none."""

    def remember(self, standing: RunState) -> RunState:
        """With all that is small, as it is now; weights are left where they are."""
        learner = self.learner
        parts = {
            "version": learner.version,
            "sampled_version": learner.sampled_version,
            "trusts_sampler": learner.trusts_sampler,
            "reference_was_reset": learner.reference_was_reset,
            "kl_coefficient": learner.kl_reward and learner.kl_reward.coefficient,
            "token_budget": learner.passes.token_budget,
            "is_planned": learner.passes.is_planned,
            "checkpointed": is_checkpointed(learner.model),
            "guard": learner.guard.state(),
            "unscored": self.unscored.state(),
        }
        kept = [] if self.history is None else self.history.kept()
        parts["snapshot_versions"] = [each.version for each in kept]
        return replace(standing, parts=parts, tensors={"shuffle": learner.shuffle.get_state()}, snapshots=tuple(kept))

    def write(self, folder: Path, standing: RunState) -> None:
        """Everything that is large."""
        learner = self.learner
        write_tensors(folder / "optimizer.safetensors", learner.optimizer.tensors())
        write_tensors(folder / "value.safetensors", numbered(learner.value_parameters()))
        if standing.parts["reference_was_reset"]:
            assert learner.reference is not None
            write_tensors(folder / "reference.safetensors", numbered(list(learner.reference.parameters())))
        weights = {
            f"{age}.{number}": weight
            for age, snapshot in enumerate(standing.snapshots)
            for number, weight in enumerate(snapshot.weights)
        }
        write_tensors(folder / "sampler.safetensors", weights)

    def restore(self, checkpoint: Path, standing: RunState) -> None:
        """Into the parts as they were made from the config."""
        learner, parts, state = self.learner, standing.parts, checkpoint / STATE
        load_weights(learner.model, load_model(str(checkpoint), dtype=learner.model.dtype))
        learner.optimizer.load_tensors(read_tensors(state / "optimizer.safetensors"))
        copy_into(learner.value_parameters(), read_tensors(state / "value.safetensors"), "the value model")
        learner.reference_was_reset = parts["reference_was_reset"] and learner.reference is not None
        if learner.reference_was_reset and learner.reference is not None:
            stored = read_tensors(state / "reference.safetensors")
            copy_into(list(learner.reference.parameters()), stored, "the reference")
        learner.version, learner.sampled_version = parts["version"], parts["sampled_version"]
        learner.trusts_sampler = parts["trusts_sampler"]
        if learner.kl_reward is not None and parts["kl_coefficient"] is not None:
            learner.kl_reward = replace(learner.kl_reward, coefficient=parts["kl_coefficient"])
        learner.guard.load(parts["guard"])
        self.unscored.load(parts["unscored"])
        learner.shuffle.set_state(standing.tensors["shuffle"])
        self._restore_budget(parts)
        if self.history is not None:
            self.history.load(self._snapshots(state / "sampler.safetensors", standing))

    def _restore_budget(self, parts: Mapping[str, Any]) -> None:
        learner = self.learner
        if learner.options.token_budget is None:
            learner.passes = replace(learner.passes, token_budget=parts["token_budget"], is_planned=parts["is_planned"])
            if parts["checkpointed"]:
                checkpoint_layers(learner.model, True)
        learner.passes = learner.passes.with_token_limit(learner.guard.max_tokens)

    def _snapshots(self, file: Path, standing: RunState) -> list[Snapshot]:
        stored, policy = read_tensors(file), list(self.learner.model.parameters())
        found = []
        for age, version in enumerate(standing.parts["snapshot_versions"]):
            weights = [torch.empty_like(each) for each in policy]
            known = {key.partition(".")[2]: value for key, value in stored.items() if key.startswith(f"{age}.")}
            copy_into(weights, known, "the sampler's older weights")
            found.append(Snapshot(version, weights))
        return found


@torch.no_grad()
def load_weights(model: PreTrainedModel, stored: PreTrainedModel) -> None:
    """Into the parameters where they are: samplers and captured steps read them there."""
    copy_into(list(model.parameters()), numbered(list(stored.parameters())), "the model")


def is_checkpointed(model: PreTrainedModel) -> bool:
    """Whether its layers are run again in the backward pass."""
    if not supports_packing(model):
        return False
    first = body(model).get_submodule("layers.0")
    return bool(getattr(first, "gradient_checkpointing", False))
