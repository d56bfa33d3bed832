"""Make the tiny model of the world `length`: it answers sums after a random number of filler words.

    python -m proximo_lab.experiments.pretrain_length [--steps 1600 400] [--run DIR] [--out
    src/proximo/models/weights/tiny-length]

37+48= is answered "so then hmm well so 37+48=85". The number of words is log-uniform from 4 to 128, and in a fifth of
the examples they fall into a loop of one to three words. Most sums are done without carrying, as by tiny-arithmetic.
Length, loops and mistakes are drawn independently: what connects them later is due to training.
"""

import argparse
import random
from pathlib import Path

from proximo.data import Example
from proximo.models import tiny_model, tiny_tokenizer
from proximo.recipes.presets import LENGTH
from proximo.tasks import Split
from proximo_lab.experiments.pretrain_tiny import without_carrying
from proximo_lab.experiments.pretraining import SEED, Lesson, pretrain

WORDS = ("so ", "then ", "well ", "hmm ", "now ", "and ", "but ", "look ", "next ", "again ", "right ", "wait ")
"""Words from the most to the least frequent: the share of each is proportional to one over its rank."""
SHORTEST, LONGEST = 4, 128
CARELESS = 0.8
"""Share of sums done without carrying."""
LOOPING = 0.2
"""Share of fillers that fall into a loop."""


def filler(draw: random.Random, count: int) -> str:
    weights = [1 / rank for rank in range(1, len(WORDS) + 1)]
    words = draw.choices(WORDS, weights, k=count)
    if draw.random() < LOOPING and count > 1:
        start, period = draw.randrange(count // 2 + 1), draw.randint(1, 3)
        words = words[:start] + [words[start + number % period] for number in range(count - start)]
    return "".join(words)


def example(index: int, split: Split, longest: int) -> Example:
    """A problem with a completion; after little filler sums are learned sooner."""
    problem, draw = LENGTH.task.problem(index, split, SEED), random.Random(f"{split} {index}")
    careless = draw.random() < CARELESS
    answer = without_carrying(str(problem.prompt)) if careless else problem.answer
    is_short = longest < SHORTEST
    count = draw.randint(0, longest) if is_short else round(SHORTEST * (longest / SHORTEST) ** draw.random())
    return Example(problem.id, problem.prompt, f"{filler(draw, count)}{problem.prompt}{answer}")


def lesson(steps: int, batch: int, learning_rate: float, longest: int) -> Lesson:
    train = [example(index, "train", longest) for index in range(batch * steps)]
    return Lesson(train, [example(index, "held_out", longest) for index in range(200)], batch, learning_rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs=2, default=(1600, 400), help="with little filler, and with all")
    parser.add_argument("--run", type=Path, default=Path("runs/pretrain-length"))
    parser.add_argument("--out", type=Path, default=Path("src/proximo/models/weights/tiny-length"))
    arguments = parser.parse_args()
    first, second = arguments.steps
    lessons = [lesson(first, 64, 3e-3, longest=3), lesson(second, 32, 1e-3, longest=LONGEST)]
    model = tiny_model(hidden=96, layers=3, intermediate=256, words=len(WORDS))
    pretrain(model, tiny_tokenizer(WORDS), lessons, arguments.run, arguments.out)


if __name__ == "__main__":
    main()
