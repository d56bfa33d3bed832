"""Fairness of a comparison: what all runs have in common, and where they start to differ."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proximo.insight.compare.measured import MeasuredRun
from proximo.insight.compare.plan import ComparisonPlan
from proximo.runs.run_json import COMPARED

EVEN = 0.05
"""Share of the budget by which the sampled tokens of two runs may differ."""


@dataclass(frozen=True)
class FairnessCheck:
    what: str
    equal: bool
    detail: str


def checks(plan: ComparisonPlan, runs: Mapping[str, Sequence[MeasuredRun]]) -> list[FairnessCheck]:
    """Checks of a fair comparison; the task and the number of held-out problems were checked before."""
    return _checks(plan, runs, lambda every: (_first_rollout(plan.seeds, runs), _budget(plan, every)))


def fork_checks(plan: ComparisonPlan, runs: Mapping[str, Sequence[MeasuredRun]]) -> list[FairnessCheck]:
    """Checks that a run and its forks differ only in what was changed."""
    return _checks(plan, runs, lambda every: (_first_draws(runs), _last_step(every)))


def _checks(
    plan: ComparisonPlan,
    runs: Mapping[str, Sequence[MeasuredRun]],
    draws_and_budget: Callable[[Sequence[MeasuredRun]], Iterable[FairnessCheck]],
) -> list[FairnessCheck]:
    """`draws_and_budget` makes the checks that each kind of comparison has for itself."""
    every = [run for each in runs.values() for run in each]
    if not every:
        return []
    return [
        FairnessCheck("task", True, type(plan.contenders[0].config.task).__name__),
        seeds(plan, runs),
        *_recorded_alike(every),
        *draws_and_budget(every),
        _recorded("machine and versions", every, _computed_with),
    ]


def _recorded_alike(runs: Sequence[MeasuredRun]) -> list[FairnessCheck]:
    asked = _recorded("held-out problems", runs, _asked)
    return [_recorded("model and data", runs, _data, "equal by SHA-256"), asked]


def _first_draws(runs: Mapping[str, Sequence[MeasuredRun]]) -> FairnessCheck:
    """Check that each fork drew the completions of its parent in its first step; one of the two may have more."""
    parents, *arms = runs.values()
    known = {run.seed: run for run in parents}
    wrong, count = [], 0
    for run in (run for arm in arms for run in arm if run.seed in known):
        ours, theirs = (sampled(each, run.since + 1) for each in (run, known[run.seed]))
        if ours is None or theirs is None:
            wrong.append(f"{run.job} has no rollouts of its first step")
        elif not _covers(ours, theirs):
            wrong.append(f"{run.job} drew others than its parent for step {run.since + 1}")
        count += 0 if ours is None else ours.total()
    return FairnessCheck("first rollout", not wrong, "; ".join(wrong) or f"{count:,} completions equal, token by token")


def _last_step(runs: Sequence[MeasuredRun]) -> FairnessCheck:
    shortest, longest = (choose(runs, key=lambda run: run.details.steps_done) for choose in (min, max))
    fewest, last = shortest.details.steps_done, longest.details.steps_done
    ends = f"{shortest.job} ends after step {fewest}, {longest.job} after {last}"
    return FairnessCheck("budget", fewest == last, f"all end after step {last}" if fewest == last else ends)


def first_difference(run: MeasuredRun, other: MeasuredRun) -> int | None:
    """The first step for which two runs sampled different completions; None if there is none, or no data. A run that
    sampled more, to refill a step, counts as equal if it has all completions of the other."""
    shorter, longer = sorted((run.details.steps_done, other.details.steps_done))
    for step in range(max(run.since, other.since) + 1, shorter + 1):
        ours, theirs = sampled(run, step), sampled(other, step)
        if ours is None or theirs is None:
            return None
        if not _covers(ours, theirs):
            return step
    return shorter + 1 if shorter < longer else None


def sampled(run: MeasuredRun, step: int) -> Counter[tuple[str, tuple[int, ...]]] | None:
    """The completions of a step, including dropped ones, as problems and tokens; None if not stored."""
    problems, tokens = run.column(step, "problem"), run.column(step, "tokens")
    if problems is None or tokens is None:
        return None
    return Counter(zip(problems.to_pylist(), map(tuple, tokens.to_pylist()), strict=True))


def _covers(ours: Counter[Any], theirs: Counter[Any]) -> bool:
    return ours <= theirs or theirs <= ours if ours and theirs else ours == theirs


def seeds(plan: ComparisonPlan, runs: Mapping[str, Sequence[MeasuredRun]]) -> FairnessCheck:
    missing = [
        f"{name} has no seed {seed}"
        for name, each in runs.items()
        for seed in plan.seeds
        if seed not in {run.seed for run in each}
    ]
    return FairnessCheck("seeds", not missing, "; ".join(missing) or ", ".join(map(str, plan.seeds)))


def _recorded(
    what: str, runs: Sequence[MeasuredRun], of: Callable[[MeasuredRun], dict[str, Any]], equal: str = "equal"
) -> FairnessCheck:
    """Check that all runs share these values with the first."""
    first, *others = runs
    wanted, different = of(first), []
    for run in others:
        values = of(run)
        names = [name for name in wanted.keys() | values.keys() if wanted.get(name) != values.get(name)]
        different += [f"{', '.join(sorted(names))} of {run.job}"] if names else []
    return FairnessCheck(
        what, not different, f"not that of {first.job}: {'; '.join(different)}" if different else equal
    )


def _asked(run: MeasuredRun) -> dict[str, Any]:
    return {"problems": [each["problem"] for _, each in run.result["examples"]]}


def _data(run: MeasuredRun) -> dict[str, str]:
    """Hashes of the policy and of the task's data; the name of a model that is not in a folder."""
    known = run.details.record.get("fingerprints", {})
    ours = {field: digest for field, digest in known.items() if field.startswith("task.")}
    return {"model": known.get("model", run.job.config.model), **ours}


