"""The reward of a run: the weighted sum of the task's score, reward models and rules."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from proximo.algorithms import Algorithm
from proximo.environments.grading import PlayedTask
from proximo.environments.kinds import Acting, Interaction, paying
from proximo.losses.pieces.extras import needing
from proximo.losses.pieces.protocols import AdvantageTraits, KeepTraits
from proximo.rewards import Reward
from proximo.tasks import File, Mixture, RewardRange, Task, reward_range
from proximo.tasks.protocol import GradesSteps


@dataclass(frozen=True)
class RewardModel:
    """A model that scores completions: made by `proximo reward-model`, or any classifier with one label."""

    path: str
    """A folder or hub id in Hugging Face format, or the run folder of a stage."""
    weight: float = 1.0
    """Weight of its scores."""
    device: str = "auto"
    """Torch device of the reward model. `auto`: a GPU if there is one, else the CPU."""
    token_budget: int = 16384
    """Tokens per forward pass; affects memory, not results."""
    mean: float = 0.0
    """Score that counts as 0: subtracted from every score. InstructGPT takes the mean score of the demonstrations;
    `proximo reward-model` prints the mean of its held-out completions as `score_mean`."""
    deviation: float = 1.0
    """Scores are divided by this after the mean is subtracted; `score_std` is that of the held-out completions."""

    def __post_init__(self) -> None:
        _check_weight("rewards.models", self.weight)
        if not math.isfinite(self.mean) or not 0 < self.deviation < math.inf:
            raise ValueError(
                f"rewards.models: mean is {self.mean}, deviation {self.deviation}: give a finite number, and one "
                "above 0"
            )
        if self.token_budget < 1:
            raise ValueError(f"rewards.models: token_budget is {self.token_budget}: it must be at least 1")


@dataclass(frozen=True)
class WeightedRule:
    """A reward without a model, added to the task's score."""

    reward: Reward
    weight: float = 1.0
    """Weight of the rule; a negative weight makes it a penalty."""

    def __post_init__(self) -> None:
        _check_weight("rewards.rules", self.weight)


@dataclass(frozen=True)
class RewardMix:
    """The reward: a weighted sum of the task's score, reward models and rules. The task score itself is unaffected."""

    task: float = 1.0
    """Weight of the task's score. 0: it is logged but not rewarded, to compare a learned reward with the true one."""
    models: tuple[RewardModel, ...] = ()
    rules: tuple[WeightedRule, ...] = ()
    max_unscored: float = 0.5
    """Tolerated share of unscored completions per step; the run stops after three steps in a row above it."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_unscored <= 1:
            raise ValueError(f"rewards.max_unscored is {self.max_unscored}: give a share from 0 to 1")
        if not math.isfinite(self.task):
            raise ValueError(f"rewards.task is {self.task}: give a finite weight, 1.0 or 0.0")
        if self.task == 0 and not self.models and not self.rules:
            raise ValueError("rewards.task is 0 and nothing else is rewarded: add to rewards.models or rewards.rules")

    @property
    def is_verdict(self) -> bool:
        """True if the reward is the task's score alone."""
        return self.task == 1 and not self.models and not self.rules

    @property
    def only_watches(self) -> bool:
        """True if a reward model is rewarded, and the task's score is only logged."""
        return self.task == 0 and bool(self.models)

    @property
    def names(self) -> list[str]:
        """Names of the parts other than the task: models, then rules."""
        models = ["reward_model"] if len(self.models) == 1 else [_folder_name(model.path) for model in self.models]
        names = models + [_rule_name(rule.reward) for rule in self.rules]
        taken = ["task"]
        for name in names:
            numbered = (f"{name}_{number}" for number in range(2, len(names) + 3))
            taken.append(next(free for free in (name, *numbered) if free not in taken))
        return taken[1:]


@runtime_checkable
class Labelled(Protocol):
    """A reward that names its part of the sum; others are named after their class."""

    @property
    def label(self) -> str: ...


def _check_weight(field: str, weight: float) -> None:
    if weight == 0 or not math.isfinite(weight):
        raise ValueError(f"{field}: weight is {weight}: give a finite number that is not 0, or leave the reward out")


