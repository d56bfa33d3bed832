"""PPO against GRPO on the demo task at equal generated tokens: paired seeds, the same held-out problems.

    python -m proximo_lab.experiments.ppo_vs_grpo [--steps 30] [--seeds 0 1 2 3 4] [--out runs/ppo_vs_grpo]

The budget is one at which GRPO is right 70 to 90 % of the time, so that there is room on both sides. Prints a Markdown
table and the 95 % interval of the paired difference; docs/log.md has its results.
"""

import argparse
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

from proximo.algorithms import explain
from proximo.models.values import OwnModel, TrunkHead
from proximo.recipes.presets import ARITHMETIC, PPO_ARITHMETIC
from proximo.rl.config import EvaluationOptions, RunConfig, ValueOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.tasks.arithmetic import Arithmetic

FORMS = {
    "ppo-head": ValueOptions(TrunkHead()),
    "ppo-layers": PPO_ARITHMETIC.value,
    "ppo-model": ValueOptions(OwnModel(), learning_rate=1e-3),
}
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""97.5 % points of Student's t for so many pairs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", default=list(FORMS))
    parser.add_argument("--out", type=Path, default=Path("runs/ppo_vs_grpo"))
    options = parser.parse_args()
    print("| seed | grpo | " + " | ".join(options.arms) + " | tokens grpo / " + " / ".join(options.arms) + " |")
    print("|---" * (3 + len(options.arms)) + "|", flush=True)
    differences: dict[str, list[float]] = {arm: [] for arm in options.arms}
    for seed in options.seeds:
        results = {arm: _result(arm, seed, options) for arm in ("grpo", *options.arms)}
        for arm in options.arms:
            differences[arm].append(100 * (results[arm][0] - results["grpo"][0]))
        shares = " | ".join(f"{accuracy:.1%}" for accuracy, _ in results.values())
        print(f"| {seed} | {shares} | {' / '.join(str(tokens) for _, tokens in results.values())} |", flush=True)
    for arm, gaps in differences.items():
        print(f"{arm} − grpo: {_interval(gaps)}")


def config_of(arm: str, seed: int, steps: int, problems: int) -> RunConfig:
    card = explain.card(arm.partition("-")[0])
    assert card is not None
    return replace(
        ARITHMETIC,
        algorithm=card.value,
        value=FORMS.get(arm),
        task=Arithmetic(held_out=max(problems, 1000)),
        evaluation=EvaluationOptions(problems=problems),
        seed=seed,
        steps=steps,
    )


def _result(arm: str, seed: int, options: argparse.Namespace) -> tuple[float, int]:
    """Held-out accuracy and tokens generated; a run that is there already is read, not repeated."""
    folder = options.out / f"{arm}-{seed}-{options.steps}"
    stored = folder / "result.json"
    if not stored.exists():
        config = config_of(arm, seed, options.steps, options.problems)
        outcome = train(Run(config, folder, ProgressLines()))
        stored.write_text(json.dumps([outcome.after.accuracy, outcome.generated_tokens]))
    accuracy, tokens = json.loads(stored.read_text())
    return accuracy, tokens


def _interval(gaps: list[float]) -> str:
    mean = statistics.mean(gaps)
    if len(gaps) not in STUDENT:
        return f"{mean:+.1f} points"
    half = STUDENT[len(gaps)] * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return f"{mean:+.1f} points, 95 % from {mean - half:+.1f} to {mean + half:+.1f} ({len(gaps)} pairs)"


if __name__ == "__main__":
    main()
