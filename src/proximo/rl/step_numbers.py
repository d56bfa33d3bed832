"""Numbers of a run's steps: its config as its schedules make it for each step."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from proximo.algorithms import UnusualChoice
from proximo.config.unions import union_members, with_fields
from proximo.losses.pieces.protocols import ShapeTraits
from proximo.rl.config import RunConfig
from proximo.rl.scheduled_fields import TEMPERATURE, changing
from proximo.samplers.sampler import SamplingOptions

PREFIX = "schedule/"
"""Beginning of the names under which scheduled numbers are logged."""
MAX_STEPS = 1_000_000
"""Maximum steps of a run with schedules."""
CHECKED = 200
"""Steps of a longer run at which the config is made to check its values, besides the first, last, lowest, highest."""


def as_logged(config: RunConfig, row: Mapping[str, Any]) -> RunConfig:
    """The config with the numbers that a step's row of metrics has of its schedules, none of which is asked. Of those
    an empty table is left, by which it is known to have had some."""
    if not config.schedules:
        return config
    kinds = dict(changing(config))
    stored = {name: row.get(f"{PREFIX}{name}") for name in config.schedules}
    values = {name: value for name, value in stored.items() if isinstance(value, int | float) and math.isfinite(value)}
    numbers = {name: _number(name, value, kinds[name]) for name, value in values.items()}
    return _with(config, {"schedules": {}, **numbers})


def _with(config: RunConfig, numbers: Mapping[str, Any]) -> RunConfig:
    """The config with other numbers. What is unusual in it has been said of the config itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusualChoice)
        return with_fields(config, numbers)


class StepNumbers:
    """A run's config at each of its steps."""

    def __init__(self, config: RunConfig) -> None:
        """Ask all schedules about all steps; ValueError where one has no answer."""
        self._config = config
        self._kinds = dict(changing(config)) if config.schedules else {}
        self._values: Mapping[str, Sequence[float]] = {
            name: _asked(name, schedule, config.steps) for name, schedule in (config.schedules or {}).items()
        }
        self._made: tuple[int, RunConfig] | None = None
        """The config of the last step that was asked for."""

    def logged(self, step: int) -> dict[str, float]:
        """Metrics of a step's scheduled numbers; steps are indices, from 0."""
        return {f"{PREFIX}{name}": values[step] for name, values in self._values.items()}

    def sampling(self, step: int) -> SamplingOptions:
        """Sampling options of a step; any thread may ask."""
        sampling = self._config.sampling
        if TEMPERATURE not in self._values:
            return sampling
        return replace(sampling, temperature=self._values[TEMPERATURE][step])

    def at(self, step: int) -> RunConfig:
        """The config of a step; the run's own where nothing changes."""
        if not self._values:
            return self._config
        if self._made is None or self._made[0] != step:
            numbers = {name: _number(name, values[step], self._kinds[name]) for name, values in self._values.items()}
            self._made = step, _with(self._config, {"schedules": None, **numbers})
        return self._made[1]

    def check(self) -> None:
        """Refuse values that the config would refuse, with the first step that has them."""
        for step in self._checked():
            try:
                config = self.at(step)
            except ValueError as error:
                values = ", ".join(f"{name} {series[step]:g}" for name, series in self._values.items())
                raise ValueError(f"schedules: at step {step + 1}, with {values}: {error}") from None
            self._check_controller(config)

    def _check_controller(self, config: RunConfig) -> None:
        """Refuse a coefficient that a schedule and a controller would both move."""
        scheduled, held = (ShapeTraits.read(each.algorithm.kl_reward) for each in (config, self._config))
        if held.controller is not None and scheduled.coefficient != held.coefficient:
            raise ValueError(
                "schedules has the coefficient of the KL in the reward, which algorithm.shape.controller moves too: "
                "leave one of them out"
            )

    def _checked(self) -> list[int]:
        """Steps to check: those whose numbers differ from the step's before; of very many a part, with the extremes."""
        steps = range(self._config.steps) if self._values else range(0)
        series = list(self._values.values())
        new = [step for step in steps if not step or any(each[step] != each[step - 1] for each in series)]
        if len(new) <= CHECKED:
            return new
        extremes = {find(steps, key=each.__getitem__) for each in series for find in (min, max)}
        return sorted({new[0], new[-1], *extremes, *new[:: math.ceil(len(new) / CHECKED)]})


def _asked(name: str, schedule: Any, steps: int) -> Sequence[float]:
    if steps > MAX_STEPS:
        raise ValueError(f"steps is {steps}, and schedules need at most {MAX_STEPS:,}: each step's number is held")
    try:
        values = schedule.values(steps)
    except ValueError as error:
        raise ValueError(f"schedules.{name}: {error}") from None
    if (step := next((step for step, value in enumerate(values) if not math.isfinite(value)), None)) is not None:
        raise ValueError(f"schedules.{name} is {values[step]} at step {step + 1}: give numbers that are nearer")
    return values


def _number(name: str, value: float, kind: Any) -> int | float:
    """The number as its field holds it."""
    if float in union_members(kind):
        return value
    if value != int(value):
        raise ValueError(f"{name} takes whole numbers")
    return int(value)
