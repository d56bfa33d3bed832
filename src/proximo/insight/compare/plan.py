"""The plan of a comparison: configs on one task, shared seeds, and an equal budget."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from proximo.rl.config import RunConfig

POINTS, APART = 10, 5
"""Defaults for evaluations during a run: POINTS of them if all completions have the maximum length, more if they are
shorter, but APART steps between two if a run may have four times that."""


@dataclass(frozen=True)
class Budget:
    kind: Literal["tokens", "updates", "steps"]
    """Tokens sampled for training, optimizer updates, or steps, as forks have them."""
    amount: int

    def __post_init__(self) -> None:
        if self.amount < 1:
            raise ValueError(f"--{self.kind} {self.amount}: give at least 1")

    def __str__(self) -> str:
        return f"{self.amount:,} {'generated tokens' if self.kind == 'tokens' else self.kind}"


@dataclass(frozen=True)
class Contender:
    name: str
    config: RunConfig
    """Config with the comparison's first seed."""


@dataclass(frozen=True)
class RunJob:
    """One run of a comparison."""

    contender: str
    config: RunConfig

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def name(self) -> str:
        return f"{self.contender}-seed-{self.seed}"

    def __str__(self) -> str:
        return f"{self.contender} seed {self.seed}"


@dataclass(frozen=True)
class ComparisonPlan:
    contenders: tuple[Contender, ...]
    """Contenders; the first is the baseline."""
    seeds: tuple[int, ...]
    budget: Budget

    def jobs(self) -> Iterator[RunJob]:
        """All contenders of a seed before the next seed, so that whatever is finished can be compared."""
        for seed in self.seeds:
            for contender in self.contenders:
                yield RunJob(contender.name, replace(contender.config, seed=seed))


def make_plan(configs: Sequence[tuple[str, RunConfig]], seeds: int, budget: Budget | None = None) -> ComparisonPlan:
    """A plan from named configs; ValueError if they cannot be compared fairly. Without a budget, the one that the
    configs share is used."""
    if len(configs) < 2:
        raise ValueError("a comparison needs two at least: give more algorithms or configs")
    if seeds < 1:
        raise ValueError(f"`seeds={seeds}`: give at least 1")
    names = unique_names([name for name, _ in configs])
    refuse_different(list(zip(names, (config for _, config in configs), strict=True)))
    budget = budget or _shared_budget([config for _, config in configs])
    first = configs[0][1].seed
    contenders = [
        Contender(name, _within(name, replace(config, seed=first), budget))
        for name, (_, config) in zip(names, configs, strict=True)
    ]
    return ComparisonPlan(tuple(contenders), tuple(range(first, first + seeds)), budget)


def unique_names(names: Sequence[str]) -> list[str]:
    """Unique names that are valid folder names; a repeated name gets a number."""
    taken: list[str] = []
    for name in names:
        plain = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")[:60] or "config"
        number, unique = 1, plain
        while unique in taken:
            number += 1
            unique = f"{plain}-{number}"
        taken.append(unique)
    return taken


def refuse_different(configs: Sequence[tuple[str, RunConfig]]) -> None:
    """Raise ValueError for configs whose results cannot be compared."""
    first, one = configs[0]
    for name, config in configs[1:]:
        if config.task != one.task:
            raise ValueError(
                f"task is {one.task} for {first} and {config.task} for {name}: compare on one task, the same for all"
            )
        for field in ("problems", "samples"):
            ours, theirs = getattr(one.evaluation, field), getattr(config.evaluation, field)
            if ours != theirs:
                raise ValueError(f"evaluation.{field} is {ours} for {first}, {theirs} for {name}: give all the same")


def _shared_budget(configs: Sequence[RunConfig]) -> Budget:
    tokens = {config.max_generated_tokens for config in configs}
    updates = {config.steps * config.training.updates for config in configs}
    match tuple(tokens), tuple(updates):
        case (int(amount),), _:
            return Budget("tokens", amount)
        case (None,), (amount,):
            return Budget("updates", amount)
    raise ValueError("the configs have no budget in common: give one, `tokens=N` or `updates=N`")


def _within(name: str, config: RunConfig, budget: Budget) -> RunConfig:
    """The config limited to the budget and evaluated during training."""
    training = config.training
    completions = training.groups * training.group_size
    if budget.kind == "updates":
        steps, rest = divmod(budget.amount, training.updates)
        if rest or not steps:
            raise ValueError(
                f"`updates={budget.amount}`: {name} makes {training.updates} updates a step, so give a multiple of that"
            )
        fewest, limits = steps, {"steps": steps, "max_generated_tokens": None}
    else:
        if budget.amount < completions:
            raise ValueError(
                f"`tokens={budget.amount}`: one step of {name} samples {completions} completions of a token at least: "
                "give more"
            )
        # A completion has at least one token, and a step uses this many completions, with dropped and carried ones.
        steps = -(-budget.amount // completions)
        fewest, limits = steps / config.sampling.max_tokens, {"steps": steps, "max_generated_tokens": budget.amount}
    every = config.evaluation.every or max(math.ceil(fewest / POINTS), APART if steps >= 4 * APART else 1)
    return replace(config, **limits, evaluation=replace(config.evaluation, every=every))