def _folder_name(path: str) -> str:
    """A short name for a folder: its own, or for a checkpoint that of its run."""
    folder = Path(path)
    return folder.parents[1].name if folder.match("checkpoints/*") else folder.name


def _rule_name(reward: Reward) -> str:
    if isinstance(reward, Labelled):
        return reward.label
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(reward).__name__).lower()


def check_rewards(task: Task, mix: RewardMix, algorithm: Algorithm, environment: Interaction | None = None) -> None:
    """Refuse a run whose reward does not include what it should train on, or is empty."""
    if AdvantageTraits.read(algorithm.advantage).needs_step_rewards and not grades_steps(task):
        raise ValueError(
            f"algorithm.advantage is {type(algorithm.advantage).__name__}, which needs a reward for each reasoning "
            f"step, and task {type(task).__name__} gives none: use the task Chain or another that grades steps, or "
            "another advantage"
        )
    graded = has_verdict(task) or (isinstance(environment, Acting) and environment.scores)
    if not graded and mix.task != 0:
        raise ValueError(
            f"rewards.task is {mix.task}, but a File without a reward has no verdict: set rewards.task to 0 and add "
            "to rewards.models or rewards.rules, or set task.reward"
        )
    keep = KeepTraits.read(algorithm.keep)
    # Prompts without a verdict have the total reward as their outcome, and siblings can be compared by that.
    if mix.task == 0 and keep.reads_outcome and (graded or not keep.compares):
        whole = (
            ", or leave the answers ungraded, so that groups are compared by the whole reward, `task.reward.type=None`"
        )
        raise ValueError(
            f"rewards.task is 0, but algorithm.keep is {type(algorithm.keep).__name__}, which goes by the task's "
            "verdict: reward the verdict too, `rewards.task=1.0`, keep all groups, `algorithm.keep.type=KeepAll`"
            + whole
            * (keep.compares and isinstance(task, File))
        )
    if mix.task == 0 and (judged := needing(algorithm.extras, "outcome")):
        raise ValueError(
            f"rewards.task is 0, but algorithm.extra has {judged[0]}, which goes by the task's verdict: leave it out"
        )


def grades_steps(task: Task) -> bool:
    """Tell whether the task's grades have a reward for each step."""
    return isinstance(task, GradesSteps) and task.grades_steps


def mixed_range(task: Task, environment: Interaction, mix: RewardMix) -> RewardRange | None:
    """Rewards of a wrong and a right answer in this run, all else being equal; None if not known.

    These are the task's, or the environment's where it gives the task scores, times the weight; rules and reward models
    add the same to both. If that weight is 0, the rules alone are added up; a reward model's scores have no known
    scale.
    """
    if mix.task != 0:
        return _scaled(reward_range(paying(task, environment)), abs(mix.task))
    parts = [_scaled(reward_range(rule.reward), abs(rule.weight)) for rule in mix.rules]
    known = [part for part in parts if part is not None]
    if mix.models or len(known) < len(parts):
        return None
    return sum(wrong for wrong, _ in known), sum(right for _, right in known)


def _scaled(declared: RewardRange | None, weight: float) -> RewardRange | None:
    return None if declared is None else (weight * declared[0], weight * declared[1])


def has_verdict(task: Task) -> bool:
    """Tell whether the task, or the environment that plays it, grades completions; False for a file of prompts without
    a reward."""
    if isinstance(task, PlayedTask):
        return task.environment.scores or has_verdict(task.task)
    return not any(isinstance(part, File) and part.reward is None for part in _tasks(task))


def rewards_of(task: Task, mix: RewardMix) -> list[Reward]:
    """All rewards without a model of their own: those of files and the rules."""
    file_rewards = [file.reward for file in _tasks(task) if isinstance(file, File) and file.reward is not None]
    return [*file_rewards, *(rule.reward for rule in mix.rules)]


def _tasks(task: Task) -> list[Task]:
    return [source.task for source in task.sources] if isinstance(task, Mixture) else [task]
