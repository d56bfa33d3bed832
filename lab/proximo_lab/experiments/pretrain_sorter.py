"""Make the two tiny models of the open-ended world: one that sorts letters carelessly, and one that judges its answers
by noisy rankings. They are the pipeline's first two stages with a seed of their own.

python -m proximo_lab.experiments.pretrain_sorter [--run DIR] [--out src/proximo/models/weights]
"""

import argparse
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

from proximo.models.shipped import resolve
from proximo.recipes.pipeline.config import REWARD_MODEL, SFT
from proximo.recipes.pipeline.world import write_demonstrations, write_rankings
from proximo.recipes.presets import PIPELINE_DEMO
from proximo.supervised.reward_model import train_reward_model
from proximo.supervised.sft import sft
from proximo_lab.experiments.pretraining import SEED

NAMES = {SFT: "tiny-sorter", REWARD_MODEL: "tiny-judge"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/pretrain-sorter"))
    parser.add_argument("--out", type=Path, default=Path("src/proximo/models/weights"))
    arguments = parser.parse_args()
    config, folder = replace(PIPELINE_DEMO, seed=SEED, device="cpu"), arguments.run
    folder.mkdir(parents=True)
    say = partial(print, flush=True)
    write_demonstrations(config, folder)
    sft(config.sft_config(folder), folder / SFT, say=say)
    ranked = write_rankings(config, folder)
    print(f"{ranked.rankings} rankings, {ranked.agreement:.0%} of their pairs in the order of the true reward")
    train_reward_model(config.reward_model_config(folder), folder / REWARD_MODEL, say=say)
    for stage, name in NAMES.items():
        unneeded = shutil.ignore_patterns("manifest.json")
        shutil.copytree(resolve(str(folder / stage)), arguments.out / name, ignore=unneeded, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
