"""Held-out accuracy before and after the demo run, for each algorithm and seed, and with random rewards.

    python -m proximo_lab.experiments.demo_gains [--steps N] [--seeds 0 1 2] [--out runs/gains]

Prints a Markdown table; docs/log.md has its results. About an hour on two cores.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from proximo.algorithms import explain
from proximo.recipes.presets import ARITHMETIC
from proximo.rl.progress import ProgressLines
from proximo.rl.rollouts import Synchronous
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.samplers.rng import uniforms
from proximo.tasks import Task
from proximo.types import Completion, Grade, Problem

FIVE = ("ppo", "grpo", "dapo", "gspo", "sapo")


@dataclass(frozen=True)
class RandomRewards:
    """The control: training problems are graded by coin tosses, held-out ones truly."""

    of: Task

    while_sampling = False  # a coin is tossed by its place among all that are graded together

    def size(self, split: Literal["train", "held_out"]) -> int | None:
        return self.of.size(split)

    def problem(self, index: int, split: Literal["train", "held_out"], seed: int) -> Problem:
        problem = self.of.problem(index, split, seed)
        return replace(problem, data={**problem.data, "split": split, "index": index})

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        true = self.of.grade(problems, completions)
        return [
            grade if problem.data["split"] == "held_out" else Grade(float(_toss(problem, completion, number)))
            for number, (problem, completion, grade) in enumerate(zip(problems, completions, true, strict=True))
        ]

    def reference(self, problem: Problem) -> str | None:
        return self.of.reference(problem)


def _toss(problem: Problem, completion: Completion, number: int) -> bool:
    counter = torch.tensor([hash((problem.data["index"], completion.tokens, number)) % 2**31])
    return bool(uniforms(0, 0, counter, counter, counter)[0] < 0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=ARITHMETIC.steps)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", default=[*FIVE, "random"])
    parser.add_argument("--out", type=Path, default=Path("runs/gains"))
    options = parser.parse_args()
    print("| algorithm | seeds | before | after | gain, points (each seed) | clip low / high | gate | seconds |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in options.algorithms:
        results = [_result(name, seed, options.steps, options.out) for seed in options.seeds]
        gains = [100 * (result["after"] - result["before"]) for result in results]
        print(
            f"| {name} | {len(results)} | {_mean(results, 'before'):.1%} | {_mean(results, 'after'):.1%} "
            f"| {statistics.mean(gains):+.1f} ({', '.join(f'{gain:+.1f}' for gain in gains)}) "
            f"| {_mean(results, 'clip_low'):.2%} / {_mean(results, 'clip_high'):.2%} | {_mean(results, 'gate'):.4f} "
            f"| {_mean(results, 'seconds'):.0f} |",
            flush=True,
        )


def _result(name: str, seed: int, steps: int, out: Path) -> dict[str, float]:
    card = explain.card("grpo" if name == "random" else name)
    assert card is not None
    config = replace(ARITHMETIC, algorithm=card.value, seed=seed, steps=steps)
    folder = out / f"{name}-{seed}"
    run = Run(config, folder, ProgressLines())
    if name == "random":
        run.rollouts = Synchronous(replace(run.collector, task=RandomRewards(config.task)))
    outcome = train(run)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "gate" in row]
    shares = {key: statistics.mean(row[key] for row in updates) for key in ("clip_low", "clip_high", "gate")}
    return shares | {"before": outcome.before.accuracy, "after": outcome.after.accuracy, "seconds": outcome.seconds}


def _mean(results: list[dict[str, float]], key: str) -> float:
    return statistics.mean(result[key] for result in results)


if __name__ == "__main__":
    main()
