"""The rows of a run that rules need: the first values of each metric, the last rows, and a summary of each evaluation.
Nothing else of a long run is kept."""

import math
import statistics
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

Row = Mapping[str, object]
"""A row of metrics.jsonl, as in the file or before it is written."""
MAX_STEPS = 10**9
"""Maximum step number; a row with a larger one is damaged."""
EARLY = 10
"""Number of values that count as the beginning of a metric."""
RECENT = 60
"""Training rows that are kept; no rule looks further back, except to the beginning and to evaluations."""
HELD_OUT = "held_out/outcome"
COMPARED = ("outcome", "reward", "spread")
"""Metrics that evaluations are compared with."""


def number(row: Row, name: str) -> float:
    """A metric of a row; NaN if missing, null or not finite (a row in memory has NaN where a file has null)."""
    value = row.get(name)
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan
    except OverflowError:  # an integer too large for a float
        return math.nan


def is_step(value: object) -> TypeGuard[int]:
    """True for a valid number of steps done: a whole number from 0 to the maximum."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_STEPS


def in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The longest sequence of rows with valid steps that never decrease, so that a single odd row, whether its step is
    too small or too large, is skipped and the others stay."""
    known = [row for row in rows if is_step(row.get("step"))]
    # For sequences of each length: the smallest step that one can end with, its row, and each row's predecessor.
    ends, last, before = list[int](), list[int](), list[int | None]()
    for number, row in enumerate(known):
        index = bisect_right(ends, row["step"])
        before.append(last[index - 1] if index else None)
        ends[index : index + 1], last[index : index + 1] = [row["step"]], [number]
    kept, number = [], last[-1] if last else None
    while number is not None:
        kept.append(known[number])
        number = before[number]
    return kept[::-1]


@dataclass(frozen=True)
class Evaluated:
    """An evaluation on held-out problems."""

    after: int
    """Training steps done before it."""
    outcome: float
    problems: float
    step: int = 0
    best_step: float = math.nan
    """Step of the best evaluation before it, by the metric that decides which checkpoint is kept; NaN if unknown."""
    error: float = math.nan
    """Standard error of its difference from that one, problem by problem; NaN if unknown."""
    following: list[dict[str, float]] = field(default_factory=list)
    """The first training rows after it that are compared, regardless of evaluations in between."""


class History:
    """The rows so far, added one by one; evaluations are kept separately from training."""

    def __init__(self) -> None:
        self.step, self.trained = 0, 0
        """The last training step, and how many there were."""
        self.evaluations: list[Evaluated] = []
        self.seen: Counter[str] = Counter()
        """Number of rows that have each metric."""
        self._first: dict[str, list[float]] = {}
        self._rows: deque[dict[str, float]] = deque(maxlen=RECENT)

    def add(self, row: Row) -> dict[str, float]:
        """Add a row; returns its numbers and those that rules derive from them."""
        known = {name: value for name in row if not math.isnan(value := number(row, name))}
        if "outcome" in known or "sampled_tokens" in known:
            known |= {name: value for name, derive in DERIVED.items() if not math.isnan(value := derive(known))}
            step = row.get("step")
            self.step = max(self.step, step) if is_step(step) else self.step
            self._add_training(known)
        elif HELD_OUT in known:
            problems = known.get("held_out/problems", 0.0) - known.get("held_out/unscored", 0.0)
            step = row.get("step")
            self.evaluations.append(
                Evaluated(
                    self.trained,
                    known[HELD_OUT],
                    problems,
                    step if is_step(step) else 0,
                    known.get("held_out/best_step", math.nan),
                    known.get("held_out/since_best_error", math.nan),
                )
            )
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
                break  # the earlier ones are full, too
            evaluated.following.append({name: known[name] for name in COMPARED if name in known})

    def first(self, name: str) -> list[float]:
        """The first values; empty until there are enough."""
        values = self._first.get(name, [])
        return values if len(values) == EARLY else []

    def start(self, name: str) -> float:
        """The very first value; NaN if there is none."""
        return next(iter(self._first.get(name, [])), math.nan)

    def last(self, name: str, count: int, before: int = 0) -> list[float]:
        """The last `count` values before the `before` newest; empty if there are fewer."""
        values = [row[name] for row in self._rows if name in row]
        end = len(values) - before
        return values[max(end - count, 0) : end] if end >= count else []

    def typical(self, name: str, count: int) -> float:
        """The median of the last values, so that one odd step decides nothing; NaN if there are fewer."""
        values = self.last(name, count)
        return statistics.median(values) if values else math.nan

    @property
    def parts(self) -> list[str]:
        """Names of the parts of the reward."""
        return [name for name in (self._rows[-1] if self._rows else ()) if name.startswith("rewards/")]

    def is_learning(self) -> bool:
        """True while completions improve: the last task scores, or rewards if task scores do not differ, are above
        those of thirty steps before by more than chance, or it is too early to tell."""
        name = "reward" if are_equal([*self._earlier("outcome"), *self.last("outcome", EARLY)]) else "outcome"
        if self.seen[name] < 2 * EARLY:
            return True
        return has_risen(self._earlier(name), self.last(name, EARLY), 2.0)

    def _earlier(self, name: str) -> list[float]:
        return self.last(name, EARLY, before=3 * EARLY) or self.first(name)


