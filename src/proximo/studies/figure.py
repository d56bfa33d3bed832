"""The figure of a study: one curve for each arm, a mean over the seeds with its interval, as an SVG file."""

import math

from proximo.insight.charts.drawing import Series, line_chart
from proximo.maths.intervals import half_width
from proximo.studies.finding import Findings
from proximo.training.rl.evaluate import known_mean

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


def figure(found: Findings) -> str:
    """SVG of the study's metric over the steps."""
    study = found.study
    series = [_series(found, arm.name) for arm in study.arms]
    title = f"{study.curve}, {len(study.seeds)} seeds, 95 % intervals"
    drawn = str(line_chart(title, series, width=WIDTH, height=HEIGHT))
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", f">{STYLE}", 1)


def _series(found: Findings, arm: str) -> Series:
    curves = [
        found.records[arm, seed].steps.get(found.study.curve, ())
        for seed in found.study.seeds
        if (arm, seed) in found.records
    ]
    points, band = [], []
    for index in range(max(map(len, curves), default=0)):
        values = [curve[index] for curve in curves if index < len(curve) and not math.isnan(curve[index])]
        mean, half = known_mean(values), half_width(values)
        points.append((index + 1, mean))
        band.append((index + 1, mean - half, mean + half))
    return Series(arm, points, band)
