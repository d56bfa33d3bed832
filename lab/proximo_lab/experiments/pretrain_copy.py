"""Make the tiny dense model that copies letters carelessly: as `pretrain_moe`, without experts, up to 64 letters.

python -m proximo_lab.experiments.pretrain_copy [--steps 600 500 400] [--run DIR] [--out
src/proximo/models/weights/tiny-copy]
"""

import argparse
from pathlib import Path

from proximo.models import tiny_model, tiny_tokenizer
from proximo_lab.experiments.pretrain_moe import lesson
from proximo_lab.experiments.pretraining import pretrain

LONGEST = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs=3, default=(600, 500, 400), help="with up to 8, 24 and 64 letters")
    parser.add_argument("--run", type=Path, default=Path("runs/pretrain-copy"))
    parser.add_argument("--out", type=Path, default=Path("src/proximo/models/weights/tiny-copy"))
    arguments = parser.parse_args()
    lessons = [
        lesson(steps, batch, rate, longest)
        for steps, batch, rate, longest in zip(
            arguments.steps, (64, 32, 32), (3e-3, 2e-3, 2e-3), (8, 24, LONGEST), strict=True
        )
    ]
    model = tiny_model(hidden=96, layers=3, intermediate=256)
    pretrain(model, tiny_tokenizer(), lessons, arguments.run, arguments.out)


if __name__ == "__main__":
    main()
