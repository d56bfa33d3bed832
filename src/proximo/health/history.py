"""What rules read of a run's rows: of each metric its first values, the last rows whole, and a little of each
evaluation. Nothing else of a long run is kept."""

import math
import statistics
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from proximo.health.finding import Row

MAX_STEPS = 10**9
"""More than any run makes: a row with a larger number is damaged."""
EARLY = 10
"""Values of a metric that are its beginning."""
RECENT = 60
"""Rows of training that are kept: no rule looks further back, but to the beginning and to evaluations."""
HELD_OUT = "held_out/outcome"
COMPARED = ("outcome", "reward", "spread")
"""What evaluations are held against."""


def number(row: Row, name: str) -> float:
    """NaN for what is missing, null or no finite number: a row in memory has NaN where a file has null."""
    value = row.get(name)
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan
    except OverflowError:  # an integer beyond all floats
        return math.nan


def is_step(value: object) -> TypeGuard[int]:
    """Whether it can be the number of steps done: a whole number, not negative, and no more than any run makes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_STEPS


def in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of metrics whose steps can be, and never go back: as many of them as possible, so that one odd row, whether
    its step is too small or too large, is passed over and the others stay."""
    known = [row for row in rows if is_step(row.get("step"))]
    # Of the orders of each length: the least step that one can end with, its row, and each row's row before.
    ends, last, before = list[int](), list[int](), list[int | None]()
    for number, row in enumerate(known):
        place = bisect_right(ends, row["step"])
        before.append(last[place - 1] if place else None)
        ends[place : place + 1], last[place : place + 1] = [row["step"]], [number]
    kept, number = [], last[-1] if last else None
    while number is not None:
        kept.append(known[number])
        number = before[number]
    return kept[::-1]


@dataclass(frozen=True)
class Evaluated:
    """An evaluation on held-out problems."""

    after: int
    """Steps of training done before it."""
    outcome: float
    problems: float
    following: list[dict[str, float]] = field(default_factory=list)
    """The first rows of training after it, as far as they are compared, whatever evaluations come between."""


class History:
    """Rows are added one by one; what an evaluation measured is kept apart from what training did."""

    def __init__(self) -> None:
        self.step, self.trained = 0, 0
        """The last that trained, and how many have."""
        self.evaluations: list[Evaluated] = []
        self.seen: Counter[str] = Counter()
        """How many rows knew each metric."""
        self._first: dict[str, list[float]] = {}
        self._rows: deque[dict[str, float]] = deque(maxlen=RECENT)

    def add(self, row: Row) -> dict[str, float]:
        """The numbers of a row, with what rules derive from them."""
        known = {name: value for name in row if not math.isnan(value := number(row, name))}
        if "outcome" in known or "sampled_tokens" in known:
            known |= {name: value for name, derive in DERIVED.items() if not math.isnan(value := derive(known))}
            step = row.get("step")
            self.step = max(self.step, step) if is_step(step) else self.step
            self._add_training(known)
        elif HELD_OUT in known:
            problems = known.get("held_out/problems", 0.0) - known.get("held_out/unscored", 0.0)
            self.evaluations.append(Evaluated(self.trained, known[HELD_OUT], problems))
        return known

    def _add_training(self, known: dict[str, float]) -> None:
        self.trained += 1
        self.seen.update(known.keys())
        for name, value in known.items():
            first = self._first.setdefault(name, [])
            if len(first) < EARLY:
                first.append(value)
        self._rows.append(known)
        for evaluated in reversed(self.evaluations):
            if len(evaluated.following) == EARLY:
                break  # those before it are full, too
            evaluated.following.append({name: known[name] for name in COMPARED if name in known})

    def first(self, name: str) -> list[float]:
        """The first values; none until all of them are there."""
        found = self._first.get(name, [])
        return found if len(found) == EARLY else []

    def start(self, name: str) -> float:
        """The very first value; NaN where there is none."""
        return next(iter(self._first.get(name, [])), math.nan)

    def last(self, name: str, count: int, before: int = 0) -> list[float]:
        """The last values, without the `before` newest; none where they are fewer."""
        found = [row[name] for row in self._rows if name in row]
        end = len(found) - before
        return found[max(end - count, 0) : end] if end >= count else []

    def typical(self, name: str, count: int) -> float:
        """The median of the last values, so that one odd step decides nothing; NaN where they are fewer."""
        found = self.last(name, count)
        return statistics.median(found) if found else math.nan

    @property
    def parts(self) -> list[str]:
        """Names of what the reward is made of."""
        return [name for name in (self._rows[-1] if self._rows else ()) if name.startswith("rewards/")]

    def is_learning(self) -> bool:
        """Whether completions are still getting better: the last steps' outcomes, or rewards where those do not differ,
        stand above those of thirty steps before by more than chance, or it is too early to say."""
        name = "reward" if are_equal([*self._earlier("outcome"), *self.last("outcome", EARLY)]) else "outcome"
        if self.seen[name] < 2 * EARLY:
            return True
        return has_risen(self._earlier(name), self.last(name, EARLY), 2.0)

    def _earlier(self, name: str) -> list[float]:
        return self.last(name, EARLY, before=3 * EARLY) or self.first(name)


def mean(values: Iterable[float]) -> float:
    """NaN of none."""
    known = list(values)
    return math.fsum(known) / len(known) if known else math.nan


def are_equal(values: Sequence[float]) -> bool:
    """But for rounding; none are."""
    return not values or max(values) - min(values) <= 1e-9 * max(map(abs, values))


def has_risen(before: Sequence[float], after: Sequence[float], errors: float) -> bool:
    """Whether the mean has grown by more than so many of its own standard errors."""
    if len(before) < 2 or len(after) < 2:
        return False
    noise = math.sqrt(sum(statistics.variance(values) / len(values) for values in (before, after)))
    return mean(after) - mean(before) > errors * noise


# What no metric says alone


def idle(row: Row) -> float:
    """Share of what was sampled that no policy gradient came from: dropped, or with an advantage of 0. A value model's
    advantages are hardly ever 0, whatever siblings earned: then groups are not idle."""
    wasted, dead = number(row, "wasted_tokens"), number(row, "dead_rows")
    return wasted + (1 - wasted) * (0.0 if math.isnan(dead) else dead)


def idle_solved(row: Row) -> float:
    """As much of that as is known to be because all siblings were right, by the share of dead groups that are."""
    dead, solved = number(row, "dead_groups"), number(row, "dead_solved")
    return idle(row) * (solved / dead if dead > 0 and solved > 0 else 0.0)


def repeated(row: Row) -> float:
    """Pairs of siblings that say the same where not all are right, or anywhere where nobody knows what is right."""
    knows = not math.isnan(number(row, "solved_by_all"))
    return number(row, "duplicates_unsolved" if knows else "duplicates")


def spread(row: Row) -> float:
    """Of the reward among siblings; where they are equal, or there is but one, among all completions."""
    among = number(row, "reward_spread")
    return number(row, "reward_p90") - number(row, "reward_p10") if among == 0 else among


DERIVED: dict[str, Callable[[Row], float]] = {
    "idle_solved": idle_solved,
    "idle_stuck": lambda row: idle(row) - idle_solved(row),
    "repeated": repeated,
    "spread": spread,
    "blocked_share": lambda row: 1 - number(row, "gate"),
    "unscored_share": lambda row: number(row, "unscored") / max(number(row, "completions"), 1.0),
    "kl_per_token": lambda row: number(row, "reference_kl") / max(number(row, "length"), 1.0),
}