def _computed_with(run: MeasuredRun) -> dict[str, Any]:
    """The machine at the start, and the versions of all attempts, which may differ."""
    record, attempts = run.details.record, run.details.attempts
    versions = {name: {str(each.get(name)) for each in attempts or [record]} for name in COMPARED}
    return {"machine": record.get("machine"), **versions}


def _first_rollout(seeds: Sequence[int], runs: Mapping[str, Sequence[MeasuredRun]]) -> FairnessCheck:
    """Check that all runs of a seed have the same completions in the first step, those of its first round."""
    wrong, count = [], 0
    for seed in seeds:
        rollouts = [(run, sampled(run, 1)) for each in runs.values() for run in each if run.seed == seed]
        wrong += [f"{run.job} has no rollouts" for run, completions in rollouts if completions is None]
        known = [(run, completions) for run, completions in rollouts if completions is not None]
        if known:
            smallest, completions = min(known, key=lambda each: each[1].total())
            count += completions.total()
            wrong += [f"{run.job} has others than {smallest.job}" for run, each in known if not completions <= each]
    return FairnessCheck("first rollout", not wrong, "; ".join(wrong) or f"{count:,} completions equal, token by token")


def _budget(plan: ComparisonPlan, runs: Sequence[MeasuredRun]) -> FairnessCheck:
    budget = plan.budget
    if budget.kind == "updates":
        fewer = [f"{run.job} made {run.updates}" for run in runs if run.updates != budget.amount]
        return FairnessCheck("budget", not fewer, "; ".join(fewer) or str(budget))
    # A run ends with the step that reaches the budget, so it exceeds it by less than a step.
    uneven = [f"{run.job} sampled {run.tokens:,}" for run in runs if run.tokens < budget.amount]
    shortest, longest = (choose(runs, key=lambda run: run.tokens) for choose in (min, max))
    if not uneven and longest.tokens - shortest.tokens > EVEN * budget.amount:
        uneven = [
            f"of {budget} {shortest.job} sampled {shortest.tokens:,} and {longest.job} {longest.tokens:,} to finish a "
            "step: give a larger budget of tokens, or smaller steps"
        ]
    over = longest.tokens / budget.amount - 1
    return FairnessCheck(
        "budget", not uneven, "; ".join(uneven) or f"{budget}, and {over:.1%} more at most to finish a step"
    )
