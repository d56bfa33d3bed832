"""A small mixture of experts under off-policy updates: what moves its routes, and what each remedy repairs.

    python -m proximo_lab.experiments.moe_stability --learning-rate 1e-3 --seeds 0 1 2 3 4 5 6 7 --workers 16 --out
    runs/moe-1e-3

Warm-starts one model, trains it under every arm and seed, each in a process of its own, and measures each step the same
way for all: the step's own completions under the weights before it, after its first update and after all of them.
Finished runs are kept: the same command goes on with those that are missing (`--minutes` says when to start no more).
Table, JSON, CSV and charts go to the folder OUT of the environment, or to --out. docs/studies/moe.md has the results.
"""

import argparse
import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from proximo.algorithms import GRPO, GSPO, SAPO, Algorithm
from proximo.config import toml
from proximo.data import Mistakes
from proximo.learner.options import RoutingReplay
from proximo.losses import Clip
from proximo.models import frozen_copy
from proximo.models.tiny import tiny_moe, tiny_tokenizer
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.run import Run
from proximo.rl.train import train_step
from proximo.runs.log import RunLog
from proximo.runs.records import DataCursor
from proximo.samplers.embedded import Embedded
from proximo.samplers.mismatched import Mismatched
from proximo.samplers.sampler import SamplingOptions
from proximo.supervised.encoding import Limit, encode
from proximo.supervised.fitting import FitOptions, fit
from proximo.supervised.sft import Supervised, reference_examples
from proximo.tasks import Echo, Split, Task
from proximo.types import Completion, Grade, Problem
from proximo_lab.experiments.moe_measures import AfterFirst, Quiet, Watched, moved
from proximo_lab.experiments.moe_report import Record, table, write

STUDY = "study.jsonl"
TASK = Echo(length=8, alphabet="abcdefghijklmnop", held_out=200)
NEAR = Mismatched(precision="bfloat16", router_noise=0.02)
"""The injected difference between sampler and learner: rounded weights, and routers that are not quite the same."""


@dataclass(frozen=True)
class Arm:
    algorithm: Algorithm
    replay: RoutingReplay | None = None
    sampler: Embedded | Mismatched = field(default_factory=Embedded)
    pace: float = 1.0
    """Learning rate, as a multiple of the others'."""


PLAIN = replace(GRPO, kl=None)
"""GRPO that nothing but its clip holds."""
ARMS = {
    "GRPO": Arm(PLAIN),
    "GRPO + R2": Arm(PLAIN, "old_policy"),
    "GSPO": Arm(GSPO),
    "GSPO + R2": Arm(GSPO, "old_policy"),
    "SAPO": Arm(SAPO),
    "SAPO + R2": Arm(SAPO, "old_policy"),
    "GRPO, mismatch": Arm(PLAIN, None, NEAR),
    "GRPO + R2, mismatch": Arm(PLAIN, "old_policy", NEAR),
    "GRPO + R3, mismatch": Arm(PLAIN, "sampler", NEAR),
    "GRPO, clip 3e-3": Arm(replace(PLAIN, gate=Clip(3e-3, 4e-3))),
    "GRPO, clip 3e-4": Arm(replace(PLAIN, gate=Clip(3e-4, 4e-4))),
    "GRPO, rate / 3": Arm(PLAIN, pace=1 / 3),
}
"""The last three control for the size of a step: GSPO's band stops so many tokens that it may only move less."""


@dataclass(frozen=True)
class Careless:
    """Copies of which most have two neighbours swapped: what reinforcement learning can mend."""

    of: Task
    share: float = 0.7

    while_sampling = True

    def size(self, split: Split) -> int | None:
        return self.of.size(split)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        problem = self.of.problem(index, split, seed)
        toss = int.from_bytes(hashlib.blake2b(f"{seed} {index}".encode(), digest_size=4).digest(), "big")
        answer = str(problem.answer)
        if toss / 2**32 < self.share:
            index_swapped = toss % (len(answer) - 1)
            answer = (
                answer[:index_swapped] + answer[index_swapped + 1] + answer[index_swapped] + answer[index_swapped + 2 :]
            )
        return replace(problem, answer=answer)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        return self.of.grade(problems, completions)

    def reference(self, problem: Problem) -> str:
        return str(problem.answer)