def mean(values: Iterable[float]) -> float:
    """The mean; NaN of no values."""
    known = list(values)
    return math.fsum(known) / len(known) if known else math.nan


def are_equal(values: Sequence[float]) -> bool:
    """True if all values are equal up to rounding, or there are none."""
    return not values or max(values) - min(values) <= 1e-9 * max(map(abs, values))


def half_width(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean of ten values or so; NaN for fewer than two."""
    return 2.26 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def has_risen(before: Sequence[float], after: Sequence[float], errors: float) -> bool:
    """True if the mean has grown by more than `errors` standard errors."""
    if len(before) < 2 or len(after) < 2:
        return False
    noise = math.sqrt(sum(statistics.variance(values) / len(values) for values in (before, after)))
    return mean(after) - mean(before) > errors * noise


# Derived metrics


def idle(row: Row) -> float:
    """Share of the samples without a policy gradient: dropped, or with advantage 0. With a value model advantages are
    hardly ever 0, whatever the rewards of the group."""
    wasted, dead = number(row, "wasted_tokens"), number(row, "dead_rows")
    return wasted + (1 - wasted) * (0.0 if math.isnan(dead) else dead)


def idle_solved(row: Row) -> float:
    """The part of that due to groups that are all correct, estimated by the share of dead groups that are."""
    dead, solved = number(row, "dead_groups"), number(row, "dead_solved")
    return idle(row) * (solved / dead if dead > 0 and solved > 0 else 0.0)


def repeated(row: Row) -> float:
    """Share of equal pairs of completions in groups that are not all correct, or in all groups if that is unknown."""
    knows = not math.isnan(number(row, "solved_by_all"))
    return number(row, "duplicates_unsolved" if knows else "duplicates")


def untrained(row: Row) -> float:
    """1 where a step's updates had nothing to learn from although completions of a group differed in their rewards: all
    tokens rejected or masked away, or a gradient of exactly 0; 0 where they had, NaN if that is unknown. While values
    alone are trained, the policy's learning rate is 0 and its gradient too."""
    shares = [number(row, name) for name in ("rejected", "masked")]
    gradient = number(row, "gradient_norm_max" if "gradient_norm_max" in row else "gradient_norm")
    if all(math.isnan(each) for each in (*shares, gradient)):
        return math.nan
    is_still = gradient == 0 and not number(row, "dead_rows") >= 1 and number(row, "learning_rate") != 0
    return float(is_still or any(share >= NEARLY_ALL for share in shares))


def spread(row: Row) -> float:
    """Standard deviation of the reward within groups; if it is 0 or groups have one member, over all completions."""
    among = number(row, "reward_spread")
    return number(row, "reward_p90") - number(row, "reward_p10") if among == 0 else among


def _count(row: Row, name: str) -> float:
    """A count that is only written where it is not 0; NaN in a row without groups."""
    count = number(row, name)
    return count if not math.isnan(count) else 0.0 * number(row, "groups")


NEARLY_ALL = 0.95
"""Share of the tokens from which on a step counts as not trained on."""
DERIVED: dict[str, Callable[[Row], float]] = {
    "idle_solved": idle_solved,
    "idle_stuck": lambda row: idle(row) - idle_solved(row),
    "repeated": repeated,
    "spread": spread,
    "untrained": untrained,
    "lost": lambda row: _count(row, "lost_groups"),
    "expired": lambda row: _count(row, "expired_groups"),
    "blocked_share": lambda row: 1 - number(row, "gate"),
    "unscored_share": lambda row: number(row, "unscored") / max(number(row, "completions"), 1.0),
    "kl_per_token": lambda row: number(row, "reference_kl") / max(number(row, "length"), 1.0),
}
