"""The chain itself: every stage by its own function, into a folder of its own."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from proximo import toml
from proximo.training.collect import Collected
from proximo.training.config import RunConfig
from proximo.training.dpo import dpo
from proximo.training.evaluate import Evaluation
from proximo.training.pipeline.config import DPO, REWARD_MODEL, SFT, PipelineConfig
from proximo.training.pipeline.measure import Measuring
from proximo.training.pipeline.report import report
from proximo.training.pipeline.result import Curve, Policy, Result
from proximo.training.pipeline.world import write_demonstrations, write_rankings
from proximo.training.reward_model import train_reward_model
from proximo.training.rl import Clock, Run, train
from proximo.training.runlog import RunLog
from proximo.training.sft import sft

Say = Callable[[str], None]
SAID_EVERY = 10
"""Steps of reinforcement learning between two lines of progress."""


def pipeline(config: PipelineConfig, folder: Path, say: Say) -> Result:
    """Demonstrations, fine-tuning, rankings, reward model; PPO, GRPO and DPO side by side; then all are measured."""
    if (folder / "config.toml").exists():
        raise ValueError(f"--run {folder}: there is a run in this folder already; choose another name or remove it")
    RunLog(folder).start(toml.dumps(config))
    result = _chain(config, folder, say)
    (folder / "results.json").write_text(json.dumps(plain(asdict(result)), indent=2) + "\n")
    (folder / "report.md").write_text(report(result))
    return result


def _chain(config: PipelineConfig, folder: Path, say: Say) -> Result:
    clock = Clock()
    with clock.phase("demonstrations"):
        write_demonstrations(config, folder)
    with clock.phase(SFT):
        sft(config.sft_config(folder), folder / SFT, _prefixed(SFT, say))
    with clock.phase("rankings"):
        ranked = write_rankings(config, folder)
        say(f"rankings: {ranked.rankings}, {ranked.agreement:.0%} of their pairs as the true reward has them")
    with clock.phase(REWARD_MODEL):
        judge = train_reward_model(
            config.reward_model_config(folder), folder / REWARD_MODEL, _prefixed(REWARD_MODEL, say)
        )
    tokens, curves = {SFT: 0, DPO: 0}, {}
    for name, run in config.runs(folder).items():
        with clock.phase(name):
            tokens[name], curves[name] = _reinforce(run, folder / name, _prefixed(name, say))
    with clock.phase(DPO):
        dpo(config.dpo_config(folder), folder / DPO, _prefixed(DPO, say))
    with clock.phase("measuring"):
        measure = Measuring(config, folder)
        measured = {name: measure(name) for name in (SFT, *curves, DPO)}
    return Result(
        folder=str(folder),
        ranked=ranked,
        reward_model=judge.best,
        policies=tuple(
            Policy(name, each, tokens[name], clock.seconds[name], curves.get(name)) for name, each in measured.items()
        ),
        seconds=clock.seconds,
    )


def plain(value: object) -> object:
    """What JSON can hold: it has no NaN."""
    match value:
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case float() if not math.isfinite(value):
            return None
    return value


def _reinforce(config: RunConfig, folder: Path, say: Say) -> tuple[int, Curve]:
    """How many tokens it generated, and both rewards as they went."""
    steps = _Steps(say)
    outcome = train(Run(config, folder, steps), toml.dumps(config))
    return outcome.generated_tokens, Curve(tuple(steps.learned), tuple(steps.true))


class _Steps:
    """A run's progress: remembers both rewards, and says them now and then."""

    def __init__(self, say: Say) -> None:
        self.say, self.steps = say, 0
        self.learned: list[float] = []
        self.true: list[float] = []

    def start(self, steps: int, before: Evaluation) -> None:
        self.steps = steps

    def stepped(
        self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float], collected: Collected
    ) -> None:
        self.learned.append(metrics["reward"])
        self.true.append(metrics["outcome"])
        if (step + 1) % SAID_EVERY == 0 or step + 1 == self.steps:
            rewards = f"learned reward {metrics['reward']:.2f}  true reward {metrics['outcome']:.3f}"
            self.say(f"step {step + 1}/{self.steps}  {rewards}")

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Only at the end, together with the other policies."""

    def warned(self, step: int, message: str) -> None:
        self.say(f"warning at step {step + 1}: {message}")

    def stop(self) -> None:
        """Nothing to tidy up."""


def _prefixed(name: str, say: Say) -> Say:
    return lambda line: say(f"{name}: {line}")
