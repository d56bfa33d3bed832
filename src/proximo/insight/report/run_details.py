"""Details from a run's files, read once, so that the page of a run in progress is consistent."""

import math
import tomllib
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from proximo.algorithms import UnusualChoice, explain
from proximo.config import toml
from proximo.config.aliases import renewed
from proximo.insight.charts.drawing import Number
from proximo.insight.doctor.checkup import Checkup, check_up
from proximo.insight.folder import RunFolder, State
from proximo.insight.reading import Row, is_number, phases, real
from proximo.insight.report.problems import Pair, held_out_pairs
from proximo.recipes.pipeline import PipelineConfig
from proximo.rl.config import RunConfig
from proximo.runs.files import EVENTS, METRICS, TIMINGS
from proximo.runs.health import ActiveFinding, worst_first
from proximo.supervised.dpo import DpoConfig
from proximo.supervised.reward_model import RewardModelConfig
from proximo.supervised.sft import SftConfig

STAGES = ((SftConfig, ("sft",)), (RewardModelConfig, ("reward-model",)), (DpoConfig, ("dpo",)))
COMMANDS = ((RunConfig, ("train",)), *STAGES, (PipelineConfig, ("train", "pipeline-demo")))
"""Commands by their config class."""


@dataclass(frozen=True)
class RunDetails:
    """Rows, record and result at one moment; missing or unreadable parts are empty."""

    run: RunFolder
    state: State
    record: Row
    result: Row | None
    metrics: Sequence[Row]
    timings: Sequence[Row]
    events: Sequence[Row]
    checkup: Checkup
    moment: datetime

    @cached_property
    def _loaded(self) -> tuple[Any, tuple[str, ...], list[str]]:
        """The config, its command, and warnings about its choices."""
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            for kind, command in COMMANDS:
                try:
                    config = toml.loads(self.run.config_text, kind, code=self.run, renew=renewed)
                except ValueError:  # of another command or version
                    continue
                return config, command, [str(each.message) for each in raised if each.category is UnusualChoice]
        return None, (), []

    @property
    def config(self) -> RunConfig | None:
        """Config of a reinforcement-learning run."""
        return self._loaded[0] if isinstance(self._loaded[0], RunConfig) else None

    @property
    def command(self) -> tuple[str, ...]:
        """The command that makes such a run (argv may be that of a pipeline or a comparison); empty if not known."""
        return self._loaded[1]

    @property
    def is_stage(self) -> bool:
        """True for a run that trains on a file: its accuracy is one of pairs."""
        return isinstance(self._loaded[0], tuple(kind for kind, _ in STAGES))

    @property
    def unavailable(self) -> dict[str, str]:
        """Classes that the config names and that are not loaded, with the reason: then there is no config but text."""
        return {} if self._loaded[0] is not None else self.run.unavailable

    @property
    def unusual(self) -> list[str]:
        """Warnings about its choices."""
        return self._loaded[2]

    @cached_property
    def settings(self) -> Row:
        """config.toml as text, of any command."""
        try:
            return tomllib.loads(self.run.config_text)
        except ValueError:
            return {}

    @property
    def model(self) -> str | None:
        name = self.settings.get("model")
        return name if isinstance(name, str) else None

    @property
    def attempts(self) -> list[Row]:
        attempts = self.record.get("attempts")
        return [each for each in attempts if isinstance(each, dict)] if isinstance(attempts, list) else []

    @property
    def argv(self) -> list[str]:
        """Record of the first attempt."""
        first = self.attempts[0].get("argv") if self.attempts else None
        words = first or self.record.get("argv")
        return [str(each) for each in words] if isinstance(words, list) else []

    @property
    def ended(self) -> str:
        """End of the last attempt, in words; empty while it runs."""
        return str(self.attempts[-1].get("ended") or "") if self.attempts else ""

    @cached_property
    def training(self) -> list[Row]:
        """Rows of training steps, without evaluations."""
        return [row for row in self.metrics if _is_step(row)]

    @property
    def steps_done(self) -> int:
        return max((int(row["step"]) for row in self.training), default=0)

    @cached_property
    def evaluations(self) -> list[Row]:
        """Rows of held-out evaluations, without the prefix of their names."""
        rows = []
        for row in self.metrics:
            values = {name.removeprefix("held_out/"): row[name] for name in row if name.startswith("held_out/")}
            if values and is_number(row.get("step")):
                rows.append({"step": row["step"], **values})
        return rows

    @property
    def generated(self) -> int | None:
        """Tokens sampled for training."""
        known = real(self.result.get("generated_tokens")) if self.result else math.nan
        counted = [real(row.get("sampled_tokens")) for row in self.training]
        total = known if is_number(known) else math.fsum(count for count in counted if is_number(count))
        return int(total) or None

    @property
    def seconds(self) -> float | None:
        known = real(self.result.get("seconds")) if self.result else math.nan
        spent = [value for row in self.timings for value in phases(row).values()]
        return known if is_number(known) else math.fsum(spent) or None

    @property
    def findings(self) -> list[ActiveFinding]:
        """Findings as in `proximo doctor`, worst first; some may be over."""
        return worst_first([*self.checkup.standing, *self.checkup.passed])

    @property
    def event_counts(self) -> Counter[str]:
        return Counter(str(event.get("kind", "")) for event in self.events)

    @cached_property
    def algorithm(self) -> tuple[explain.Card, list[tuple[str, str, str]]] | None:
        """The nearest named algorithm, and the differences of this run's."""
        if self.config is None:
            return None
        card = explain.nearest(self.config.algorithm)
        return card, explain.differences(card, self.config.algorithm)

    @property
    def algorithm_name(self) -> str | None:
        """Example: "DAPO with 1 change"."""
        if self.algorithm is None:
            return None
        card, differences = self.algorithm
        changed = f" with {len(differences)} change{'s' * (len(differences) > 1)}" if differences else ""
        return card.name.upper() + changed

    @cached_property
    def pairs(self) -> list[Pair]:
        """Held-out problems with answers before and after training."""
        return held_out_pairs(self.result, self.config)

    def curve(self, metric: str) -> list[tuple[Number, float]]:
        """A metric's curve, with NaN (a gap) for steps without a value; empty if no step has one."""
        points = [(row["step"], real(row.get(metric))) for row in self.training]
        return points if any(is_number(value) for _, value in points) else []


def gather(run: RunFolder) -> RunDetails:
    return RunDetails(
        run=run,
        state=run.state,
        record=run.record,
        result=run.result,
        metrics=run.rows(METRICS),
        timings=run.rows(TIMINGS),
        events=run.rows(EVENTS),
        checkup=check_up(run),
        moment=datetime.now(),
    )


def _is_step(row: Row) -> bool:
    return is_number(row.get("step")) and any(not name.startswith("held_out/") and name != "step" for name in row)
