"""Whether the five algorithms learn to use an environment's answers and a tool, from three seeds each.

    python -m experiments.worlds [--steps 40] [--seeds 3] [--out runs/worlds]

A policy that ignores what it is told can guess three of nine numbers, and knows almost no product: what it scores is
measured too, as the trained model without a second turn for products, and is 1/3 for numbers.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from proximo import presets
from proximo.algorithms import DAPO, GRPO, GSPO, PPO, SAPO
from proximo.environments import SingleTurn
from proximo.training.config import RunConfig
from proximo.training.records import Evaluation
from proximo.training.rl.progress import Lines
from proximo.training.rl.run import Run
from proximo.training.rl.train import train

FIVE = {"ppo": PPO, "grpo": GRPO, "dapo": DAPO, "gspo": GSPO, "sapo": SAPO}
WORLDS = {"guessing": presets.GUESSING, "calculator": presets.CALCULATOR}
VALUE = presets.PPO_ARITHMETIC.value


def config_of(world: str, name: str, steps: int, seed: int) -> RunConfig:
    config = presets.with_algorithm(WORLDS[world], FIVE[name])
    return replace(config, value=VALUE if name == "ppo" else None, steps=steps, seed=seed)


def shown(found: Evaluation) -> dict[str, float | None]:
    return {"mean@4": found.mean_at_k, "half_width": found.mean_half_width, "greedy": found.accuracy}


def blind(config: RunConfig, checkpoint: str) -> dict[str, float | None]:
    """The trained model where no tool answers: its first reply is all there is."""
    run = Run(replace(config, model=checkpoint, environment=SingleTurn()), Path(checkpoint).parent, Lines())
    return shown(run.evaluate()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", default="runs/worlds")
    arguments = parser.parse_args()
    for seed in range(arguments.seeds):
        for world in WORLDS:
            for name in FIVE:
                folder = Path(arguments.out) / f"{world}-{name}-{seed}"
                config = config_of(world, name, arguments.steps, seed)
                result = train(Run(config, folder, Lines()))
                row = {"world": world, "algorithm": name, "seed": seed}
                row |= {"before": shown(result.before), "after": shown(result.after), "seconds": result.seconds}
                if world == "calculator":
                    row["without_tool"] = blind(config, str(result.checkpoint))
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
