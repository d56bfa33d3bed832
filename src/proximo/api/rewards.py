"""Reward functions given as Python values, put where a config holds them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from proximo.api.validate import refuse_kind
from proximo.environments.kinds import Acting
from proximo.rewards import GivenFunction, Grader, PythonFunction, Reward
from proximo.rewards.notebook_function import Function
from proximo.rl.config import RunConfig
from proximo.rl.reward_config import RewardMix, WeightedRule
from proximo.tasks import File, TaskOptions
from proximo.tasks.sources.mixture import with_reward

Rewarding = Function | Reward
"""A function as TRL calls it, or a reward of ours, such as ExactMatch()."""
Rewards = Rewarding | Sequence[Rewarding | tuple[Rewarding, float]]
"""One, or several, each alone or with its weight."""


class Rewarded(Protocol):
    """A config that says what is asked and what is rewarded."""

    @property
    def task(self) -> TaskOptions: ...

    @property
    def rewards(self) -> RewardMix: ...


Config = TypeVar("Config", bound=Rewarded)


def to_reward(given: Rewarding) -> Reward:
    """A reward of ours as it is; a function by its module or file, where another process can import it, and else as
    it is, to be called in this process."""
    if isinstance(given, Grader):
        return given
    if not callable(given):
        raise ValueError(f"rewards has {given!r}, which is no function: give f(prompts, completions, **columns)")
    # A script is not imported again: that would run it a second time.
    if getattr(given, "__module__", None) != "__main__":
        try:
            return PythonFunction(given)
        except ValueError:
            pass  # no other process can find it
    return GivenFunction.of(given)


def is_scored(config: RunConfig) -> bool:
    """True if the environment gives the verdict, so that data need no answers to compare with."""
    return isinstance(config.environment, Acting) and config.environment.scores


def with_rewards(config: Config, rewards: Rewards | None) -> Config:
    """The config rewarded by these and nothing else; the task's own verdict is only watched.

    One function for a File becomes the task's own reward, and with it the verdict. A config that was read from a run
    whose functions no file holds gets them back, in their order.
    """
    if rewards is None:
        return config
    if callable(rewards) or isinstance(rewards, Grader):
        rewards = [rewards]
    refuse_kind("rewards", rewards, (list, tuple), "a function f(prompts, completions, **columns), or a list of them")
    if not rewards:
        raise ValueError("rewards is empty: give at least one function, or leave it out")
    rules = tuple(_rule(each) for each in rewards)
    missing = _missing(config)
    if missing:
        return _given_again(config, missing, rules)
    mix = config.rewards
    if replace(mix, max_unscored=RewardMix().max_unscored) != RewardMix():
        raise ValueError(
            f"rewards is given, and config.rewards says what is rewarded too, {mix}: give one of them; "
            "RewardMix(rules=(WeightedRule(PythonFunction(f)),)) adds a function to what a config has"
        )
    if isinstance(config.task, File) and len(rules) == 1 and rules[0].weight == 1:
        return _changed(config, task=replace(config.task, reward=rules[0].reward))
    return _changed(config, task=with_reward(config.task, None), rewards=replace(mix, task=0.0, rules=rules))


def refuse_unbound(config: Rewarded, what: str) -> None:
    """Raise ValueError for functions that only this process has, where others will run the config."""
    held = [rule.reward for rule in config.rewards.rules] + _task_reward(config)
    for reward in held:
        if isinstance(reward, GivenFunction):
            raise ValueError(
                f"rewards has the function {reward.name!r}, which only this process can call, and {what}: write it "
                "into a file and give PythonFunction('file.py:name')"
            )


def _rule(given: Rewarding | tuple[Rewarding, float]) -> WeightedRule:
    reward, weight = given if isinstance(given, tuple) else (given, 1.0)
    return WeightedRule(to_reward(reward), float(weight))


def _task_reward(config: Rewarded) -> list[Reward]:
    return [config.task.reward] if isinstance(config.task, File) and config.task.reward is not None else []


def _missing(config: Rewarded) -> list[GivenFunction]:
    """Functions of a config that was read from a file, which holds their names only."""
    held = _task_reward(config) + [rule.reward for rule in config.rewards.rules]
    return [each for each in held if isinstance(each, GivenFunction) and each.function is None]


def _given_again(config: Config, missing: Sequence[GivenFunction], rules: Sequence[WeightedRule]) -> Config:
    """A function whose code has changed is noticed where the folder's config is compared."""
    rewards = [rule.reward for rule in rules]
    names = [each.name for each in missing]
    if [each.name for each in rewards if isinstance(each, GivenFunction)] != names or len(rewards) != len(names):
        raise ValueError(
            f"rewards has {len(rewards)} functions, and the config's own are {', '.join(names)}: give those, in this "
            "order"
        )
    replacements = dict(zip(map(id, missing), rewards, strict=True))
    task = config.task
    if isinstance(task, File) and id(task.reward) in replacements:
        task = replace(task, reward=replacements[id(task.reward)])
    held = tuple(replace(rule, reward=replacements.get(id(rule.reward), rule.reward)) for rule in config.rewards.rules)
    return _changed(config, task=task, rewards=replace(config.rewards, rules=held))


def _changed(config: Config, **fields: Any) -> Config:
    return replace(config, **fields)  # pyright: ignore[reportArgumentType]
