"""Resume points of a stage that trains on files; removed when it is finished."""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from proximo.models.torch_globals import OwnDraws
from proximo.storage.folders import remove_folder, write_folder
from proximo.training.learner.named_tensors import by_name, copy_named, optimizer_by_name
from proximo.training.learner.optimizer import HALVES, Optimizer
from proximo.training.runfolder.checkpoints import STATE, place, saved
from proximo.training.runfolder.resume import Attempt, begin
from proximo.training.runfolder.state import (
    RUN_STATE,
    naming_io,
    read_facts,
    read_tensors,
    write_tensors,
)

POINTS = "resume"
"""Subfolder of the run folder that holds the resume points."""
KEPT = 2
"""Resume points kept: if one is damaged, the one before it is used."""


class BestWeights:
    """The best weights so far, on the CPU. Without held-out data none are kept, and the last weights are the best."""

    def __init__(self, metrics: dict[str, float], model: PreTrainedModel) -> None:
        self.step, self.metrics, self.misses = 0, metrics, 0
        self.weights = _copied(model) if metrics else None

    def see(self, step: int, metrics: dict[str, float], model: PreTrainedModel) -> None:
        # A NaN loss is never better.
        if self.weights is None or metrics["loss"] < self.metrics["loss"] or math.isnan(self.metrics["loss"]):
            self.step, self.metrics, self.misses = step, metrics, 0
            self.weights = None if self.weights is None else _copied(model)
        else:
            self.misses += 1

    @torch.no_grad()
    def restore(self, model: PreTrainedModel) -> None:
        if self.weights is not None:
            for parameter, weight in zip(_trained(model).values(), self.weights, strict=True):
                parameter.copy_(weight)


def _copied(model: PreTrainedModel) -> list[Tensor]:
    return [parameter.detach().to("cpu", copy=True) for parameter in _trained(model).values()]


def write_point(
    folder: Path,
    facts: Mapping[str, Any],
    model: PreTrainedModel,
    optimizer: Optimizer,
    draws: OwnDraws,
    best: Sequence[Tensor] | None,
) -> None:
    """Write a resume point. `facts` include the next `step` and the `sizes` of the log; `best` are the best weights."""

    named = dict[str, Tensor](_trained(model))

    def fill(path: Path) -> None:
        state = path / STATE
        state.mkdir()
        with naming_io(path):
            (state / RUN_STATE).write_text(json.dumps(facts) + "\n")
            write_tensors(state / "random.safetensors", draws.state())
            write_tensors(state / "model.safetensors", named)
            write_tensors(state / "optimizer.safetensors", optimizer.tensors(list(named)))
            write_tensors(state / "best.safetensors", dict(zip(named, best, strict=True)) if best else {})

    write_folder(place(folder / POINTS, facts["step"]), fill)
    for old in saved(folder / POINTS, facts["step"])[KEPT:]:
        remove_folder(old)


def read_point(
    point: Path, model: PreTrainedModel, optimizer: Optimizer, draws: OwnDraws
) -> tuple[dict[str, Any], list[Tensor] | None]:
    """Restore model, optimizer and random state; returns the other facts and the best weights."""
    state = point / STATE
    named = _trained(model)
    halves = [name for name, each in named.items() if each.dtype in HALVES]
    copy_named(named, by_name(read_tensors(state / "model.safetensors"), list(named)), "the model")
    stored = optimizer_by_name(read_tensors(state / "optimizer.safetensors"), list(named), halves)
    optimizer.load_tensors(stored, list(named))
    draws.load(read_tensors(state / "random.safetensors"))
    best = by_name(read_tensors(state / "best.safetensors"), list(named))
    return read_facts(state), [best[name] for name in named] if best else None


def _trained(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer holds, by name and in its order; the others never change."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def once(
    folder: Path,
    config_toml: str,
    attempt: Attempt | None,
    work: Callable[[Attempt], dict[str, Any]],
) -> dict[str, Any]:
    """A stage's result: that of `work`, or the stored one if the stage is already finished. Without an `attempt` from
    the caller, the folder is locked here."""
    with ExitStack() as until:
        attempt = attempt or until.enter_context(begin(folder, config_toml, points=POINTS))
        if attempt.result is None:
            attempt.result = work(attempt)
            attempt.finish(attempt.result)
            shutil.rmtree(folder / POINTS, ignore_errors=True)
        return attempt.result
