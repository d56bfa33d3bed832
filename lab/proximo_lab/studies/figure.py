"""The figure of a study: one curve for each arm, a mean over the seeds with its interval, as an SVG file."""

import math
from collections import defaultdict
from collections.abc import Iterable

from proximo.insight.charts.drawing import Series, line_chart
from proximo.losses.intervals import half_width
from proximo.rl.evaluate import known_mean
from proximo_lab.studies.finding import Findings
from proximo_lab.studies.record import Record
from proximo_lab.studies.study import Study

WIDTH, HEIGHT = 720, 340
STYLE = """<style>
svg { font-family: sans-serif; font-size: 11px; background: #ffffff }
text { fill: #4d545c } .name { fill: #1b1e22; font-size: 12.5px; font-weight: 600 }
.grid { stroke: #dfe2e6 } .axis { stroke: #666d75 } .strip { display: none }
.line { fill: none; stroke: currentcolor; stroke-width: 1.7 } .dot { fill: currentcolor }
.band { fill: currentcolor; opacity: 0.14 } .again .line { stroke-dasharray: 5 3 } .label { fill: currentcolor }
.s1 { color: #1e5581 } .s2 { color: #c97c1e } .s3 { color: #369a88 } .s4 { color: #5f0a4a }
.s5 { color: #6a6644 } .s6 { color: #6057cc } .s7 { color: #d7366e } .s8 { color: #8b1d0e }
</style>"""
"""The look of the project's charts without a page around them."""

SHARES = ("outcome", "mean_at_k", "pass_at_k", "truncated", "dead_groups", "loops")
"""Metrics between 0 and 1, whose intervals are cut there."""


def figure(findings: Findings) -> str:
    """SVG of the study's metric over the steps."""
    study = findings.study
    series = [_series(findings, name) for name in study.drawn or [arm.name for arm in study.arms]]
    title = f"{study.figure}, {len(study.seeds)} seeds, 95 % intervals"
    drawn = str(line_chart(title, series, width=WIDTH, height=HEIGHT))
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", f">{STYLE}", 1)


def has_gaps(findings: Findings) -> bool:
    """Tell whether some seed has no number at a step where another has one."""
    names = findings.study.drawn or [arm.name for arm in findings.study.arms]
    return any(
        0 < len(known) < len(findings.study.seeds) for name in names for known in _at_steps(findings, name).values()
    )


def _at_steps(findings: Findings, arm: str) -> dict[float, list[float]]:
    """Numbers of the seeds that have one, by steps done."""
    at: defaultdict[float, list[float]] = defaultdict(list)
    for seed in findings.study.seeds:
        if record := findings.records.get((arm, seed)):
            for step, value in _curve(findings.study, record):
                at[step] += [] if math.isnan(value) else [value]
    return at


def _series(findings: Findings, arm: str) -> Series:
    points, band = [], []
    for step, known in sorted(_at_steps(findings, arm).items()):
        mean, half = known_mean(known), half_width(known)
        points.append((step, mean))
        band.append((step, mean - half, mean + half))
    if findings.study.curve in SHARES:
        band = [(step, max(low, 0.0), min(high, 1.0)) for step, low, high in band]
    return Series(arm, points, band)


def _curve(study: Study, record: Record) -> Iterable[tuple[float, float]]:
    """Steps done, and the metric."""
    if study.held_out:
        return zip(record.held_out.get("step", ()), record.held_out.get(study.curve, ()), strict=False)
    return enumerate(record.steps.get(study.curve, ()), start=1)
