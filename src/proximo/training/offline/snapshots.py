"""Where a stage that learns from files stands between two steps, to be gone on from; removed when it is finished."""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from proximo.models.torch_globals import OwnDraws
from proximo.storage.folders import remove_folder, write_folder
from proximo.training.learner.optimizer import Optimizer
from proximo.training.runfolder.checkpoints import STATE, place, saved
from proximo.training.runfolder.resume import Attempt, begin
from proximo.training.runfolder.state import (
    copy_into,
    naming_io,
    numbered,
    read_tensors,
    write_tensors,
)

POINTS = "resume"
"""The folder in a stage's run folder."""
KEPT = 2
"""Should one be damaged, the one before it serves."""


class BestWeights:
    """The best weights so far, on the CPU; without held-out data nothing is kept, and the last are the best."""

    def __init__(self, metrics: dict[str, float], model: PreTrainedModel) -> None:
        self.step, self.metrics, self.misses = 0, metrics, 0
        self.weights = _copied(model) if metrics else None

    def see(self, step: int, metrics: dict[str, float], model: PreTrainedModel) -> None:
        # A loss that is not a number is no better than any.
        if self.weights is None or metrics["loss"] < self.metrics["loss"] or math.isnan(self.metrics["loss"]):
            self.step, self.metrics, self.misses = step, metrics, 0
            self.weights = None if self.weights is None else _copied(model)
        else:
            self.misses += 1

    @torch.no_grad()
    def restore(self, model: PreTrainedModel) -> None:
        if self.weights is not None:
            for parameter, weight in zip(model.parameters(), self.weights, strict=True):
                parameter.copy_(weight)


def _copied(model: PreTrainedModel) -> list[Tensor]:
    return [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]


def write_point(
    folder: Path,
    facts: Mapping[str, Any],
    model: PreTrainedModel,
    optimizer: Optimizer,
    draws: OwnDraws,
    best: Sequence[Tensor] | None,
) -> None:
    """`facts` hold the `step` to be done next and the `sizes` of the log; `best` are the best weights so far."""

    def fill(path: Path) -> None:
        state = path / STATE
        state.mkdir()
        with naming_io(path):
            (state / "standing.json").write_text(json.dumps(facts) + "\n")
            write_tensors(state / "random.safetensors", draws.state())
            write_tensors(state / "model.safetensors", numbered(list(model.parameters())))
            write_tensors(state / "optimizer.safetensors", optimizer.tensors())
            write_tensors(state / "best.safetensors", numbered(best or ()))

    write_folder(place(folder / POINTS, facts["step"]), fill)
    for old in saved(folder / POINTS, facts["step"])[KEPT:]:
        remove_folder(old)


def read_point(
    point: Path, model: PreTrainedModel, optimizer: Optimizer, draws: OwnDraws
) -> tuple[dict[str, Any], list[Tensor] | None]:
    """Brings model, optimizer and random numbers there; what else was known, and the best weights."""
    state = point / STATE
    copy_into(list(model.parameters()), read_tensors(state / "model.safetensors"), "the model")
    optimizer.load_tensors(read_tensors(state / "optimizer.safetensors"))
    draws.load(read_tensors(state / "random.safetensors"))
    best = read_tensors(state / "best.safetensors")
    facts = json.loads((state / "standing.json").read_text())
    return facts, [best[str(number)] for number in range(len(best))] or None


def once(
    folder: Path,
    config_toml: str,
    attempt: Attempt | None,
    work: Callable[[Attempt], dict[str, Any]],
) -> dict[str, Any]:
    """A stage's result: what `work` returns, or has returned in an earlier attempt. Without an `attempt` of the
    caller's the folder is taken here."""
    with ExitStack() as until:
        attempt = attempt or until.enter_context(begin(folder, config_toml, points=POINTS))
        if attempt.result is None:
            attempt.result = work(attempt)
            attempt.finish(attempt.result)
            shutil.rmtree(folder / POINTS, ignore_errors=True)
        return attempt.result
