"""Learning from preferences between a model's own completions, in the place of reinforcement learning."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from proximo.data import DataFile
from proximo.insight.compare.worker import train_one
from proximo.losses.pairwise import Dpo
from proximo.rl.config import RunConfig
from proximo.supervised.dpo import DpoConfig, dpo
from proximo.supervised.fitting import FitOptions
from proximo.supervised.pairs import PairsConfig, write_pairs
from proximo.system.machine import Machine
from proximo_lab.studies.record import Record, recorded

STILL = 1e-12
"""Learning rate at which no weight moves: the run only samples and grades."""
ROUND_SEEDS = 1000
"""Distance of the seeds with which rounds draw their prompts."""


@dataclass(frozen=True)
class Preferred:
    """DPO on the completions that the config's steps sample and grade: as many as training with it would.

    With several rounds each one samples its share with the model that the round before has made. The config's learning
    rate is DPO's. The record has the evaluation before each round and after the last; its steps count sampling steps.
    """

    rounds: int = 1
    """Number of rounds; the steps of the config are divided among them."""
    loss: Dpo = field(default_factory=Dpo)
    epochs: float = 1.0
    """Passes over each round's pairs."""
    batch: int = 32
    """Rankings per update."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}: give at least 1")

    def run(self, config: RunConfig, folder: Path, machine: Machine) -> Record:
        model, seconds = config.model, 0.0
        steps, held_out = dict[str, list[float]](), dict[str, list[float]]()
        still = replace(config, training=replace(config.training, learning_rate=STILL))
        still = replace(still, evaluation=replace(config.evaluation, every=None))
        for number in range(1, self.rounds + 1):
            drawn = config.seed + ROUND_SEEDS * (number - 1)
            sampled = replace(still, model=model, seed=drawn, steps=config.steps // self.rounds)
            record = _ran(sampled, folder / f"samples-{number}", machine)
            _add(held_out, record, (number - 1) * sampled.steps)
            for name, values in record.steps.items():
                steps.setdefault(name, []).extend(values)
            pairs = folder / f"pairs-{number}.jsonl"
            if not pairs.exists():
                write_pairs(PairsConfig(str(folder / f"samples-{number}"), str(pairs)))
            fit = FitOptions(epochs=self.epochs, batch=self.batch, learning_rate=config.training.learning_rate)
            data = DataFile(str(pairs), held_out=0.0)
            target = folder / f"dpo-{number}"
            fitted = dpo(
                DpoConfig(data, model, loss=self.loss, fit=fit, device=config.device, seed=drawn), target, print
            )
            model, seconds = str(target), seconds + record.seconds + fitted.seconds
        after = _ran(replace(still, model=model, steps=1), folder / "after", machine)
        _add(held_out, after, config.steps)
        return Record(steps, held_out, seconds + after.seconds)


def _ran(config: RunConfig, folder: Path, machine: Machine) -> Record:
    train_one(config, folder, machine)
    return recorded(folder)


def _add(held_out: dict[str, list[float]], record: Record, step: int) -> None:
    """The evaluation before a run's first step, as one after so many sampling steps."""
    first = {name: values[0] for name, values in record.held_out.items()} | {"step": float(step)}
    for name, value in first.items():
        held_out.setdefault(name, []).append(value)
