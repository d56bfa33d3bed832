"""Stages of a chain of runs, each in its own folder and reported in lines. A finished one is not trained again."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from proximo.config import toml
from proximo.rl.config import RunConfig
from proximo.rl.result import RunResult
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.records import Collected, Evaluation
from proximo.runs.session import RunSession, open_session
from proximo.supervised.dpo import DpoConfig
from proximo.supervised.fitting import Fitted
from proximo.supervised.reward_model import RewardModelConfig
from proximo.supervised.sft import SftConfig
from proximo.supervised.snapshots import POINTS

Say = Callable[[str], None]
Config = TypeVar("Config", DpoConfig, RewardModelConfig, SftConfig)
REPORT_EVERY = 10
"""Reinforcement-learning steps between progress lines."""


def fitted(
    stage: Callable[[Config, Path, Say, RunSession], Fitted], config: Config, folder: Path, say: Say, accept_lost: bool
) -> Fitted:
    """Train a stage on a file."""
    with open_session(folder, toml.dumps(config), points=POINTS, allowed=None, accept_lost=accept_lost) as session:
        return stage(config, folder, say, session)


def reinforced(config: RunConfig, folder: Path, say: Say, accept_lost: bool) -> RunResult:
    """Train by reinforcement learning."""
    with open_session(folder, toml.dumps(config), allowed=None, accept_lost=accept_lost) as session:
        if session.result is None:
            return train(Run(config, folder, _Steps(say)), session)
        return RunResult.from_dict(session.result, folder, config.task, config.seed)


class _Steps:
    """Progress of a run: prints both rewards every few steps."""

    def __init__(self, say: Say) -> None:
        self.say, self.steps = say, 0

    def start(self, steps: int, before: Evaluation) -> None:
        self.steps = steps

    def stepped(
        self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float], collected: Collected
    ) -> None:
        if step % REPORT_EVERY == 0 or step == self.steps:
            rewards = f"learned reward {metrics['reward']:.2f}  true reward {metrics['outcome']:.3f}"
            self.say(f"step {step}/{self.steps}  {rewards}")

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Prints nothing: policies are compared at the end."""

    def warned(self, step: int, message: str) -> None:
        self.say(f"warning at step {step}: {message}")

    def stop(self) -> None:
        """Do nothing: there is nothing to clean up."""


def prefixed(name: str, say: Say) -> Say:
    """Lines that begin with a stage's name."""
    return lambda line: say(f"{name}: {line}")
