"""The results of a run as data."""

import math
from dataclasses import asdict
from typing import Any

from proximo.algorithms import explain
from proximo.insight.reading import Row
from proximo.insight.report.episodes import episode_steps
from proximo.insight.report.facts import Facts
from proximo.insight.report.problems import Pair
from proximo.insight.report.settings import again, difference_lines


def summary(facts: Facts) -> dict[str, Any]:
    """The results for scripts; None means not known."""
    before, after = first_and_last(facts)
    better, worse = changes(facts.pairs)
    return {
        "run": str(facts.run.path),
        "state": facts.state,
        "ended": facts.ended or None,
        "steps": facts.steps_done,
        "of_steps": None if facts.config is None else facts.config.steps,
        "model": facts.model,
        "task": None if facts.config is None else explain.choice(facts.config.task),
        "algorithm": facts.algorithm_name,
        "differences": difference_lines(facts),
        "before": before,
        "after": after,
        "answers_better": better,
        "answers_worse": worse,
        "chance": sign_test(better, worse),
        "generated_tokens": facts.generated,
        "seconds": facts.seconds,
        "episodes": [asdict(each) for each in episode_steps(facts)],
        "findings": [
            asdict(spell.finding) | {"last": spell.last, "is_over": spell.is_over} for spell in facts.findings
        ],
        "events": dict(facts.event_counts),
        "again": again(facts),
    }


def first_and_last(facts: Facts) -> tuple[Row | None, Row | None]:
    """The evaluation before training, and the newest one after it."""
    found = facts.evaluations
    before = found[0] if found and found[0]["step"] == 0 else None
    after = found[-1] if found and found[-1]["step"] > 0 else None
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
