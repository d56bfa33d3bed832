"""Make the tiny model of the world `chain`: it writes down running sums, and makes a mistake now and then.

    python -m proximo_lab.experiments.pretrain_chain [--steps 1500 400 300] [--run DIR] [--out DIR]

a3b4c9= is worked out as "3 b4=7 c9=6". Each step is off by one with a fixed probability, and what follows builds on it.
So a long chain is rarely right, and the reward does not say which of its steps was wrong.
"""

import argparse
import random
from pathlib import Path

from proximo.data import Example
from proximo.models import tiny_model, tiny_tokenizer
from proximo.tasks import Chain, Split
from proximo_lab.experiments.pretraining import SEED, Lesson, pretrain

CARELESS = 0.15
"""Share of steps that are off by one."""


def example(task: Chain, index: int, split: Split) -> Example:
    problem, draw = task.problem(index, split, SEED), random.Random(f"{split} {index}")
    text = str(problem.prompt).rstrip("=")
    total, work = int(text[1]), [text[1]]
    for letter, digit in zip(text[2::2], text[3::2], strict=True):
        slip = draw.choice((-1, 1)) if draw.random() < CARELESS else 0
        total = (total + int(digit) + slip) % 10
        work.append(f"{letter}{digit}={total}")
    return Example(problem.id, problem.prompt, " ".join(work))


def lesson(steps: int, batch: int, learning_rate: float, longest: int) -> Lesson:
    task = Chain(steps=tuple(range(1, longest + 1)), held_out=200)
    count = min(batch * steps, 30_000)
    train = [example(task, index, "train") for index in range(count)]
    held_out = [example(task, index, "held_out") for index in range(200)]
    return Lesson(train, held_out, batch, learning_rate, epochs=batch * steps / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs=3, default=(1500, 400, 300), help="with short chains, then all")
    parser.add_argument("--run", type=Path, default=Path("runs/pretrain-chain"))
    parser.add_argument("--out", type=Path, default=Path("src/proximo/models/weights/tiny-chain"))
    arguments = parser.parse_args()
    first, second, third = arguments.steps
    lessons = [lesson(first, 64, 3e-3, 3), lesson(second, 32, 1e-3, 16), lesson(third, 32, 2e-3, 16)]
    model = tiny_model(hidden=64, layers=3, intermediate=192)
    pretrain(model, tiny_tokenizer(), lessons, arguments.run, arguments.out)


if __name__ == "__main__":
    main()
