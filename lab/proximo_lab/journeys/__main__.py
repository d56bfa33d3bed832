"""`python -m proximo_lab.journeys [NUMBER ...]`: repeat journeys.

Without numbers the environment is made anew, all are repeated and docs/journeys.md is written from this one run; with
numbers these are repeated in the environment that is there, and what was seen is printed.
"""

import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from proximo_lab.journeys.acting import acting, judged
from proximo_lab.journeys.afterwards import trackers, use
from proximo_lab.journeys.commands import algorithms, mistakes
from proximo_lab.journeys.environment import FOLDER, INSTALLED, ROOT, install
from proximo_lab.journeys.page import page
from proximo_lab.journeys.python import notebook, package
from proximo_lab.journeys.training import other_data, own_model, several_sources
from proximo_lab.journeys.user import Goal, User

JOURNEYS: dict[int, Callable[[User], None]] = {
    1: own_model,
    2: other_data,
    4: acting,
    5: trackers,
    6: use,
    7: algorithms,
    9: mistakes,
    10: notebook,
    11: judged,
    12: several_sources,
    13: package,
}
AT_ONCE = 3
"""Journeys side by side; most of their commands use one core."""
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "journeys.md"


def main(numbers: Sequence[int]) -> int:
    if unknown := set(numbers) - set(JOURNEYS):
        print(f"journeys: no journey {min(unknown)}; there are {', '.join(map(str, JOURNEYS))}", file=sys.stderr)
        return 2
    began = time.monotonic()
    if not numbers or not INSTALLED.exists():
        install()
    chosen = list(numbers or JOURNEYS)
    with ThreadPoolExecutor(AT_ONCE) as workers:
        reached = dict(zip(chosen, workers.map(repeat, chosen), strict=True))
    goals = [goal for goals_of_one in reached.values() for goal in goals_of_one]
    results = {
        "made": f"One run on {datetime.now():%Y-%m-%d}, of {(time.monotonic() - began) / 60:.0f} minutes.",
        "journeys": {str(number): [asdict(goal) for goal in reached[number]] for number in chosen},
    }
    print(page(results))
    if not numbers:
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        PAGE.write_text(page(results))
        print(f"journeys: written to {PAGE.relative_to(ROOT)}")
    left = [goal for goal in goals if not goal.is_reached]
    for goal in left:
        print(f"journeys: LEFT {goal.journey}, {goal.name}: {goal.reason}")
    print(f"journeys: {len(goals) - len(left)} of {len(goals)} goals reached")
    return 1 if left else 0


def repeat(number: int) -> list[Goal]:
    """One journey, in a folder outside the repository. What fails between its goals ends this journey alone, and is one
    more goal, which is left. What was seen is kept at once, for a run that is killed."""
    folder = Path(tempfile.mkdtemp(prefix=f"journey-{number}-"))
    user = User(number, folder)
    try:
        JOURNEYS[number](user)
    except Exception as error:
        traceback.print_exc()
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        user.goals.append(Goal(number, "the rest of the journey", 0, 0, left=f"ended early: {reason}"[:300]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"journey-{number}.json").write_text(json.dumps([asdict(goal) for goal in user.goals], indent=1) + "\n")
    return user.goals


if __name__ == "__main__":
    sys.exit(main([int(each) for each in sys.argv[1:]]))
