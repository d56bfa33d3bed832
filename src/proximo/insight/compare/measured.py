"""The numbers of one finished run that are compared: results, curves and costs."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from proximo.insight.compare.plan import RunJob
from proximo.insight.report.run_details import Row, RunDetails, is_number, phases, real
from proximo.losses.arithmetic import count_of
from proximo.rewards.metrics import PREFIX
from proximo.rl.evaluate import known_mean
from proximo.runs.health.history import idle
from proximo.runs.rollout_files import read_columns

LAST = 0.1
"""Share of a run's last steps that represent its end."""


class Point(NamedTuple):
    """A value after a number of steps and tokens."""

    steps: int
    tokens: int
    value: float


@dataclass(frozen=True)
class Measure:
    """A number that each step of a run has, and how it is summarised for the run."""

    key: str
    title: str
    unit: str
    at_end: bool
    """True if the last steps represent the run; else all of them do."""
    of: "Callable[[MeasuredRun, Row], float | None]"

    @property
    def label(self) -> str:
        return f"{self.title}, {f'last {LAST:.0%} of the steps' if self.at_end else 'mean over the run'}"


class MeasuredRun:
    """A finished run, read once. `since`: the step after which it counts, where a fork parts from its parent."""

    def __init__(self, job: RunJob, details: RunDetails, since: int = 0) -> None:
        assert details.result is not None, "it is finished"
        self.job, self.details, self.result, self.since = job, details, details.result, since
        self._curves: dict[str, list[Point]] = {}

    @property
    def seed(self) -> int:
        return self.job.seed

    @cached_property
    def answers(self) -> dict[str, float]:
        """Task scores of the held-out problems after training, by id, without unscored ones."""
        answered = [after for _, after in self.result["examples"]]
        return {each["problem"]: float(each["outcome"]) for each in answered if is_number(each["outcome"])}

    @cached_property
    def training(self) -> list[Row]:
        """Rows of the steps that count."""
        return [row for row in self.details.training if row["step"] > self.since]

    @property
    def steps(self) -> int:
        """Number of steps that count."""
        return self.details.steps_done - self.since

    @property
    def before(self) -> float:
        """Held-out task score before the steps that count, by the last evaluation until then."""
        known = [float(row["outcome"]) for row in self.details.evaluations if row["step"] <= self.since]
        return known[-1] if self.since and known else float(self.result["before"]["outcome"])

    @property
    def after(self) -> float:
        return float(self.result["after"]["outcome"])

    @property
    def is_share(self) -> bool:
        """True if each held-out answer is right or wrong."""
        return all(outcome in (0, 1) for outcome in self.answers.values())

    @property
    def tokens(self) -> int:
        return int(self.total("sampled_tokens") if self.since else self.result["generated_tokens"])

    @property
    def updates(self) -> int:
        return int(self.total("updates"))

    @property
    def seconds(self) -> float:
        return self.steps * math.fsum(self.phases.values()) if self.since else float(self.result["seconds"])

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds of a step by phase; for a step that was repeated after a resume, the last time."""
        timings = [row for row in self.details.timings if is_number(row.get("step")) and row["step"] > self.since]
        last = {row["step"]: phases(row) for row in timings}
        names = dict.fromkeys(name for row in last.values() for name in row)
        return {name: math.fsum(row.get(name, 0.0) for row in last.values()) / len(last) for name in names}

    def known(self, metric: str) -> list[float]:
        """Values of a metric in all steps that have one."""
        return [float(row[metric]) for row in self.training if is_number(row.get(metric))]

    def total(self, metric: str) -> float:
        return math.fsum(self.known(metric))

    @property
    def dropped_tokens(self) -> float:
        """Tokens sampled in dropped groups."""
        pairs = [(real(row.get("wasted_tokens")), real(row.get("sampled_tokens"))) for row in self.training]
        return math.fsum(share * count for share, count in pairs if is_number(share * count))

    @cached_property
    def _tokens_after(self) -> dict[int, int]:
        """Sampled tokens by number of steps done; steps with unreadable rows are missing."""
        total, after = 0, {0: 0}
        for row in self.details.training:
            total += int(row["sampled_tokens"]) if is_number(row.get("sampled_tokens")) else 0
            after[int(row["step"])] = total
        return after

    def held_out(self) -> list[Point]:
        """Held-out task scores before, during and after training."""
        points = []
        for row in self.details.evaluations:
            done = int(row["step"])
            if done >= self.since and is_number(row.get("outcome")) and done in self._tokens_after:
                points.append(Point(done, self._tokens_after[done], float(row["outcome"])))
        return points

    def curve(self, measure: Measure) -> list[Point]:
        if measure.key not in self._curves:
            values = [(int(row["step"]), measure.of(self, row)) for row in self.training]
            self._curves[measure.key] = [
                Point(done, self._tokens_after[done], value) for done, value in values if value is not None
            ]
        return self._curves[measure.key]

    def whole(self, measure: Measure) -> float | None:
        """The run's summary of a measure; None if no step has it."""
        values = [point.value for point in self.curve(measure)]
        if measure.at_end:
            values = values[-max(1, count_of(LAST, len(values))) :]
        return known_mean(values) if values else None

    def surprise(self, step: int) -> float | None:
        """Minus the mean log-prob of all tokens sampled for a step: the sampling policy's entropy, estimated on the
        same rows for every algorithm, unlike a mean over the trained rows."""
        logprobs = self.column(step, "rollout_logprobs")
        mask = self.column(step, "mask")
        if logprobs is None or mask is None:
            return None
        mean = pc.mean(pc.filter(pc.list_flatten(logprobs), pc.list_flatten(mask))).as_py()  # pyright: ignore
        return None if mean is None else -mean

    def column(self, step: int, name: str) -> pa.ChunkedArray | None:
        """A column of a step's rollouts; None if not stored."""
        try:
            return read_columns(self.details.run.step_file(step), [name]).column(name)
        except (OSError, ValueError, KeyError):
            return None


