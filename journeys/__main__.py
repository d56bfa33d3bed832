"""`python -m journeys [NUMBER ...]`: repeat journeys, and write docs/journeys.md.

Without numbers the environment is made anew and all are repeated; with numbers these, in the environment that is there.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from journeys.afterwards import trackers, use
from journeys.commands import algorithms, mistakes
from journeys.environment import FOLDER, INSTALLED, ROOT, install
from journeys.page import page
from journeys.python import notebook, package
from journeys.training import other_data, own_model, several_sources
from journeys.user import Goal, User

JOURNEYS: dict[int, Callable[[User], None]] = {
    1: own_model,
    2: other_data,
    5: trackers,
    6: use,
    7: algorithms,
    9: mistakes,
    10: notebook,
    12: several_sources,
    13: package,
}
RESULTS = ROOT / "journeys" / "results.json"
PAGE = ROOT / "docs" / "journeys.md"


def main(numbers: Sequence[int]) -> int:
    if unknown := set(numbers) - set(JOURNEYS):
        print(f"journeys: no journey {min(unknown)}; there are {', '.join(map(str, JOURNEYS))}", file=sys.stderr)
        return 2
    if not numbers or not INSTALLED.exists():
        install()
    results: dict[str, Any] = {}
    for number in numbers or JOURNEYS:
        print(f"journey {number}", flush=True)
        goals = repeat(number)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[str(number)] = [asdict(goal) for goal in goals]
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        PAGE.write_text(page(results))
    goals = [Goal(**goal) for number in numbers or JOURNEYS for goal in results[str(number)]]
    left = [goal for goal in goals if not goal.is_reached]
    print(PAGE.read_text())
    print(f"journeys: {len(goals) - len(left)} of {len(goals)} goals reached; {PAGE.relative_to(ROOT)}")
    return 1 if left else 0


def repeat(number: int) -> list[Goal]:
    """One journey, in a folder outside the repository."""
    folder = Path(tempfile.mkdtemp(prefix=f"journey-{number}-"))
    user = User(number, folder)
    try:
        JOURNEYS[number](user)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return user.goals


if __name__ == "__main__":
    FOLDER.parent.joinpath("docs").mkdir(exist_ok=True)
    sys.exit(main([int(each) for each in sys.argv[1:]]))
