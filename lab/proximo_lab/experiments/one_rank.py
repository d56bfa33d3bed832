"""Whole steps of a run with one rank (FSDP2) and with none, and the gap between sampler and learner, on one GPU.

    python -m proximo_lab.experiments.one_rank [--shape Qwen3-0.6B] [--steps 6] [--device cuda] [--out runs/one-rank]
        [--gaps Qwen3-0.6B Llama-1B]

Each run is a process of its own, without and with a rank in turns; weights are random. The first two steps of a run
compile and capture, and are not counted. `--gaps`: further shapes whose first step is run in bfloat16 and in float32.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import torch

import proximo
from proximo.learner.ranks import Ranks
from proximo.models import Precision
from proximo.planning.published_shapes import Shape, shape_of
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.samplers.sampler import SamplingOptions

UNCOUNTED = 2
"""Steps at a run's start that compile and capture."""


def model_of(shape: Shape, dtype: str, folder: Path) -> Path:
    """A folder with random weights and the tokenizer."""
    target = folder / f"{shape.name}-{dtype}"
    if not target.exists():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        shape.model(attention="sdpa", dtype=getattr(torch, dtype), device=device).save_pretrained(target)
        shape.tokenizer(ends=True).save_pretrained(target)
    return target


def length_reward(completion: str) -> float:
    """A reward that differs between siblings."""
    return len(completion) % 7 / 7


def run(
    shape: Shape, dtype: Precision, device: str, folder: Path, size: tuple[int, int, int], steps: int, rank: bool
) -> None:
    """Train in this process."""
    groups, siblings, tokens = size
    draws = random.Random(0)
    prompts = [" ".join(f"t{draws.randrange(1, shape.vocabulary)}" for _ in range(tokens)) for _ in range(4 * groups)]
    config = RunConfig(
        model=str(model_of(shape, dtype, folder.parent)),
        device=device,
        dtype=dtype,
        sampling=SamplingOptions(max_tokens=tokens),
        training=TrainingOptions(groups=groups, group_size=siblings, minibatches=min(4, groups), learning_rate=1e-6),
        evaluation=EvaluationOptions(problems=2, every=1000),
        steps=steps,
        ranks=Ranks(1) if rank else None,
    )
    data = [{"prompt": prompt, "answer": "1"} for prompt in prompts]
    proximo.train(config, folder, data=data[2:], evaluation_data=data[:2], rewards=length_reward, quiet=True)


def measured(arguments: argparse.Namespace, shape: str, dtype: str, steps: int, name: str, rank: bool) -> Path:
    """The folder of a run in a process of its own."""
    folder = arguments.out / name
    command = [
        sys.executable,
        "-m",
        "proximo_lab.experiments.one_rank",
        "--inside",
        name,
        "--shape",
        shape,
        "--dtype",
        dtype,
    ]
    command += ["--steps", str(steps), "--device", arguments.device, "--out", str(arguments.out)]
    command += ["--size", *map(str, arguments.size)]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541"}
    done = subprocess.run(
        command + ["--rank"] * rank, env=os.environ | (alone if rank else {}), capture_output=True, text=True
    )
    if done.returncode:
        print(f"{name}: {done.stderr[-1500:]}", flush=True)
    return folder


def rows(folder: Path, file: str) -> list[dict[str, float]]:
    path = folder / file
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def seconds(folder: Path) -> list[float]:
    """Seconds of each counted step, all its phases together."""
    timings = [row for row in rows(folder, "timings.jsonl") if "update" in row]
    return [sum(value for name, value in row.items() if name not in ("step", "tokens")) for row in timings][UNCOUNTED:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen3-0.6B")
    parser.add_argument("--gaps", nargs="*", default=[])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--size", type=int, nargs=3, default=(16, 16, 512), metavar=("GROUPS", "SIBLINGS", "TOKENS"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/one-rank"))
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        shape, folder = shape_of(arguments.shape), arguments.out / arguments.inside
        run(shape, arguments.dtype, arguments.device, folder, arguments.size, arguments.steps, arguments.rank)
        return
    for turn in range(arguments.turns):
        for rank in (False, True):
            name = f"{'rank' if rank else 'none'}-{turn}"
            folder = measured(arguments, arguments.shape, arguments.dtype, arguments.steps, name, rank)
            metrics = rows(folder, "metrics.jsonl")
            taken, norms = seconds(folder), [row["gradient_norm"] for row in metrics if "gradient_norm" in row]
            middle = statistics.median(taken) if taken else float("nan")
            print(f"{name}: {middle:.3f} s a step, all {[round(each, 3) for each in taken]}, norms {norms}", flush=True)
            print("   phases", rows(folder, "timings.jsonl")[-1:], flush=True)
    for shape in arguments.gaps:
        for dtype in ("bfloat16", "float32"):
            folder = measured(arguments, shape, dtype, 1, f"gap-{shape}-{dtype}", rank=False)
            print(
                shape,
                dtype,
                [row["sampler_gap"] for row in rows(folder, "metrics.jsonl") if "sampler_gap" in row],
                flush=True,
            )


if __name__ == "__main__":
    main()
