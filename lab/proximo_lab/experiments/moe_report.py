"""The runs of proximo_lab.experiments.moe_stability as a table, as JSON and CSV, and as charts.

A run that has collapsed has equal outcomes in every group, so nothing moves any more: its later steps would pull
every mean towards 0. So means are taken over the steps that all arms of a seed have in common before the first of
them collapses, and the number of those steps is reported.
"""

import csv
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from proximo_lab.experiments.charts import line_chart

COLLAPSED, WINDOW = 0.8, 10
"""A run has collapsed when its last ten steps earn less than this share of its best ten in a row."""
MEASURES = (
    "experts_first", "experts_step", "tokens_step", "token_spread", "token_spread_replayed", "sequence_spread",
    "token_beyond", "blocked", "gate", "entropy", "gradient_norm",
)  # fmt: skip
HEAD = (
    "arm", "held-out, mean@4", "outcome, last 10", "collapsed", "steps counted", "other experts after one update",
    "after the step", "tokens with any other expert", "token log-ratio std", "with the old routes",
    "sequence log-ratio std", "blocked", "gate", "gradient norm, median",
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """One run: an arm with a seed."""

    arm: str
    seed: int
    steps: Sequence[Mapping[str, float]]
    before: float
    """mean@4 on held-out prompts before training."""
    held_out: float
    """The same after it."""

    @classmethod
    def read(cls, path: Path, arm: str, seed: int) -> "Record":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return cls(arm, seed, rows[1:-1], rows[0]["held_out/mean_at_k"], rows[-1]["held_out/mean_at_k"])

    @property
    def outcomes(self) -> list[float]:
        return [row["outcome"] for row in self.steps]

    @property
    def collapse(self) -> int | None:
        """Number of steps after which the outcome stays below COLLAPSED of the best ten in a row; None: it did not."""
        outcomes = self.outcomes
        starts = range(max(1, len(outcomes) - WINDOW + 1))
        threshold = COLLAPSED * max(statistics.mean(outcomes[start : start + WINDOW]) for start in starts)
        if statistics.mean(outcomes[-WINDOW:]) >= threshold:
            return None
        return max((step + 1 for step, outcome in enumerate(outcomes) if outcome >= threshold), default=0)


def common_steps(records: Iterable[Record]) -> dict[int, int]:
    """Number of steps, by seed, that all arms have before the first of them collapses."""
    shared: dict[int, int] = {}
    for record in records:
        steps = len(record.steps) if record.collapse is None else record.collapse
        shared[record.seed] = min(shared.get(record.seed, steps), steps)
    return shared


def means(record: Record, steps: int) -> dict[str, float]:
    """Mean of each measure over the first `steps` steps, as far as they have it."""
    return {name: mean(row.get(name, math.nan) for row in record.steps[:steps]) for name in MEASURES}


def summary(records: Sequence[Record]) -> list[dict]:
    """One entry for each run."""
    common = common_steps(records)
    return [
        {
            "arm": record.arm,
            "seed": record.seed,
            "before": record.before,
            "held_out": record.held_out,
            "outcome_last_10": mean(record.outcomes[-WINDOW:]),
            "collapse_step": record.collapse,
            "steps": len(record.steps),
            "steps_with_gradient": sum(row.get("blocked") is not None for row in record.steps),
            "steps_counted": common[record.seed],
            **means(record, common[record.seed]),
        }
        for record in records
    ]


def table(records: Sequence[Record]) -> str:
    runs = summary(records)
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    for arm in dict.fromkeys(record.arm for record in records):
        arm_runs = [run for run in runs if run["arm"] == arm]
        average = {name: mean(run[name] for run in arm_runs) for name in MEASURES}
        norms = [row["gradient_norm"] for record in records if record.arm == arm for row in record.steps
                 if row.get("gradient_norm") is not None]  # fmt: skip
        cells = (
            arm,
            " / ".join(f"{run['held_out']:.0%}" for run in arm_runs),
            f"{mean(run['outcome_last_10'] for run in arm_runs):.3f}",
            f"{sum(run['collapse_step'] is not None for run in arm_runs)} of {len(arm_runs)}",
            f"{sum(run['steps_counted'] for run in arm_runs)} of {sum(run['steps'] for run in arm_runs)}",
            f"{average['experts_first']:.1%}",
            f"{average['experts_step']:.1%}",
            f"{average['tokens_step']:.1%}",
            f"{average['token_spread']:.3f}",
            f"{average['token_spread_replayed']:.3f}",
            f"{average['sequence_spread']:.3f}",
            f"{average['blocked']:.1%}",
            f"{average['gate']:.3f}",
            f"{statistics.median(norms) if norms else math.nan:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(records: Sequence[Record], folder: Path, stem: str, settings: Mapping[str, object]) -> None:
    """STEM.json with one entry a run, STEM.csv with one line a step, STEM.md with the table, and the charts."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [{name: None if value != value else value for name, value in run.items()} for run in summary(records)]
    content = {"settings": settings, "collapsed_below": COLLAPSED, "runs": runs}
    (folder / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / f"{stem}.md").write_text(table(records) + "\n")
    with (folder / f"{stem}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "seed", "step", "outcome", *MEASURES])
        for record in records:
            for row in record.steps:
                values = [row.get(name) for name in ("step", "outcome", *MEASURES)]
                writer.writerow([record.arm, record.seed, *values])
    charts(records, folder, stem)


def charts(records: Sequence[Record], folder: Path, stem: str) -> None:
    for name, key, title in (
        ("outcome", "outcome", "Task score of the step's rollouts"),
        ("changed", "experts_step", "Share of experts that differ after a step"),
        ("token_spread", "token_spread", "Spread of token log-ratios over a step"),
        ("entropy", "entropy", "Entropy"),
    ):
        lines = {}
        for arm in dict.fromkeys(record.arm for record in records):
            runs = [record.steps for record in records if record.arm == arm]
            longest = max(map(len, runs))
            lines[arm] = [
                mean(run[step].get(key, math.nan) for run in runs if step < len(run)) for step in range(longest)
            ]
        seeds = len({record.seed for record in records})
        line_chart(folder / f"{stem}-{name}.svg", f"{title}, seeds: {seeds}", lines)


def mean(values: Iterable[float | None]) -> float:
    """Mean of the values that are known; NaN of none."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return statistics.mean(known) if known else math.nan
