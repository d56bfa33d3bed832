"""The result of a comparison as plain values: the contents of compare.json and the source of the reports."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from proximo.algorithms import explain
from proximo.config import toml
from proximo.insight.compare.fairness import FairnessCheck, checks, first_difference, fork_checks
from proximo.insight.compare.measured import MeasuredRun, by_seed, measures_among
from proximo.insight.compare.page.curves import HELD_OUT, ComparisonCurve, all_curves
from proximo.insight.compare.paired import Difference, answer_difference, seed_difference, step_difference
from proximo.insight.compare.plan import Budget, ComparisonPlan, Contender
from proximo.learner.footprint import moments_on
from proximo.models import pick_device, pick_dtype
from proximo.rl.config import RunConfig
from proximo.rl.evaluate import known_mean
from proximo.rl.preflight.estimate import held_models
from proximo.runs.config_changes import flat
from proximo.system.lines import plain

FORMAT = 1


@dataclass(frozen=True)
class Model:
    """A set of weights that a run keeps in memory."""

    role: str
    parameters: int
    trained: bool
    bytes: int
    """Bytes, including gradients and moments if it is trained."""


@dataclass(frozen=True)
class Standing:
    """A contender's runs: values by seed, or means over the finished seeds."""

    name: str
    algorithm: str
    deviations: Sequence[str]
    """Differences from the named algorithm."""
    before: Mapping[int, float]
    after: Mapping[int, float]
    """Mean held-out task score after training, by seed."""
    steps: Mapping[int, int]
    tokens: Mapping[int, int]
    updates: Mapping[int, int]
    seconds: Mapping[int, float]
    phases: Mapping[str, float]
    """Seconds per step, by phase."""
    models: Sequence[Model]
    waste: Mapping[str, float]
    diverges: Mapping[int, int | None]
    """First step, by seed, at which it sampled other completions than the first contender."""
    unfinished: Mapping[int, str]
    """Seeds that are not finished, with the reason."""


@dataclass(frozen=True)
class Fork:
    """The point at which a contender was forked from the first."""

    at: int
    """Step after which it begins."""
    parting: Sequence[str]
    """The first update and the first draw that differ, in sentences; of the first seed."""