def _metric(name: str) -> Callable[[MeasuredRun, Row], float | None]:
    return lambda _, row: float(row[name]) if is_number(row.get(name)) else None


def _held_back(_: MeasuredRun, row: Row) -> float | None:
    """Gradient held back by clips and soft gates, on one axis. Rows that were skipped for lack of a gradient count as
    not held back, as they do for algorithms that run them for their KL."""
    known = is_number(row.get("gate")) and is_number(row.get("measured"))
    return (1 - row["gate"]) * row["measured"] if known else None


def _idle(_: MeasuredRun, row: Row) -> float | None:
    """Wasted samples: dropped groups and rows without an advantage."""
    share = idle(row)
    return None if math.isnan(share) else share


MEASURES = (
    Measure("outcome", "task score in training", "", False, _metric("outcome")),
    Measure("entropy", "entropy", "nats a token", True, lambda run, row: run.surprise(row["step"])),
    Measure("length", "length", "tokens", True, _metric("length")),
    Measure("held_back", "clipped", "share of the gradient", False, _held_back),
    Measure("idle", "wasted samples", "share", False, _idle),
)


def measures_among(names: Iterable[str]) -> list[Measure]:
    """The measures, and those of the users' own functions among these names of metrics.

    Example: [each.title for each in measures_among(["loss", "user/digits"])][-1] == "digits"
    """
    added = sorted({name for name in names if name.startswith(PREFIX)})
    return [*MEASURES, *(Measure(name, name.removeprefix(PREFIX), "", False, _metric(name)) for name in added)]


def by_seed(runs: Iterable[MeasuredRun], of: Callable[[MeasuredRun], float | None]) -> dict[int, float]:
    return {run.seed: value for run in runs if (value := of(run)) is not None and not math.isnan(value)}
