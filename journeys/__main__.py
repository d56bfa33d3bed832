"""`python -m journeys [NUMBER ...]`: repeat journeys, and write docs/journeys.md.

Without numbers the environment is made anew and all are repeated; with numbers these, in the environment that is there.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from journeys.afterwards import trackers, use
from journeys.commands import algorithms, mistakes
from journeys.environment import INSTALLED, ROOT, install
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
AT_ONCE = 3
"""Journeys side by side; most of their commands use one core."""
RESULTS = ROOT / "journeys" / "results.json"
PAGE = ROOT / "docs" / "journeys.md"


def main(numbers: Sequence[int]) -> int:
    if unknown := set(numbers) - set(JOURNEYS):
        print(f"journeys: no journey {min(unknown)}; there are {', '.join(map(str, JOURNEYS))}", file=sys.stderr)
        return 2
    if not numbers or not INSTALLED.exists():
        install()
    chosen = list(numbers or JOURNEYS)
    with ThreadPoolExecutor(AT_ONCE) as workers:
        goals = dict(zip(chosen, workers.map(repeat, chosen), strict=True))
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results |= {str(number): [asdict(goal) for goal in found] for number, found in goals.items()}
    results = {str(number): results[str(number)] for number in JOURNEYS if str(number) in results}
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(results))
    found = [goal for each in goals.values() for goal in each]
    left = [goal for goal in found if not goal.is_reached]
    print(PAGE.read_text())
    print(f"journeys: {len(found) - len(left)} of {len(found)} goals reached; {PAGE.relative_to(ROOT)}")
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
    sys.exit(main([int(each) for each in sys.argv[1:]]))
