"""Checkpoints: a Hugging Face folder each, with the run's state beside the weights; complete, or not there.

In `state/`: standing.json and random.safetensors (see state.py), optimizer.safetensors (moments and float32 masters),
value.safetensors (the value model's own parameters), reference.safetensors (only where it was reset) and
sampler.safetensors (older weights of a sampler that lags).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.models import load_model, supports_packing
from proximo.models.compiling import checkpoint_layers
from proximo.models.packing.attention import body
from proximo.samplers.mismatch import MismatchedSampler, Snapshot
from proximo.storage.folders import complaints, remove_folder, set_aside, write_folder
from proximo.training.config import CheckpointOptions
from proximo.training.learner.learner import Learner
from proximo.training.rl.unscored import UnscoredWatch
from proximo.training.runfolder.state import (
    Standing,
    copy_into,
    naming_io,
    numbered,
    random_states,
    read_tensors,
    set_random_states,
    write_tensors,
)

CHECKPOINTS = "checkpoints"
STATE = "state"
MOST_FAILURES = 3
"""Saves in a row that may fail."""


def place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def saved(folder: Path, most: int | None = None) -> list[Path]:
    """Everything that has a checkpoint's name, the newest first, by step, not by time; none of a later step than
    `most`."""
    found = [path for path in folder.iterdir() if re.fullmatch(r"step-\d+", path.name)] if folder.is_dir() else []
    return sorted((path for path in found if most is None or step_of(path) <= most), key=lambda path: -step_of(path))


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def newest_valid(
    folder: Path, complaint: Callable[[Path], str | None] = lambda _: None
) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with newer ones; `complaint` may find something, too."""
    passed_over = []
    for path in saved(folder):
        if wrong := complaints(path):
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            passed_over.append(f"{path} is damaged ({'; '.join(wrong[:3])}{more})")
        elif (found := complaint(path)) is not None:
            passed_over.append(f"{path} cannot be gone on from: {found}")
        else:
            return path, passed_over
    return None, passed_over


def pass_over(folder: Path, point: Path | None) -> None:
    """Checkpoints after the one that is gone on from are none any more: nobody is to take one for the newest."""
    for path in saved(folder):
        if point is None or step_of(path) > step_of(point):
            set_aside(path)


def save(
    folder: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    write_state: Callable[[Path], None] | None = None,
) -> Path:
    """Into the run's `checkpoints/step-N`; raises OSError, and leaves all as it was, where that cannot be."""
    target = place(folder / CHECKPOINTS, step)
    write_checkpoint(target, model, tokenizer, write_state)
    return target


def write_checkpoint(
    target: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    write_state: Callable[[Path], None] | None = None,
) -> None:
    def fill(path: Path) -> None:
        with naming_io(target):
            model.save_pretrained(path)
            tokenizer.save_pretrained(path)
            if write_state is not None:
                (path / STATE).mkdir()
                write_state(path / STATE)

    write_folder(target, fill)


def retain(folder: Path, options: CheckpointOptions, step: int, best: int | None) -> None:
    """Remove all but the newest ones up to this step and the best."""
    for path in saved(folder / CHECKPOINTS, step)[options.keep :]:
        if not (options.keep_best and step_of(path) == best):
            remove_folder(path)


class Saver:
    """Saves that may fail: a full disk is no reason to stop, until it has been full for long."""

    def __init__(self, log: Callable[[int, str, str], None], say: Callable[[int, str], None]) -> None:
        """`log` takes the step, the kind and the message of an event."""
        self._log, self._say, self._failures = log, say, 0

    def save(self, step: int, write: Callable[[], None], *, last: bool = False, again: bool = True) -> bool:
        """Whether it worked; raises OSError where the last save of a run fails, or too many in a row have. `again`:
        whether there will be another."""
        try:
            write()
        except OSError as error:
            self._failures += 1
            message = f"no checkpoint after step {step}: {error}; older ones are as they were"
            self._log(step, "save_failed", message)
            if last or (again and self._failures >= MOST_FAILURES):
                raise OSError(
                    f"{message}. {self._failures} saves in a row have failed: make room or the folder writable, then "
                    "give the same command again"
                ) from error
            self._say(step, f"{message}{'; trying again at the next one' if again else ''}")
            return False
        self._failures = 0
        return True


@dataclass(frozen=True)
class Holders:
    """What of a run has a memory."""

    learner: Learner
    unscored: UnscoredWatch
    mismatched: MismatchedSampler | None

    def remember(self, standing: Standing) -> Standing:
        """With all that is small, as it is now; weights are left where they are."""
        learner = self.learner
        tensors = random_states(learner.model.device)
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
        kept = [] if self.mismatched is None else self.mismatched.kept()
        parts["snapshot_versions"] = [each.version for each in kept]
        tensors["shuffle"] = learner.shuffle.get_state()
        return replace(standing, parts=parts, tensors=tensors, snapshots=tuple(kept))

    def write(self, folder: Path, standing: Standing) -> None:
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

    def restore(self, checkpoint: Path, standing: Standing) -> None:
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
        if self.mismatched is not None:
            self.mismatched.load(self._snapshots(state / "sampler.safetensors", standing))
        set_random_states(learner.model.device, standing.tensors)

    def _restore_budget(self, parts: Mapping[str, Any]) -> None:
        learner = self.learner
        if learner.options.token_budget is None:
            learner.passes = replace(learner.passes, token_budget=parts["token_budget"], is_planned=parts["is_planned"])
            if parts["checkpointed"]:
                checkpoint_layers(learner.model, True)
        learner.passes = learner.passes.within(learner.guard.most_tokens)

    def _snapshots(self, file: Path, standing: Standing) -> list[Snapshot]:
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
