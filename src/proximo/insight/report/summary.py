"""The results of a run as data."""

import math
from dataclasses import asdict
from typing import Any

from proximo.algorithms import explain
from proximo.insight.reading import Row
from proximo.insight.report.episodes import episode_steps
from proximo.insight.report.problems import Pair
from proximo.insight.report.run_details import RunDetails
from proximo.insight.report.settings import again, difference_lines


def summary(details: RunDetails) -> dict[str, Any]:
    """The results for scripts; None means not known."""
    before, after = first_and_last(details)
    better, worse = changes(details.pairs)
    return {
        "run": str(details.run.path),
        "state": details.state,
        "ended": details.ended or None,
        "steps": details.steps_done,
        "of_steps": None if details.config is None else details.config.steps,
        "model": details.model,
        "task": None if details.config is None else explain.choice(details.config.task),
        "algorithm": details.algorithm_name,
        "differences": difference_lines(details),
        "before": before,
        "after": after,
        "answers_better": better,
        "answers_worse": worse,
        "chance": sign_test(better, worse),
        "generated_tokens": details.generated,
        "seconds": details.seconds,
        "episodes": [asdict(each) for each in episode_steps(details)],
        "findings": [
            asdict(active.finding) | {"last": active.last, "is_over": active.is_over} for active in details.findings
        ],
        "events": dict(details.event_counts),
        "again": again(details),
    }


def first_and_last(details: RunDetails) -> tuple[Row | None, Row | None]:
    """The evaluation before training, and the newest one after it."""
    evaluations = details.evaluations
    before = evaluations[0] if evaluations and evaluations[0]["step"] == 0 else None
    after = evaluations[-1] if evaluations and evaluations[-1]["step"] > 0 else None
    return before, after


def changes(pairs: list[Pair]) -> tuple[int, int]:
    """The numbers of answers that became better and worse."""
    known = [(pair.before.outcome, pair.after.outcome) for pair in pairs]
    return sum(after > before for before, after in known), sum(after < before for before, after in known)


def sign_test(better: int, worse: int) -> float:
    """The probability of a split at least this uneven if better and worse were equally likely; two-sided and exact.

    Example: sign_test(3, 0) == 0.25
    """
    total, fewer = better + worse, min(better, worse)
    return min(1.0, 2 * sum(math.comb(total, count) for count in range(fewer + 1)) / 2**total)
