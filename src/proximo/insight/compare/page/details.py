"""The details behind a verdict: curves, other measures, waste, cost and settings."""

from collections.abc import Mapping, Sequence
from typing import Any

from proximo.insight.charts.drawing import Series
from proximo.insight.compare.measured import measures_among
from proximo.insight.compare.page.curves import AXES, HELD_OUT, ComparisonCurve
from proximo.insight.compare.page.report_parts import Block, CodeBlock, ReportChart, ReportTable
from proximo.insight.compare.page.verdicts import share, signed
from proximo.insight.compare.result import ComparisonResult

UNKNOWN = {False: "unknown with one seed", True: "unknown with fewer than four steps"}
PAIRED = {
    False: "Paired by seed.",
    True: "Paired by step, since both runs had the same prompts. With one seed the intervals are over blocks of "
    "neighbouring steps: they cover other draws, not other seeds.",
}
"""Words for comparisons of runs, and of a run with its forks."""
SHOWN = 8
"""Maximum evaluations shown as numbers."""


def curves(result: ComparisonResult) -> list[Block]:
    """Each measure along steps and along tokens; in the text version the first one as numbers."""
    titles = {
        HELD_OUT: (f"held-out {result.measure_title}", "greedy"),
        **{each.key: (each.title, each.unit) for each in measures_among(each.measure for each in result.curves)},
    }
    charts: list[Block] = []
    for key, (title, unit) in titles.items():
        for axis in AXES:
            shown = [each for each in result.curves if each.measure == key and each.axis == axis]
            if any(each.mean for each in shown):
                charts.append(_chart(shown, f"{title} by {axis}", unit, axis))
    if not charts:
        return []
    shared = [each for each in result.curves if each.measure == HELD_OUT and each.axis == "steps"]
    return [
        "Lines are means over seeds, bands their 95 % intervals over seeds (from three on), faint lines the seeds.",
        *charts,
        _numbers(result, shared),
    ]


def _chart(curves: Sequence[ComparisonCurve], title: str, unit: str, axis: str) -> ReportChart:
    faint = [Series(each.contender, points) for each in curves for points in each.seeds.values() if len(each.seeds) > 1]
    series = [Series(each.contender, each.mean, each.band) for each in curves]
    return ReportChart(title, unit, "step" if axis == "steps" else axis, series, faint)


def _numbers(result: ComparisonResult, curves: Sequence[ComparisonCurve]) -> ReportTable:
    """Held-out means by number of steps; a contender with fewer steps has fewer."""
    steps = sorted({x for each in curves for x, _ in each.mean[:-1]})
    steps = steps[:: max(1, -(-len(steps) // SHOWN))]
    rows = []
    for each in curves:
        values = dict(each.mean[:-1])
        last = [f"{share(result, each.mean[-1][1])} after {each.mean[-1][0]:,.0f} steps"] if each.mean else ["–"]
        rows.append([each.contender, *(share(result, values.get(step)) for step in steps), *last])
    return ReportTable(["held-out", *(f"after {step:,.0f}" for step in steps), "at the end"], rows)


def way(result: ComparisonResult) -> list[Block]:
    """All measures but the held-out task score; they are higher or lower, not better."""
    rows, forked = [], result.forked is not None
    for measure in measures_among(each.measure for each in result.differences):
        label = f"{measure.title}, mean from the fork on" if forked else measure.label
        for difference in (each for each in result.differences if each.measure == measure.key):
            interval = " to ".join(signed(end, ".3g") for end in difference.interval or ()) or "–"
            verdict = (
                "no difference at all" if difference.verdict == "the same" else difference.verdict or UNKNOWN[forked]
            )
            means = [f"{difference.mean:.3g}", f"{difference.mean - difference.difference:.3g}"]
            rows.append([label, difference.contender, *means, signed(difference.difference, ".3g"), interval, verdict])
            label = ""
    header = ["measure", "", "mean", result.first, "difference", "95 % interval", ""]
    words = (
        f"{PAIRED[forked]} Entropy is minus the mean log-probability of everything that was sampled, so that it is of "
        "the same rows for all. Clipped is the share of the gradient that clipping or a soft gate takes from the "
        "tokens that were trained on, all of it for each that is clipped: hard and soft gates on one axis. Wasted "
        "samples: dropped groups, and completions whose advantage is zero."
    )
    return [words, ReportTable(header, rows)] if rows else []


def waste(result: ComparisonResult) -> list[Block]:
    header = ["", "steps", "updates", "tokens", "in dropped groups", "rows without advantage", "rounds a step"]
    header += ["truncated", "unscored", "updates skipped"]
    rows = [
        [
            each.name,
            _range(each.steps),
            _range(each.updates),
            _range(each.tokens),
            f"{each.waste['dropped_tokens']:,.0f} ({each.waste['dropped']:.1%})",
            f"{each.waste['dead_rows']:.1%}",
            f"{each.waste['rounds']:.2f}",
            f"{each.waste['truncated']:.1%}",
            f"{each.waste['unscored']:.0f}",
            f"{each.waste['skipped_updates']:.0f}",
        ]
        for each in result.contenders
        if each.steps
    ]
    return [ReportTable(header, rows)] if rows else []


def cost(result: ComparisonResult) -> list[Block]:
    """Seconds by phase, and the memory of each model."""
    phases = list(dict.fromkeys(name for each in result.contenders for name in each.phases))
    rows = [
        [each.name, _range(each.seconds), *(f"{1000 * each.phases.get(name, 0.0):.1f}" for name in phases)]
        for each in result.contenders
        if each.seconds
    ]
    models = [
        [
            each.name if index == 0 else "",
            model.role,
            f"{model.parameters / 1e6:.2f} M",
            "yes" if model.trained else "no",
            f"{model.bytes / 1e6:.1f} MB",
        ]
        for each in result.contenders
        for index, model in enumerate(each.models)
    ]
    words = (
        "Milliseconds of a step by phase, on this machine with other runs in parallel. What a reference or a value "
        "model takes is part of assemble, and a value model's training of update. Memory is that of weights, with "
        "gradients and two moments where they are trained; activations come on top."
    )
    times = ReportTable(["", "seconds a run", *phases], rows)
    return [words, times, ReportTable(["", "model", "parameters", "trained", "memory"], models)] if rows else []


def settings(result: ComparisonResult) -> list[Block]:
    """The fields that differ, and the differences from the named algorithms."""
    names = [each.name for each in result.contenders]
    rows = [[field, *(_setting(values.get(name)) for name in names)] for field, values in result.settings.items()]
    deviations = [
        f"{each.name}: {each.algorithm.upper()} as it is named, in every choice."
        if not each.deviations
        else f"{each.name}: no longer {each.algorithm.upper()}: {'; '.join(each.deviations)}."
        for each in result.contenders
    ]
    table = [ReportTable(["field", *names], rows)] if rows else ["The configs are equal in every field."]
    return [*deviations, *table]


def _setting(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def repeat(result: ComparisonResult) -> list[Block]:
    words = "The same command resumes unfinished runs; in another folder it gives the same numbers again."
    return [CodeBlock(result.command), words if result.forked is None else "Nothing is trained: the runs are read."]


def _range(values: Mapping[int, int] | Mapping[int, float]) -> str:
    low, high = min(values.values()), max(values.values())
    return f"{low:,.0f}" if round(low) == round(high) else f"{low:,.0f}–{high:,.0f}"