def warm_start(folder: Path, steps: int, device: str) -> None:
    """One mixture of experts for all arms, which copies carelessly."""
    model, tokenizer, mistakes = tiny_moe(seed=0), tiny_tokenizer(), Mistakes()
    model.to(device=device)  # pyright: ignore[reportCallIssue]
    options = FitOptions(batch=128, learning_rate=3e-3, warmup_steps=20, evaluate_every=200)
    train = encode(tokenizer, reference_examples(Careless(TASK), "train", 128 * steps, 1000), Limit(64), mistakes)
    held_out = encode(tokenizer, reference_examples(Careless(TASK), "held_out", None, 1000), Limit(64), mistakes)
    mistakes.refuse("problems that cannot be encoded:")
    log = RunLog(folder)
    log.start(toml.dumps(options))
    stage = Supervised(model, train, held_out, token_budget=options.token_budget)
    fit(stage, options, tokenizer=tokenizer, log=log, seed=1000, say=partial(print, flush=True))


# One run


def one_run(name: str, seed: int, options: argparse.Namespace, deadline: float) -> None:
    folder = folder_of(name, seed, options.out)
    if (folder / STUDY).exists() or time.time() > deadline:
        return
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off: it starts anew
    torch.set_num_threads(1)
    started, arm = time.time(), ARMS[name]
    config = RunConfig(
        algorithm=arm.algorithm,
        task=TASK,
        model=str(options.out / "warm"),
        device=options.device,
        sampling=SamplingOptions(max_tokens=12),
        training=TrainingOptions(
            groups=32, group_size=8, minibatches=options.minibatches, learning_rate=arm.pace * options.learning_rate
        ),
        evaluation=EvaluationOptions(problems=200, samples=4),
        routing_replay=arm.replay,
        sampler=arm.sampler,
        steps=options.steps,
        seed=seed,
    )
    run = Run(config, folder, Quiet())
    run.log = log = Watched(folder)
    log.start(toml.dumps(config))
    first, cursor = AfterFirst(run.learner), DataCursor()
    rows = [{"step": 0, **run.evaluate()[0].floats()}]
    for index in range(config.steps):
        before = frozen_copy(run.model)
        cursor = train_step(run, index, cursor).cursor
        rows.append(
            {"step": index + 1, "norms": log.norms} | log.row | moved(before, first.model, run.model, log.batch)
        )
    evaluation, _ = run.evaluate()
    rows.append({"step": config.steps, **evaluation.floats()})
    (folder / STUDY).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{name}, seed {seed}: mean@4 {evaluation.mean_at_k:.1%}, {time.time() - started:.0f} s", flush=True)


def folder_of(name: str, seed: int, out: Path) -> Path:
    plain = name.replace(" ", "").replace(",", "-").replace("/", "over")
    return out / f"{plain}-{seed}"


# All of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--minibatches", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warm-steps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run after so many minutes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/moe"), help="where the runs are kept")
    parser.add_argument("--name", default="moe", help="what the result files' names begin with")
    options = parser.parse_args()
    deadline = time.time() + 60 * options.minutes
    if not (options.out / "warm" / "checkpoints").is_dir():
        torch.set_num_threads(max(1, min(options.workers, 4)))
        warm_start(options.out / "warm", options.warm_steps, options.device)
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        wanted = [(name, seed) for seed in options.seeds for name in options.arms]
        for job in [pool.submit(one_run, name, seed, options, deadline) for name, seed in wanted]:
            job.result()
    paths = {
        (name, seed): folder_of(name, seed, options.out) / STUDY for name in options.arms for seed in options.seeds
    }
    records = [Record.read(path, name, seed) for (name, seed), path in paths.items() if path.exists()]
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    write(records, Path(os.environ.get("OUT") or options.out), options.name, settings)
    print(table(records))
    print(f"{len(records)} of {len(wanted)} runs are done")


if __name__ == "__main__":
    main()
