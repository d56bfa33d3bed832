"""Draws the pictures of the guide on reading curves, into docs/images: `make curves`, ten minutes on two cores.

Four small runs, one of them healthy, and a chart for each number with a line for each run. `--runs DIR` keeps the runs.
"""

from pathlib import Path
from typing import NamedTuple

from real_runs import folder_of_runs, make

import proximo
from proximo.api.plots import plot_of
from proximo.insight.charts.drawing import Series, line_chart

IMAGES = Path(__file__).resolve().parent / "images"
EVALUATED = "--steps 60 --evaluation.every 10 --evaluation.problems 200"
LONG = "def long(completions, **columns):\n    return [len(text) / 40 for text in completions]\n"
"""A reward that pays for length."""


class Shown(NamedTuple):
    """A run of the pictures."""

    name: str
    command: str


RUNS = (
    Shown("healthy", f"train arithmetic {EVALUATED} --run runs/healthy"),
    Shown("rate too high", f"train arithmetic {EVALUATED} --learning-rate 6e-4 --kl 0 --run runs/fall"),
    Shown("paid for length", f"train length {EVALUATED} --reward ExactMatch long.py:long=2 --run runs/long"),
    Shown("too hard", f"train arithmetic {EVALUATED} --task.digits 5 --run runs/hard"),
)
CHARTS = {
    "held_out/accuracy": "held-out accuracy",
    "outcome": "task score in training",
    "entropy": "entropy, nats",
    "reference_kl": "KL to the reference, nats",
    "length": "length, tokens",
    "truncated": "truncated",
    "dead_groups": "no-signal groups",
}
"""Metrics, and the title of each one's chart."""


def main() -> None:
    with folder_of_runs(__doc__) as (home, is_made):
        (home / "long.py").write_text(LONG)
        if is_made:
            make(home, [shown.command for shown in RUNS])
        for metric, title in CHARTS.items():
            chart = line_chart(title, [series(home, shown, metric) for shown in RUNS], width=640, height=220)
            plot_of(title, chart).save(IMAGES / f"curve-{metric.replace('/', '-').replace('_', '-')}.svg")


def series(home: Path, shown: Shown, metric: str) -> Series:
    folder = home / shown.command.rpartition(" ")[2]
    rows = proximo.open_run(folder).metrics().to_pylist()
    return Series(shown.name, [(row["step"], row[metric]) for row in rows if row.get(metric) is not None])


if __name__ == "__main__":
    main()
