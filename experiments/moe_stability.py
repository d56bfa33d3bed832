"""A small mixture of experts under off-policy updates: what moves its routes, and what each remedy repairs.

    python -m experiments.moe_stability [--seeds 0 1 2] [--steps 60] [--workers 2] [--out runs/moe]
    python -m experiments.moe_stability --out runs/moe --charts docs/studies/moe     (a table and charts of them)

Warm-starts one model, trains it under every arm and seed, and measures each step the same way for all: the step's
own completions under the weights before and after its updates. docs/studies/moe.md has the results.
"""

import argparse
import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import torch

from experiments.charts import line_chart
from proximo import toml
from proximo.algorithms import GRPO, GSPO, SAPO, Algorithm
from proximo.data import Mistakes
from proximo.insight.steps import read_step
from proximo.models import load_model, score
from proximo.models.shipped import resolve
from proximo.models.tiny import tiny_moe, tiny_tokenizer
from proximo.samplers import SamplingOptions
from proximo.samplers.mismatch import Mismatch
from proximo.tasks import Echo, Split, Task
from proximo.training.collect import Frontier
from proximo.training.config import EvaluationOptions, Replay, RunConfig, TrainingOptions
from proximo.training.encoding import encode
from proximo.training.fitting import FitOptions, fit
from proximo.training.learner import frozen_copy
from proximo.training.progress import Lines
from proximo.training.run import Run
from proximo.training.runlog import ROLLOUTS, RunLog
from proximo.training.sft import Supervised, reference_examples
from proximo.training.stepping import train_step
from proximo.types import Batch, Completion, Grade, Problem

TASK = Echo(length=8, alphabet="abcdefghijklmnop", held_out=200)
NEAR = Mismatch(precision="bfloat16", router_noise=0.02)
"""The injected difference between sampler and learner: rounded weights, and routers that are not quite the same."""
COLLAPSED = 0.8
"""A run has collapsed when its last ten steps earn less than this share of its best ten in a row."""


@dataclass(frozen=True)
class Arm:
    algorithm: Algorithm
    replay: Replay | None = None
    mismatch: Mismatch | None = None


PLAIN = replace(GRPO, kl=None)
"""Nothing but its clip holds it."""
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
}


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
            place = toss % (len(answer) - 1)
            answer = answer[:place] + answer[place + 1] + answer[place] + answer[place + 2 :]
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
    train = encode(tokenizer, reference_examples(Careless(TASK), "train", 128 * steps, 1000), 64, mistakes)
    held_out = encode(tokenizer, reference_examples(Careless(TASK), "held_out", None, 1000), 64, mistakes)
    mistakes.refuse("problems that cannot be encoded:")
    log = RunLog(folder)
    log.start(toml.dumps(options))
    stage = Supervised(model, train, held_out, token_budget=options.token_budget)
    fit(stage, options, tokenizer=tokenizer, log=log, seed=1000, say=partial(print, flush=True))


# One run


class Quiet(Lines):
    def _say(self, line: str) -> None:
        """Twenty runs at once would be read by nobody."""


class Watched(RunLog):
    """A log that keeps the step's batch and the norms of its updates, to be measured afterwards."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.batch: Batch | None = None
        self.norms: list[float] = []
        self.row: dict[str, float] = {}

    def rollouts(self, step: int, table: pa.Table) -> None:
        super().rollouts(step, table)
        stored = read_step(self.folder / ROLLOUTS / f"step-{step:06d}.parquet", step)
        trained = (stored.updates >= 0).any(dim=0).nonzero().squeeze(1)
        self.batch, self.norms = stored.batch.rows(trained), [each["gradient_norm"] for each in stored.facts["updates"]]

    def metrics(self, step: int, values) -> None:
        super().metrics(step, values)
        self.row = dict(values)


def one_run(name: str, seed: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    folder = options.out / f"{name.replace(' ', '').replace(',', '-')}-{seed}"
    if (folder / "study.jsonl").exists():
        return
    arm = ARMS[name]
    config = RunConfig(
        algorithm=arm.algorithm,
        task=TASK,
        model=str(options.out / "warm"),
        device=options.device,
        sampling=SamplingOptions(max_tokens=12),
        training=TrainingOptions(
            groups=32, group_size=8, minibatches=options.minibatches, learning_rate=options.learning_rate
        ),
        evaluation=EvaluationOptions(problems=200, samples=4),
        replay=arm.replay,
        mismatch=arm.mismatch,
        steps=options.steps,
        seed=seed,
    )
    run = Run(config, folder, Quiet())
    run.log = log = Watched(folder)
    log.start(toml.dumps(config))
    rows, frontier = [], Frontier()
    for step in range(config.steps):
        before = frozen_copy(run.model)
        frontier = train_step(run, step, frontier).frontier
        rows.append({"step": step, "norms": log.norms} | log.row | moved(before, run.model, log.batch))
    evaluation, _ = run.evaluate()
    rows.append({"step": config.steps, **evaluation.floats()})
    (folder / "study.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{name}, seed {seed}: mean@4 {evaluation.mean_at_k:.1%}", flush=True)


@torch.no_grad()
def moved(before, after, batch: Batch | None) -> dict[str, float]:
    """What a step's updates did to its own completions: routes, token ratios, sequence ratios."""
    if batch is None or not len(batch):
        return {}
    rows = {"prompts": batch.prompts, "tokens": batch.tokens, "lengths": batch.lengths, "group": batch.group}
    old, new = (score(model, **rows, record=True) for model in (before, after))
    assert old.routes is not None
    assert new.routes is not None
    consumed = (old.routes.rows >= 0).all(dim=-1).all(dim=-1)
    same = (old.routes.rows.sort(dim=-1).values == new.routes.rows.sort(dim=-1).values).all(dim=-1)
    replayed = score(after, **rows, routes=old.routes).logprobs
    log_ratio = (new.logprobs - old.logprobs).double() * batch.mask
    tokens = log_ratio[batch.mask]
    sequences = log_ratio.sum(dim=1) / batch.lengths
    return {
        "changed": float((~same.all(dim=-1))[consumed].double().mean()),
        "token_spread": float(tokens.std()),
        "token_spread_replayed": float((replayed - old.logprobs).double()[batch.mask].std()),
        "sequence_spread": float(sequences.std()),
        "token_beyond": float(((tokens.exp() - 1).abs() > 0.2).double().mean()),
    }