@dataclass(frozen=True)
class ComparisonResult:
    command: str
    task: str
    model: str
    budget: Budget
    seeds: Sequence[int]
    measure: Literal["accuracy", "outcome"]
    problems: int
    checks: Sequence[FairnessCheck]
    contenders: Sequence[Standing]
    differences: Sequence[Difference]
    settings: Mapping[str, Mapping[str, Any]]
    """Fields that differ between the configs, by contender."""
    curves: Sequence[ComparisonCurve]
    forked: Mapping[str, Fork] | None = None
    """Fork of each contender, if they are forks of the first; else None."""
    format: int = FORMAT

    @property
    def fair(self) -> bool:
        return bool(self.checks) and all(check.equal for check in self.checks)

    @property
    def measure_title(self) -> str:
        return "accuracy" if self.measure == "accuracy" else "task score"

    @property
    def first(self) -> str:
        """Name of the baseline."""
        return self.contenders[0].name

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, which has no NaN."""
        content = asdict(self) | {"fair": self.fair, "baseline": self.first}
        content["differences"] = [asdict(each) | {"verdict": each.verdict} for each in self.differences]
        return plain(content)


def make_result(
    plan: ComparisonPlan,
    runs: Mapping[str, Sequence[MeasuredRun]],
    unfinished: Mapping[str, Mapping[int, str]],
    command: str,
    forked: Mapping[str, Fork] | None = None,
) -> ComparisonResult:
    """The result of the finished `runs`, by contender; `unfinished` gives the reasons for the others. `forked`: of
    contenders that are forks of the first."""
    every = [run for each in runs.values() for run in each]
    first = runs[plan.contenders[0].name]
    return ComparisonResult(
        command=command,
        task=explain.choice(plan.contenders[0].config.task),
        model=", ".join(dict.fromkeys(each.config.model for each in plan.contenders)),
        budget=plan.budget,
        seeds=plan.seeds,
        measure="accuracy" if all(run.is_share for run in every) else "outcome",
        problems=max((len(run.result["examples"]) for run in every), default=0),
        checks=checks(plan, runs) if forked is None else fork_checks(plan, runs),
        contenders=[_standing(each, runs[each.name], first, unfinished.get(each.name, {})) for each in plan.contenders],
        differences=[
            each
            for name, theirs in runs.items()
            if theirs is not first
            for each in _differences(name, theirs, first, by_step=forked is not None)
        ],
        settings=_settings(plan.contenders),
        curves=all_curves(runs),
        forked=forked,
    )


def _standing(
    contender: Contender, runs: Sequence[MeasuredRun], first: Sequence[MeasuredRun], unfinished: Mapping[int, str]
) -> Standing:
    card = explain.nearest(contender.config.algorithm)
    names = dict.fromkeys(name for run in runs for name in run.phases)
    others = {run.seed: run for run in first}
    return Standing(
        name=contender.name,
        algorithm=card.name,
        deviations=explain.changes(card, contender.config.algorithm),
        before={run.seed: run.before for run in runs},
        after={run.seed: run.after for run in runs},
        steps={run.seed: run.steps for run in runs},
        tokens={run.seed: run.tokens for run in runs},
        updates={run.seed: run.updates for run in runs},
        seconds={run.seed: run.seconds for run in runs},
        phases={name: known_mean(run.phases.get(name, 0.0) for run in runs) for name in names},
        models=_models(contender.config),
        waste=_waste(runs),
        diverges={run.seed: first_difference(run, others[run.seed]) for run in runs if run.seed in others},
        unfinished=unfinished,
    )


def _models(config: RunConfig) -> list[Model]:
    try:
        device = pick_device(config.device)
        dtype, moments = (
            pick_dtype(config.dtype, device),
            moments_on(config.training.adam_moments, is_gpu=device != "cpu"),
        )
        return [
            Model(each.role, each.parameters, each.trained, each.bytes(dtype, moments)) for each in held_models(config)
        ]
    except ValueError:  # the model no longer exists
        return []


def _waste(runs: Sequence[MeasuredRun]) -> dict[str, float]:
    """Wasted tokens, as means over the seeds."""
    shares = {
        name: known_mean(known_mean(run.known(name)) for run in runs) for name in ("dead_rows", "rounds", "truncated")
    }
    totals = {name: known_mean(run.total(name) for run in runs) for name in ("unscored", "skipped_updates")}
    dropped = {
        "dropped_tokens": known_mean(run.dropped_tokens for run in runs),
        "dropped": known_mean(run.dropped_tokens / max(run.tokens, 1) for run in runs),
    }
    return dropped | shares | totals


def _differences(
    name: str, runs: Sequence[MeasuredRun], first: Sequence[MeasuredRun], *, by_step: bool
) -> list[Difference]:
    ours, theirs = ({run.seed: run.answers for run in each} for each in (runs, first))
    differences = [answer_difference(name, HELD_OUT, ours, theirs)]
    for measure in measures_among(name for run in runs for row in run.training for name in row):
        if by_step:
            steps = [
                {run.seed: {at: value for at, _, value in run.curve(measure)} for run in each} for each in (runs, first)
            ]
            differences.append(step_difference(name, measure.key, *steps))
            continue
        values = [by_seed(each, lambda run, measure=measure: run.whole(measure)) for each in (runs, first)]
        differences.append(seed_difference(name, measure.key, *values))
    return [each for each in differences if each.by_seed]


def _settings(contenders: Sequence[Contender]) -> dict[str, dict[str, Any]]:
    configs = {each.name: dict(flat(tomllib.loads(toml.dumps(each.config)))) for each in contenders}
    fields = sorted({field for config in configs.values() for field in config})
    by_field = {field: {name: config.get(field) for name, config in configs.items()} for field in fields}
    return {field: values for field, values in by_field.items() if len({repr(value) for value in values.values()}) > 1}
