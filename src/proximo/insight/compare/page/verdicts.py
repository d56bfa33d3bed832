"""The verdicts of a comparison: held-out task scores compared with the first's, and whether it was fair."""

from collections.abc import Mapping, Sequence

from proximo.insight.compare.page.curves import HELD_OUT
from proximo.insight.compare.page.report_parts import Block, Intervals, Lead, ReportTable
from proximo.insight.compare.paired import Difference
from proximo.insight.compare.result import ComparisonResult

JUDGED = {"higher": "better", "lower": "worse", "the same": "no difference at all"}
"""Words for measures where higher is better."""
FEW = {
    1: " with this one seed; nothing is known about others",
    2: "; two seeds cannot decide, give --seeds 3 or more",
}
FEW_FORKED = FEW | {2: "; two seeds cannot decide, fork the run of a third"}
"""Words added to a sentence, by the number of seeds."""
INTERVALS = (
    "Intervals are 95 %: Student's t over seeds, and for held-out answers also over problems, paired answer by answer "
    "(with one win and one loss added to their spread, each as large as the largest there is), the two half widths "
    "added in quadrature. Each stands for itself; of twenty such intervals one misses."
)


def verdict_lines(result: ComparisonResult) -> list[str]:
    """One sentence for each contender except the first."""
    return [_sentence(result, each) for each in result.differences if each.measure == HELD_OUT]


def fair_line(result: ComparisonResult) -> str:
    if not result.checks:
        return "Nothing to compare: no run is finished."
    wrong = [f"{check.what} ({check.detail})" for check in result.checks if not check.equal]
    if wrong:
        return f"Not a fair comparison. Not equal: {'; '.join(wrong)}."
    known = {check.what: check.detail for check in result.checks}
    if result.forked is not None:
        return (
            f"Fair: forks of the same run ({known.get('task', '')}), with the same data, held-out problems and last "
            f"step, and the same first rollout after the fork ({known.get('first rollout', '')})."
        )
    return (
        f"Fair: the same task ({known.get('task', '')}), seeds ({known.get('seeds', '')}), model, data and held-out "
        f"problems, the same first rollout ({known.get('first rollout', '')}), and an equal budget."
    )


def _sentence(result: ComparisonResult, difference: Difference) -> str:
    scope = (FEW if result.forked is None else FEW_FORKED).get(len(difference.by_seed), "")
    against = f"{difference.contender} against {result.first}"
    if difference.verdict == "the same":
        return f"{against}: {_judged(difference)}, every held-out answer is as good{scope}."
    gained, interval = gain(result, difference.difference), _interval(result, difference)
    return f"{against}: {gained} ({interval}): {_judged(difference)}{scope}."


def verdict(result: ComparisonResult) -> list[Block]:
    """Held-out task scores, the main result."""
    known = {each.contender: each for each in result.differences if each.measure == HELD_OUT}
    seeds = len(result.seeds)
    spent = f"{result.budget} for each run" if result.forked is None else "the last step"
    lead = (
        f"Held-out {result.measure_title} on {result.problems:,} problems after {spent}, {seeds} "
        f"seed{'s' * (seeds > 1)}."
        + ("" if result.forked is None else " Before: at the fork, or the last evaluation until then.")
    )
    missing = [
        f"{each.name} seed {seed} is not finished: {why}"
        for each in result.contenders
        for seed, why in each.unfinished.items()
    ]
    rows = [
        [
            each.name,
            level(result, each.before),
            level(result, each.after),
            " / ".join(share(result, value) for value in each.after.values()),
            *_compared(result, known.get(each.name)),
        ]
        for each in result.contenders
    ]
    compared = [f"against {result.first}", "95 % interval", "better / worse answers", "verdict"]
    table = ReportTable(["", "before", "after", "each seed", *compared], rows)
    drawn = [_drawn(result, list(known.values()))] if known else []
    return [lead, *map(Lead, verdict_lines(result)), *drawn, *missing, table, INTERVALS]


def _drawn(result: ComparisonResult, differences: Sequence[Difference]) -> Intervals:
    scale, unit = (100, "points") if result.measure == "accuracy" else (1, "")
    rows = [
        (each.contender, scale * each.difference, scale * low, scale * high, gain(result, each.difference, bare=True))
        for each in differences
        for low, high in ([each.interval] if each.interval is not None else [])
    ]
    return Intervals(f"held-out {result.measure_title} against {result.first}", unit, rows)


def _compared(result: ComparisonResult, difference: Difference | None) -> Sequence[str]:
    if difference is None:
        return ["–"] * 4
    few = {1: " (one seed)", 2: " (two seeds cannot decide)"}.get(len(difference.by_seed), "")
    answers = f"{difference.wins} / {difference.losses}"
    return [gain(result, difference.difference), _interval(result, difference), answers, _judged(difference) + few]


def _interval(result: ComparisonResult, difference: Difference) -> str:
    return " to ".join(gain(result, end, bare=True) for end in difference.interval or ()) or "–"


def _judged(difference: Difference) -> str:
    words = difference.verdict or "not known"
    return JUDGED.get(words, words)


def fair(result: ComparisonResult) -> list[Block]:
    """The checks, and the step from which on completions differ."""
    if not result.checks:
        return []
    rows = [[check.what, "yes" if check.equal else "NO", check.detail] for check in result.checks]
    parts = [
        f"{each.name} " + ", ".join(f"{_step(step)} (seed {seed})" for seed, step in each.diverges.items())
        for each in result.contenders[1:]
        if each.diverges
    ]
    if result.forked is not None:
        return [fair_line(result), ReportTable(["", "equal", ""], rows)]
    first = f"First step for which other completions were sampled than by {result.first}: {'; '.join(parts)}."
    return [fair_line(result), ReportTable(["", "equal", ""], rows), *([first] if parts else [])]


def parted(result: ComparisonResult) -> list[Block]:
    """Start of each fork, and its first differences from the run."""
    blocks: list[Block] = []
    for name, fork in (result.forked or {}).items():
        blocks += [Lead(f"{name} begins after step {fork.at} of {result.first}."), " ".join(fork.parting)]
    return blocks


def _step(step: int | None) -> str:
    return "none" if step is None else f"step {step}"


def level(result: ComparisonResult, values: Mapping[int, float]) -> str:
    return share(result, sum(values.values()) / len(values)) if values else "–"


def share(result: ComparisonResult, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1%}" if result.measure == "accuracy" else f"{value:.3f}"


def gain(result: ComparisonResult, value: float, *, bare: bool = False) -> str:
    """The number with its sign; exactly 0 has none."""
    points = result.measure == "accuracy"
    shown = signed(100 * value if points else value, ".1f" if points else ".3f")
    return shown if bare or not points else f"{shown} points"


def signed(value: float, form: str) -> str:
    return format(value, f"+{form}").replace("-", "−") if value else "0"
