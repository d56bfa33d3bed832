"""docs/journeys.md, from what was seen."""

from collections.abc import Mapping, Sequence
from typing import Any

from proximo_lab.journeys.user import Goal, effort

TITLES = {
    1: "A model, a GSM8K file and a reward of one's own",
    2: "Data of TRL, verl, verifiers and others",
    4: "Environments and tools",
    5: "Trackers",
    6: "The model afterwards",
    7: "Another algorithm, and parts of DAPO left out",
    9: "Help and mistakes",
    10: "A notebook",
    11: "Judges, rewards that wait, weights",
    12: "Several sources, pass rates, a curriculum",
    13: "The package",
}
HEAD = """# Journeys

What a new user wants, how many commands and lines of code that should take, and what it took. `make journeys` installs
the project's wheel in a fresh environment, goes through them with files outside the repository and writes this page.
Settings that make runs short are not counted, nor are imports and what a user had before (data, a model, a reward
function).
"""
LEFT = """
## What is left

Goals that were not reached, or took more commands or lines than they should.
"""
NOT_TRIED = """
## Not tried by the script

- Downloads and uploads: there is no network here. A hub id is read from the hub's cache, a push is refused in one line.
- vLLM and llama.cpp with the exported model: by hand, see [export](guides/export.md).
- Python 3.12 and 3.13, a GPU, other systems than Linux.
- LoRA and more GPUs (journeys 3 and 8) belong to other parts.
"""


def page(results: Mapping[str, Any]) -> str:
    text, left = f"{HEAD}\n{results['made']}\n", []
    for number, title in TITLES.items():
        goals = [Goal(**goal) for goal in results["journeys"].get(str(number), ())]
        if goals:
            text += f"\n## {number}. {title}\n\n" + _table(
                ("wanted", "excellent", "took", "seen"), [_row(goal) for goal in goals]
            )
        left += [goal for goal in goals if not goal.is_reached]
    if left:
        text += LEFT + "\n" + "".join(f"- {goal.journey}, {goal.name}: {goal.reason}\n" for goal in left)
    return text + NOT_TRIED


def _row(goal: Goal) -> tuple[str, ...]:
    seen = "; ".join(goal.seen) if goal.is_reached else f"**left**: {goal.reason}"
    return goal.name, effort(goal.commands, goal.lines), effort(goal.typed, goal.written), seen


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in (head, *rows)]
    lines.insert(1, " | ".join("---" for _ in head))
    return "".join(f"| {line} |\n" for line in lines)
