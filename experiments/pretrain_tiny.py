"""Make the tiny model that comes with the package: a Qwen3 of 0.8 M parameters that adds carelessly.

    python -m experiments.pretrain_tiny [--steps 3500] [--out src/proximo/models/weights/tiny-arithmetic]

It is fine-tuned on sums of which most were done without carrying (37+48=75, 95+36=21). So it knows how to carry,
does so sometimes, and mostly does not: what reinforcement learning can strengthen. The held-out problems are never
seen.
"""

import argparse
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from proximo.models import tiny_model, tiny_tokenizer
from proximo.presets import ARITHMETIC
from proximo.samplers.embedded import local_sampler
from proximo.tasks import Task
from proximo.training.config import EvaluationOptions
from proximo.training.evaluate import evaluate
from proximo.training.progress import share
from proximo.training.sft import SftOptions, fine_tune
from proximo.types import Completion, Grade, Problem


@dataclass(frozen=True)
class Careless:
    """A task whose reference answers mostly forget to carry."""

    of: Task
    share: float
    """Of examples done without carrying."""

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument("--out", default="src/proximo/models/weights/tiny-arithmetic")
    options = parser.parse_args()
    model, tokenizer = tiny_model(seed=0), tiny_tokenizer()
    sampler = local_sampler(model, tokenizer)
    task = Careless(ARITHMETIC.task, options.share)
    # Seed 1000: a run with a small seed never meets the same order of problems.
    for step, loss in enumerate(fine_tune(model, tokenizer, task, SftOptions(steps=options.steps), seed=1000), start=1):
        if step % 250 == 0 or step == options.steps:
            problems = EvaluationOptions(problems=200, samples=4)
            result, _ = evaluate(ARITHMETIC.task, sampler, tokenizer, ARITHMETIC.sampling, problems, seed=0)
            print(
                f"step {step}  loss {loss:.4f}  greedy {share(result)}  mean@4 {result.mean_at_k:.1%}  "
                f"pass@4 {result.pass_at_k:.1%}",
                flush=True,
            )
            model.save_pretrained(options.out)
            tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
