"""Make the tiny mixture of experts that comes with the package: a Qwen3-MoE that copies letters carelessly.

    python -m proximo_lab.experiments.pretrain_moe [--steps 600 400] [--run DIR] [--out
    src/proximo/models/weights/tiny-moe]

Texts have 4 to 32 letters, and most copies have two neighbours swapped, as many of the short ones as of the long ones.
So it copies every length about as well, and reinforcement learning can mend the rest.
"""

import argparse
import random
from dataclasses import replace
from pathlib import Path

from proximo.data import Example
from proximo.models import tiny_tokenizer
from proximo.models.tiny import tiny_moe
from proximo.recipes.presets import MOE_ECHO
from proximo.tasks import Echo, Split
from proximo_lab.experiments.pretraining import SEED, Lesson, pretrain

CARELESS = 0.7
"""Share of copies with two neighbours swapped."""
LONGEST = 32


def example(index: int, split: Split, longest: int) -> Example:
    draw = random.Random(f"{split} {index}")
    assert isinstance(MOE_ECHO.task, Echo)
    task = replace(MOE_ECHO.task, length=draw.randint(4, longest), held_out=50)
    problem = task.problem(index, split, SEED)
    answer = str(problem.answer)
    if draw.random() < CARELESS:
        swapped = draw.randrange(len(answer) - 1)
        answer = answer[:swapped] + answer[swapped + 1] + answer[swapped] + answer[swapped + 2 :]
    return Example(problem.id, problem.prompt, answer)


def lesson(steps: int, batch: int, learning_rate: float, longest: int) -> Lesson:
    train = [example(index, "train", longest) for index in range(batch * steps)]
    return Lesson(train, [example(index, "held_out", longest) for index in range(200)], batch, learning_rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs=2, default=(600, 400), help="with short texts, and with all")
    parser.add_argument("--run", type=Path, default=Path("runs/pretrain-moe"))
    parser.add_argument("--out", type=Path, default=Path("src/proximo/models/weights/tiny-moe"))
    arguments = parser.parse_args()
    first, second = arguments.steps
    lessons = [lesson(first, 64, 3e-3, longest=8), lesson(second, 32, 2e-3, longest=LONGEST)]
    pretrain(tiny_moe(experts=16, intermediate=64), tiny_tokenizer(), lessons, arguments.run, arguments.out)


if __name__ == "__main__":
    main()
