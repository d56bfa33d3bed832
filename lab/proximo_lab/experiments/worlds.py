"""Test whether the five algorithms learn to use an environment's answers and a tool, with 95 % intervals over seeds.

    python -m proximo_lab.experiments.worlds [--processes 1] [--seeds 0 1 2] [--algorithms ppo …] [--worlds guessing …]
        [--steps 60] [--out runs/worlds]

Chance is measured, not assumed: `grpo, unanswered` is trained in the same world, except that wrong guesses get no hint
and a call of a tool ends the episode, so that it can only ignore its tool. The same command does the runs that
are missing, and needs nothing of the command line's packages.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from proximo import presets
from proximo.algorithms import DAPO, GRPO, GSPO, PPO, SAPO
from proximo.environments.kinds import MultiTurn
from proximo.losses.intervals import half_width
from proximo.rl.config import RunConfig
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.records import Evaluation

ALGORITHMS = {"ppo": PPO, "grpo": GRPO, "dapo": DAPO, "gspo": GSPO, "sapo": SAPO}
WORLDS = {
    "guessing": presets.GUESSING,
    "calculator": presets.CALCULATOR,
    "words": presets.WORDS,
    "python": presets.PYTHON,
}
VALUE = presets.PPO_ARITHMETIC.value
UNANSWERED = "grpo, unanswered"
"""The contender that is told nothing."""


class Trial(NamedTuple):
    """One run."""

    world: str
    contender: str
    seed: int
    steps: int
    folder: Path

    @property
    def config(self) -> RunConfig:
        name = self.contender.partition(",")[0]
        config = presets.with_algorithm(WORLDS[self.world], ALGORITHMS[name])
        config = replace(config, value=VALUE if name == "ppo" else None, steps=self.steps, seed=self.seed, device="cpu")
        return replace(config, environment=_silent(config.environment)) if self.contender == UNANSWERED else config


def _silent(environment: object) -> MultiTurn:
    """The same world without an answer that helps."""
    assert isinstance(environment, MultiTurn)
    if environment.path:
        return replace(environment, arguments={"hints": False})
    return replace(environment, max_turns=1)


def trained(trial: Trial) -> dict[str, float]:
    """Held-out scores before and after training; those of a run that has ended are read."""
    stored = trial.folder / "scores.json"
    if not stored.exists():
        result = train(Run(trial.config, trial.folder, ProgressLines()))
        scores = {"before": _score(result.before), "after": _score(result.after), "seconds": result.seconds}
        stored.write_text(json.dumps(scores))
    return json.loads(stored.read_text())


def _score(evaluation: Evaluation) -> float:
    assert evaluation.mean_at_k is not None
    return evaluation.mean_at_k


def table(trials: Sequence[Trial], scores: Sequence[dict[str, float]]) -> Iterator[str]:
    """One row for each world and contender, as Markdown."""
    yield "| world | contender | untrained | trained, 95 % | above unanswered, 95 % | each seed | seconds |"
    yield "|---|---|---|---|---|---|---|"
    by_trial = {(each.world, each.contender, each.seed): score for each, score in zip(trials, scores, strict=True)}
    for world, contender in dict.fromkeys((each.world, each.contender) for each in trials):
        seeds = [each.seed for each in trials if (each.world, each.contender) == (world, contender)]
        rows = [by_trial[world, contender, seed] for seed in seeds]
        after = [row["after"] for row in rows]
        above = [score - by_trial[world, UNANSWERED, seed]["after"] for seed, score in zip(seeds, after, strict=True)]
        yield (
            f"| {world} | {contender} | {statistics.mean(row['before'] for row in rows):.1%} | {_interval(after)} "
            f"| {'' if contender == UNANSWERED else _interval(above)} | {', '.join(f'{each:.1%}' for each in after)} "
            f"| {statistics.mean(row['seconds'] for row in rows):.0f} |"
        )


def _interval(values: Sequence[float]) -> str:
    half = half_width(list(values))
    return f"{statistics.mean(values):.1%}" + ("" if math.isnan(half) else f" ± {half:.1%}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time; each has its share of the cores")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/worlds"))
    options = parser.parse_args(arguments)
    trials = [
        Trial(world, contender, seed, options.steps, options.out / f"{world}-{contender.replace(', ', '-')}-{seed}")
        for seed in options.seeds
        for world in options.worlds
        for contender in (*options.algorithms, UNANSWERED)
    ]
    threads = max(1, len(os.sched_getaffinity(0)) // options.processes)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, context, torch.set_num_threads, (threads,)) as pool:
        scores = list(pool.map(trained, trials))
    print("\n".join(table(trials, scores)))


if __name__ == "__main__":
    main()
