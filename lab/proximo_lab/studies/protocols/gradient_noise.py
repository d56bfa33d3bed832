"""A run whose stored steps say how noisy each algorithm's gradient is."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from proximo.algorithms import Algorithm
from proximo.insight.compare.worker import train_one
from proximo.insight.folder import RunFolder
from proximo.insight.lens.gradients import SAME, half_gradients
from proximo.insight.lens.replay import compared
from proximo.models.loading import load_model
from proximo.rl.config import RunConfig
from proximo.runs.forking import checkpoint_at
from proximo.runs.options import CheckpointOptions
from proximo.system.machine import Machine
from proximo_lab.studies.record import Record, recorded


@dataclass(frozen=True)
class Replayed:
    """An algorithm under a name."""

    name: str
    algorithm: Algorithm


@dataclass(frozen=True)
class Halved:
    """Train, and compute on some of the steps the gradient of each algorithm for every other of the groups and for the
    rest, at the policy that the step began with and with the ratios that its updates met.

    The record has the run's own curves and, for each algorithm, `halves/NAME`: the cosine between the two.
    """

    algorithms: tuple[Replayed, ...]
    every: int = 10
    """Steps from one that is looked at to the next; the first is this many steps after the run began."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}: give at least 1")

    def run(self, config: RunConfig, folder: Path, machine: Machine) -> Record:
        base = folder / "base"
        config = replace(config, checkpoints=CheckpointOptions(every=self.every, keep=config.steps, keep_best=False))
        train_one(config, base, machine)
        record = recorded(base)
        looked_at = {done: self._cosines(base, done) for done in range(self.every, config.steps, self.every)}
        halves = {
            halves_curve(each.name): [
                looked_at[done][each.name] if done in looked_at else math.nan for done in range(config.steps)
            ]
            for each in self.algorithms
        }
        return Record({**record.steps, **halves}, record.held_out, record.seconds)

    def _cosines(self, base: Path, done: int) -> dict[str, float]:
        """Cosines between halves of the step that begins when so many are done."""
        run = RunFolder(base)
        step = run.step(done + 1)
        views = compared(step, run.config, {each.name: each.algorithm for each in self.algorithms})
        model = load_model(str(checkpoint_at(base, done)), dtype=torch.float32, device="cpu")
        gradients = half_gradients(model, step, run.config, views)
        # NaN where all groups of the first update are dead.
        is_other = gradients.first_gap >= SAME
        assert not is_other, f"{base}: the checkpoint after {done} steps did not sample the next, {gradients.first_gap}"
        return {each.name: gradients.halves[each.name] for each in self.algorithms}


def halves_curve(name: str) -> str:
    return f"halves/{name}"
