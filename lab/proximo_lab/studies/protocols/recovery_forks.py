"""Forks of a run around the fall of its outcome: what is still to be saved, and by what."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from proximo.algorithms import Algorithm, explain
from proximo.config import toml
from proximo.insight.compare.worker import train_one
from proximo.rl.config import EvaluationOptions, RunConfig
from proximo.rl.evaluate import known_mean
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.forking import changes, checkpoint_at, fork
from proximo.runs.options import CheckpointOptions
from proximo.runs.session import open_session
from proximo.system.machine import Machine
from proximo_lab.studies.record import Record, recorded

SMOOTHED = 3
"""Steps of which the outcome is averaged to find the fall."""
FALLEN = 0.5
"""Share of the best outcome so far below which a run has fallen."""


@dataclass(frozen=True)
class Change:
    """Change that a fork makes, under a name."""

    name: str
    rate: float = 1.0
    """Factor of the learning rate."""
    algorithm: Algorithm | None = None
    """Algorithm of the fork; None: the run's own."""

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"rate is {self.rate}: give a factor above 0")


@dataclass(frozen=True)
class Forked:
    """Train, find the step of the fall, and go on from checkpoints around it, each once with every change.

    The record has the run's own curves, and `fork/NAME PLACE/outcome` with the outcomes of each fork, PLACE being the
    number of steps from the fall to where it begins. A run that does not fall has no forks.
    """

    changes: tuple[Change, ...]
    places: tuple[int, ...] = (-4, 3)
    """Steps from the fall at which forks begin; negative: before it."""
    steps: int = 15
    """Steps of a fork."""

    def run(self, config: RunConfig, folder: Path, machine: Machine) -> Record:
        base = folder / "base"
        config = replace(config, checkpoints=CheckpointOptions(every=1, keep=config.steps, keep_best=False))
        train_one(config, base, machine)
        record = recorded(base)
        at = fall(record.steps["outcome"])
        curves, seconds = dict(record.steps), record.seconds
        for offset in self.places if at is not None else ():
            if at is not None and 1 <= at + offset < config.steps:
                for change in self.changes:
                    end = _fork(
                        base, folder / f"{change.name}-{offset}", at + offset, self._changed(config, change, at)
                    )
                    curves[fork_curve(change.name, offset)] = end.steps["outcome"][at + offset :]
                    seconds += end.seconds
        return Record(curves, record.held_out, seconds)

    def _changed(self, config: RunConfig, change: Change, at: int) -> RunConfig:
        training = replace(config.training, learning_rate=config.training.learning_rate * change.rate)
        return replace(
            config,
            algorithm=change.algorithm or config.algorithm,
            training=training,
            evaluation=EvaluationOptions(problems=0),
            steps=at + max(self.places) + self.steps,
        )


def fork_curve(name: str, offset: int) -> str:
    return f"fork/{name} {offset:+d}/outcome"


def fall(outcomes: Sequence[float]) -> int | None:
    """Steps done when the outcome, smoothed, has first fallen to half of its best; None if it never has."""
    best = 0.0
    for done in range(SMOOTHED, len(outcomes) + 1):
        level = known_mean(outcomes[done - SMOOTHED : done])
        if level < FALLEN * best:
            return done
        best = max(best, level)
    return None


def _fork(run: Path, folder: Path, at: int, config: RunConfig) -> Record:
    fork(run, folder, checkpoint_at(run, at))
    text = toml.dumps(config)
    with open_session(
        folder, text, allowed=changes(folder, text), algorithm=explain.named(config.algorithm)
    ) as attempt:
        if attempt.result is None:
            train(Run(config, folder, ProgressLines()), attempt)
    return recorded(folder)
