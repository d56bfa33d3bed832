"""A run in a terminal: the verdict, its main curves as sparklines, the last events and the newest completion."""

import itertools
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from proximo.insight.doctor.verdict import Verdict, judge
from proximo.insight.folder import RunFolder, State
from proximo.rl.progress import BARS
from proximo.runs.files import EVENTS, METRICS
from proximo.runs.health import Finding, monitored
from proximo.runs.health.history import number
from proximo.runs.rollout_files import rollouts

SCORE, ACCURACY, OF_PAIRS, HELD_OUT_LOSS = "task score", "held-out accuracy", "held-out pairs right", "held-out loss"
CURVES = (
    (ACCURACY, "held_out/accuracy", True),
    (SCORE, "outcome", True),
    ("reward", "reward", False),
    ("length", "length", False),
    ("entropy", "entropy", False),
    ("KL to the reference", "kl", False),
    ("truncated", "truncated", True),
    ("no-signal groups", "dead_groups", True),
    ("gradient norm", "gradient_norm", False),
    ("loss", "loss", False),
    (HELD_OUT_LOSS, "held_out/loss", False),
)
"""Curves in the order they are shown: title, metric, and whether it is a share."""
MAX_EVENTS = 5


@dataclass(frozen=True)
class Sparkline:
    title: str
    values: Sequence[float]
    is_share: bool

    def line(self, width: int) -> str:
        return spark(self.values, width)

    @property
    def ends(self) -> str:
        """The first and the last value."""
        first, last = (self._shown(value) for value in (self.values[0], self.values[-1]))
        return first if first == last else f"{first} → {last}"

    def _shown(self, value: float) -> str:
        return f"{value:.1%}" if self.is_share else f"{value:.3g}"


@dataclass(frozen=True)
class Sample:
    """A completion of the newest stored step."""

    step: int
    prompt: str
    text: str
    outcome: float | None


@dataclass(frozen=True)
class RunSnapshot:
    """View of a run in the terminal at one moment."""

    name: str
    state: State
    steps: int
    of_steps: int | None
    verdict: Verdict
    findings: Sequence[Finding]
    curves: Sequence[Sparkline]
    events: Sequence[str]
    sample: Sample | None


def look(run: RunFolder) -> RunSnapshot:
    """The run now. Its checkpoints and rollouts are not verified, unlike in `proximo doctor`, so that this is quick."""
    rows = run.rows(METRICS)
    steps, standing = int(rows[-1]["step"]) if rows else 0, monitored(rows).standing()
    return RunSnapshot(
        name=run.name,
        state=run.state,
        steps=steps,
        of_steps=_of_steps(run),
        verdict=judge(run, rows, steps, standing),
        findings=standing,
        curves=_curves(rows),
        events=_events(run),
        sample=_sample(run),
    )


def spark(values: Sequence[float], width: int) -> str:
    """The whole curve in at most `width` characters, each the mean of a stretch, from its minimum to its maximum.

    Example: spark([0, 1, 2, 3], 4) == "▁▃▆█"
    """
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)] if count else []
    # Halves and shares first: the largest floats may not overflow.
    means = [math.fsum(value / 2 / (b - a) for value in values[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        return BARS[0] * len(means)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in means)


def _curves(rows: Sequence[dict[str, Any]]) -> list[Sparkline]:
    """The curves that the run has; the reward only if it is not the task score, the loss only of other stages."""
    curves: dict[str, Sparkline] = {}
    for title, metric, is_share in CURVES:
        values = [value for row in rows if not math.isnan(value := number(row, metric))]
        if values and not (metric == "loss" and SCORE in curves):
            curves[title] = Sparkline(title, values, is_share and 0 <= min(values) <= max(values) <= 1)
    if ACCURACY in curves and HELD_OUT_LOSS in curves:  # of reinforcement learning there is no such loss
        curves[ACCURACY] = replace(curves[ACCURACY], title=OF_PAIRS)
    if "reward" in curves and SCORE in curves and curves["reward"].values == curves[SCORE].values:
        del curves["reward"]
    return list(curves.values())


def _events(run: RunFolder) -> list[str]:
    """The last events that are not findings, newest last."""
    rows = [row for row in run.rows(EVENTS) if row.get("kind") != "finding"][-MAX_EVENTS:]
    return [f"step {row.get('step')}, {row.get('kind')}: {row.get('message', '')}" for row in rows]


def _sample(run: RunFolder) -> Sample | None:
    """The last completion of the newest stored step that can be read."""
    for step in reversed(run.steps()[-2:]):  # the newest file may be in the middle of being written
        try:
            with rollouts(run.step_file(step)) as stored:
                table = stored.read_row_group(stored.num_row_groups - 1, columns=["prompt", "text", "outcome"])
            [last] = table.slice(table.num_rows - 1).to_pylist()
        except (OSError, ValueError, pa.ArrowException):
            continue
        known = last["outcome"] is not None and math.isfinite(last["outcome"])
        return Sample(step, str(last["prompt"]), str(last["text"]), last["outcome"] if known else None)
    return None


def _of_steps(run: RunFolder) -> int | None:
    """Steps of the whole run: by its config, or by what a stage recorded, whose config has epochs."""
    try:
        steps = tomllib.loads(run.config_text).get("steps", run.record.get("steps"))
    except (ValueError, RecursionError):
        return None
    return steps if isinstance(steps, int) and not isinstance(steps, bool) else None
