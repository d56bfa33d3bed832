"""The important curves of a reinforcement-learning run; for other stages all metrics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from proximo.insight.charts.bars import bar_chart
from proximo.insight.charts.drawing import Number, Series, line_chart
from proximo.insight.charts.pages import Html, text
from proximo.insight.reading import is_number, phases, real
from proximo.insight.report.run_details import RunDetails

MAX_PARTS = 24
"""Maximum number of charts of a stage, and of parts of a reward, whose names are not known here."""


TITLES = {"accuracy": "accuracy of pairs"}
"""Titles of a stage's metrics that are not their names."""


@dataclass(frozen=True)
class Chart:
    title: str
    lines: Sequence[Series]
    unit: str = ""

    @property
    def is_empty(self) -> bool:
        return not any(is_number(value) for line in self.lines for _, value in line.points)

    @property
    def is_zero(self) -> bool:
        """True if the chart is zero throughout: then a word is enough."""
        return all(value == 0 for line in self.lines for _, value in line.points if is_number(value))


def curves(details: RunDetails) -> str:
    charts = [
        chart for chart in (_of_stage(details) if details.config is None else _of_run(details)) if not chart.is_empty
    ]
    drawn = [line_chart(each.title, each.lines, unit=each.unit) for each in charts if not each.is_zero]
    drawn += [_seconds(details)] if details.timings else []
    zero = ", ".join(
        line.name if len(each.lines) > 1 else each.title.lower()
        for each in charts
        if each.is_zero
        for line in each.lines
    )
    note = f'<p class="faint note">Zero throughout: {text(zero)}.</p>\n' if zero else ""
    return f'<div class="charts">\n{"".join(drawn)}</div>\n{note}' if drawn or note else ""


def _of_run(details: RunDetails) -> list[Chart]:
    limit = "" if details.config is None else f"tokens, at most {details.config.sampling.max_tokens}"
    of = partial(_chart, details)
    return [
        _outcome(details),
        of("Length", {"length": "length"}, limit, band=("length_p10", "length_p90")),
        of("Entropy", {"entropy": "entropy"}, "nats a token, of all that was sampled"),
        of("KL to the reference", {"kl": "KL"}, "nats a token"),
        _held_back(details),
        of("Gradient norm", {"gradient_norm": "mean", "gradient_norm_max": "largest"}, "before clipping"),
        of("No-signal groups", {"dead_groups": "all equal", "dead_solved": "all solved"}, "share"),
        of("Left out", {"truncated": "truncated", "wasted_tokens": "wasted tokens"}, "share"),
        of("Largest ratio", {"ratio_max": "ratio"}, "new to old policy"),
        of("Value model", {"explained_variance": "explained variance", "value_loss": "loss"}),
        of("Unscored", {"unscored": "completions"}),
        of("Skipped updates", {"skipped_updates": "updates"}),
        _parts(details),
        _seconds_by_step(details),
    ]


def _of_stage(details: RunDetails) -> list[Chart]:
    """One chart per metric, with training and held-out values."""
    names = dict.fromkeys(chain.from_iterable([*details.training, *details.evaluations]))
    known = [name for name in names if not name.startswith("held_out/") and name != "step"]
    return [
        Chart(_titled(name), [Series("training", details.curve(name)), Series("held-out", _evaluated(details, name))])
        for name in known[:MAX_PARTS]
    ]


def _titled(name: str) -> str:
    """Example: _titled("chosen_reward") == "chosen reward"."""
    return TITLES.get(name, name.replace("_", " "))


def _outcome(details: RunDetails) -> Chart:
    outcome, reward = details.curve("outcome"), details.curve("reward")
    lines = [Series("training", outcome), Series("held-out", _evaluated(details, "outcome"), _band(details))]
    # Often the reward is just the outcome.
    return Chart("Task score", lines if reward == outcome else [*lines, Series("reward", reward)])


def _band(details: RunDetails) -> list[tuple[Number, float, float]]:
    """The interval is that of the accuracy, so it applies only if task scores are right or wrong."""
    return [
        (row["step"], real(row.get("low")), real(row.get("high")))
        for row in details.evaluations
        if real(row.get("outcome")) == real(row.get("accuracy"))
    ]


def _evaluated(details: RunDetails, name: str) -> list[tuple[Number, float]]:
    return [(row["step"], float(row[name])) for row in details.evaluations if is_number(row.get(name))]


def _chart(
    details: RunDetails, title: str, names: Mapping[str, str], unit: str = "", band: tuple[str, str] | None = None
) -> Chart:
    edges = [details.curve(name) for name in band or ()]
    between = [(x, low, high) for (x, low), (_, high) in zip(*edges, strict=True)] if edges and all(edges) else []
    lines = [Series(label, details.curve(name), between) for name, label in names.items()]
    return Chart(title, [line for line in lines if line.points], unit)


def _held_back(details: RunDetails) -> Chart:
    """One axis for all gates: the share of the gradient that a clip or a soft gate removes."""
    gate = Series("all", [(step, 1 - value) for step, value in details.curve("gate")])
    sides = [Series("clipped above", details.curve("clip_high")), Series("clipped below", details.curve("clip_low"))]
    clipped = [side for side in sides if any(value > 0 for _, value in side.points)]
    return Chart("Clipped", [gate, *clipped], "share of the gradient")


def _parts(details: RunDetails) -> Chart:
    names = sorted({name for row in details.training for name in row if name.startswith("rewards/")})
    lines = [Series(name.removeprefix("rewards/"), details.curve(name)) for name in names[:MAX_PARTS]]
    return Chart("Parts of the reward", lines)


def _seconds_by_step(details: RunDetails) -> Chart:
    """Timings by step; for a repeated step, the last."""
    rows = {row["step"]: phases(row) for row in details.timings if is_number(row.get("step"))}
    names = dict.fromkeys(chain.from_iterable(rows.values()))
    lines = [Series(name, [(step, rows[step].get(name, math.nan)) for step in sorted(rows)]) for name in names]
    return Chart("Seconds a step", lines)


def _seconds(details: RunDetails) -> Html:
    totals: dict[str, Number] = {}
    for row in details.timings:
        for name, seconds in phases(row).items():
            totals[name] = totals.get(name, 0.0) + seconds
    return bar_chart("Seconds by phase", list(totals.items()), unit="of the whole run")
