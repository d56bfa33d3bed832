"""Whether a comparison is fair: what all runs have in common, and where they start to differ."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proximo.insight.compare.measured import Run
from proximo.insight.compare.plan import ComparisonPlan
from proximo.runs.run_json import COMPARED

EVEN = 0.05
"""Share of the budget by which the sampled tokens of two runs may differ."""


@dataclass(frozen=True)
class Check:
    what: str
    equal: bool
    detail: str


def checks(plan: ComparisonPlan, runs: Mapping[str, Sequence[Run]]) -> list[Check]:
    """What a fair comparison must have in common; the task and the number of held-out problems were checked before."""
    return _checks(plan, runs, lambda every: (_first_rollout(plan.seeds, runs), _budget(plan, every)))


def fork_checks(plan: ComparisonPlan, runs: Mapping[str, Sequence[Run]]) -> list[Check]:
    """What a run and its forks must have in common for their difference to be that of what was changed."""
    return _checks(plan, runs, lambda every: (_first_draws(runs), _last_step(every)))


def _checks(
    plan: ComparisonPlan, runs: Mapping[str, Sequence[Run]], own: Callable[[Sequence[Run]], Iterable[Check]]
) -> list[Check]:
    """`own`: the draws and the budget, which a kind of comparison has in common in a way of its own."""
    every = [run for each in runs.values() for run in each]
    if not every:
        return []
    return [
        Check("task", True, type(plan.contenders[0].config.task).__name__),
        seeds(plan, runs),
        *_recorded_alike(every),
        *own(every),
        _recorded("machine and versions", every, _computed_with),
    ]


def _recorded_alike(runs: Sequence[Run]) -> list[Check]:
    asked = _recorded("held-out problems", runs, _asked)
    return [_recorded("model and data", runs, _data, "equal by SHA-256"), asked]


def _first_draws(runs: Mapping[str, Sequence[Run]]) -> Check:
    """For each fork the prompts of its first step, and the same draws where its config changes none."""
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
    return Check("first rollout", not wrong, "; ".join(wrong) or f"{count:,} completions equal, token by token")


def _last_step(runs: Sequence[Run]) -> Check:
    least, most = (choose(runs, key=lambda run: run.facts.steps_done) for choose in (min, max))
    ends = f"{least.job} ends after step {least.facts.steps_done}, {most.job} after {most.facts.steps_done}"
    equal = least.facts.steps_done == most.facts.steps_done
    return Check("budget", equal, f"all end after step {most.facts.steps_done}" if equal else ends)


def first_difference(run: Run, other: Run) -> int | None:
    """The first step for which two runs sampled different completions; None if there is none, or no data. A run that
    sampled more, to refill a step, counts as equal if it has all completions of the other."""
    shorter, longer = sorted((run.facts.steps_done, other.facts.steps_done))
    for step in range(max(run.since, other.since) + 1, shorter + 1):
        ours, theirs = sampled(run, step), sampled(other, step)
        if ours is None or theirs is None:
            return None
        if not _covers(ours, theirs):
            return step
    return shorter + 1 if shorter < longer else None


def sampled(run: Run, step: int) -> Counter[tuple[str, tuple[int, ...]]] | None:
    """The completions of a step, including dropped ones, as problems and tokens; None if not stored."""
    problems, tokens = run.column(step, "problem"), run.column(step, "tokens")
    if problems is None or tokens is None:
        return None
    return Counter(zip(problems.to_pylist(), map(tuple, tokens.to_pylist()), strict=True))


def _covers(ours: Counter[Any], theirs: Counter[Any]) -> bool:
    return ours <= theirs or theirs <= ours if ours and theirs else ours == theirs


def seeds(plan: ComparisonPlan, runs: Mapping[str, Sequence[Run]]) -> Check:
    missing = [
        f"{name} has no seed {seed}"
        for name, each in runs.items()
        for seed in plan.seeds
        if seed not in {run.seed for run in each}
    ]
    return Check("seeds", not missing, "; ".join(missing) or ", ".join(map(str, plan.seeds)))


def _recorded(what: str, runs: Sequence[Run], of: Callable[[Run], dict[str, Any]], equal: str = "equal") -> Check:
    """Check that all runs share these facts with the first."""
    first, *others = runs
    wanted, different = of(first), []
    for run in others:
        found = of(run)
        names = [name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)]
        different += [f"{', '.join(sorted(names))} of {run.job}"] if names else []
    return Check(what, not different, f"not that of {first.job}: {'; '.join(different)}" if different else equal)


def _asked(run: Run) -> dict[str, Any]:
    return {"problems": [each["problem"] for _, each in run.result["examples"]]}


def _data(run: Run) -> dict[str, str]:
    """Hashes of the policy and of the task's data; the name of a model that is not in a folder."""
    known = run.facts.record.get("fingerprints", {})
    ours = {field: digest for field, digest in known.items() if field.startswith("task.")}
    return {"model": known.get("model", run.job.config.model), **ours}


def _computed_with(run: Run) -> dict[str, Any]:
    """The machine at the start, and the versions of all attempts, which may differ."""
    record, attempts = run.facts.record, run.facts.attempts
    versions = {name: {str(each.get(name)) for each in attempts or [record]} for name in COMPARED}
    return {"machine": record.get("machine"), **versions}


def _first_rollout(seeds: Sequence[int], runs: Mapping[str, Sequence[Run]]) -> Check:
    """For each seed the same completions in the first step, token by token (dynamic sampling's first round)."""
    wrong, count = [], 0
    for seed in seeds:
        found = [(run, sampled(run, 1)) for each in runs.values() for run in each if run.seed == seed]
        wrong += [f"{run.job} has no rollouts" for run, completions in found if completions is None]
        known = [(run, completions) for run, completions in found if completions is not None]
        if known:
            least, completions = min(known, key=lambda each: each[1].total())
            count += completions.total()
            wrong += [f"{run.job} has others than {least.job}" for run, each in known if not completions <= each]
    return Check("first rollout", not wrong, "; ".join(wrong) or f"{count:,} completions equal, token by token")


def _budget(plan: ComparisonPlan, runs: Sequence[Run]) -> Check:
    budget = plan.budget
    if budget.kind == "updates":
        fewer = [f"{run.job} made {run.updates}" for run in runs if run.updates != budget.amount]
        return Check("budget", not fewer, "; ".join(fewer) or str(budget))
    # A run ends with the step that reaches the budget, so it exceeds it by less than a step.
    uneven = [f"{run.job} sampled {run.tokens:,}" for run in runs if run.tokens < budget.amount]
    least, most = (choose(runs, key=lambda run: run.tokens) for choose in (min, max))
    if not uneven and most.tokens - least.tokens > EVEN * budget.amount:
        uneven = [
            f"of {budget} {least.job} sampled {least.tokens:,} and {most.job} {most.tokens:,} to finish a step: give "
            "a larger budget of tokens, or smaller steps"
        ]
    over = most.tokens / budget.amount - 1
    return Check("budget", not uneven, "; ".join(uneven) or f"{budget}, and {over:.1%} more at most to finish a step")
