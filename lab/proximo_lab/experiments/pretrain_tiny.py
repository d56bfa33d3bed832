"""Make the tiny model that comes with the package: a Qwen3 of 0.8 M parameters that adds carelessly.

    python -m proximo_lab.experiments.pretrain_tiny [--steps 3500] [--run DIR] [--out
    src/proximo/models/weights/tiny-arithmetic]

It is fine-tuned on sums of which most were done without carrying (37+48=75, 95+36=21). So it knows how to carry,
does so sometimes, and mostly does not: what reinforcement learning can strengthen. The held-out problems are never
seen.
"""

import argparse
import hashlib
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from proximo.config import toml
from proximo.data import Mistakes
from proximo.models import tiny_model, tiny_tokenizer
from proximo.recipes.presets import ARITHMETIC
from proximo.rl.config import EvaluationOptions
from proximo.rl.evaluate import evaluate
from proximo.runs.log import RunLog
from proximo.samplers.embedded import local_sampler
from proximo.supervised.encoding import Limit, encode
from proximo.supervised.fitting import FitOptions, fit
from proximo.supervised.sft import Supervised, reference_examples
from proximo.tasks import Task
from proximo.types import Completion, Grade, Problem


@dataclass(frozen=True)
class Careless:
    """A task whose reference answers mostly forget to carry."""

    of: Task
    share: float
    """Share of examples done without carrying."""

    while_sampling = True

    def size(self, split: Literal["train", "held_out"]) -> int | None:
        return self.of.size(split)

    def problem(self, index: int, split: Literal["train", "held_out"], seed: int) -> Problem:
        problem = self.of.problem(index, split, seed)
        toss = int.from_bytes(hashlib.blake2b(f"{seed} {index}".encode(), digest_size=4).digest(), "big") / 2**32
        answer = without_carrying(str(problem.prompt)) if toss < self.share else problem.answer
        return Problem(problem.id, problem.prompt, answer)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        return self.of.grade(problems, completions)

    def reference(self, problem: Problem) -> str:
        return str(problem.answer)


def without_carrying(prompt: str) -> str:
    """37+48= gives 75, 95+36= gives 21: each column by itself, its tens forgotten."""
    first, second = (number[::-1] for number in re.findall(r"\d+", prompt))
    width = max(len(first), len(second))
    columns = [int(a) + int(b) for a, b in zip(first.ljust(width, "0"), second.ljust(width, "0"), strict=True)]
    return str(int("".join(str(column % 10) for column in reversed(columns))))


class Watched(Supervised):
    """Fine-tuning that also looks at how often the model adds up right, which is not what it is taught."""

    def held_out(self) -> dict[str, float]:
        problems = EvaluationOptions(problems=200, samples=4)
        sampler = local_sampler(self.model, tiny_tokenizer())
        result, _ = evaluate(ARITHMETIC.task, sampler, tiny_tokenizer(), ARITHMETIC.sampling, problems, seed=0)
        assert result.mean_at_k is not None
        assert result.pass_at_k is not None
        return super().held_out() | {"greedy": result.accuracy, "mean@4": result.mean_at_k, "pass@4": result.pass_at_k}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument("--run", default="runs/pretrain-tiny")
    parser.add_argument("--out", default="src/proximo/models/weights/tiny-arithmetic")
    arguments = parser.parse_args()
    model, tokenizer, task = tiny_model(seed=0), tiny_tokenizer(), Careless(ARITHMETIC.task, arguments.share)
    options = FitOptions(batch=128, learning_rate=2e-3, warmup_steps=20, evaluate_every=250)
    mistakes = Mistakes()
    # Seed 1000: a run with a small seed never meets the same order of problems.
    train = encode(tokenizer, reference_examples(task, "train", 128 * arguments.steps, 1000), Limit(64), mistakes)
    held_out = encode(tokenizer, reference_examples(task, "held_out", None, 1000), Limit(64), mistakes)
    mistakes.refuse("problems that cannot be encoded:")
    log = RunLog(Path(arguments.run))
    log.start(toml.dumps(options))
    stage = Watched(model, train, held_out, token_budget=options.token_budget)
    fitted = fit(stage, options, tokenizer=tokenizer, log=log, seed=1000, say=partial(print, flush=True))
    shutil.copytree(fitted.checkpoint, arguments.out, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