# All of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--minibatches", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--warm-steps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/moe"))
    parser.add_argument("--charts", type=Path, help="draw NAME-outcome.svg and so on from the results, and run nothing")
    options = parser.parse_args()
    if options.charts is None:
        if not (options.out / "warm" / "checkpoints").is_dir():
            warm_start(options.out / "warm", options.warm_steps, options.device)
        load_model(resolve(str(options.out / "warm")))
        with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
            jobs = [pool.submit(one_run, name, seed, options) for seed in options.seeds for name in options.arms]
            for job in jobs:
                job.result()
    results = {name: [read(name, seed, options.out) for seed in options.seeds] for name in options.arms}
    print(table(results))
    if options.charts is not None:
        charts(results, options.charts.parent, options.charts.name)


def read(name: str, seed: int, out: Path) -> list[dict]:
    path = out / f"{name.replace(' ', '').replace(',', '-')}-{seed}" / "study.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(results: dict[str, list[list[dict]]]) -> str:
    head = (
        "arm", "held-out, mean@4", "outcome, last 10", "collapsed", "routes changed", "token log-ratio std",
        "the same with the old routes", "sequence log-ratio std", "blocked", "gate", "gradient norm, mean ± std",
        "entropy, last 10",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, runs in results.items():
        steps = [run[:-1] for run in runs]
        norms = [[norm for row in run for norm in row["norms"]] for run in steps]
        cells = (
            name,
            " / ".join(f"{run[-1]['held_out/mean_at_k']:.1%}" for run in runs),
            f"{mean(last(run, 'outcome') for run in steps):.3f}",
            f"{sum(map(collapsed, steps))} of {len(steps)}",
            f"{mean(average(run, 'changed') for run in steps):.1%}",
            f"{mean(average(run, 'token_spread') for run in steps):.4f}",
            f"{mean(average(run, 'token_spread_replayed') for run in steps):.4f}",
            f"{mean(average(run, 'sequence_spread') for run in steps):.4f}",
            f"{mean(average(run, 'blocked') for run in steps):.1%}",
            f"{mean(average(run, 'gate') for run in steps):.3f}",
            f"{mean(map(statistics.mean, norms)):.2f} ± {mean(map(statistics.stdev, norms)):.2f}",
            f"{mean(last(run, 'entropy') for run in steps):.3f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mean(values) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.mean(known) if known else math.nan


def average(run: list[dict], key: str) -> float:
    return mean(row[key] for row in run if row.get(key) is not None)


def last(run: list[dict], key: str) -> float:
    return average(run[-10:], key)


def collapsed(run: list[dict]) -> bool:
    outcomes = [row["outcome"] for row in run]
    best = max(statistics.mean(outcomes[start : start + 10]) for start in range(max(1, len(outcomes) - 9)))
    return statistics.mean(outcomes[-10:]) < COLLAPSED * best


def charts(results: dict[str, list[list[dict]]], folder: Path, stem: str) -> None:
    for key, title in (
        ("outcome", "Outcome of the step's rollouts"),
        ("changed", "Share of tokens whose experts changed in a step"),
        ("token_spread", "Spread of token log-ratios over a step"),
        ("entropy", "Entropy"),
    ):
        lines = {
            name: [average([run[step] for run in runs], key) for step in range(len(runs[0]) - 1)]
            for name, runs in results.items()
        }
        line_chart(folder / f"{stem}-{key}.svg", title, lines)


if __name__ == "__main__":
    main()
