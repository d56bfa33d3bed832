"""The ledger: what happened to each prompt that was drawn. It proves that none is skipped or trained twice.

Draws are numbered by ordinals from 0. An ordinal has one row if it is carried over to a later step, and one row
when it reaches a final state; nothing else is in the ledger.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from proximo.learner.guard import Update
from proximo.runs.files import LEDGER
from proximo.runs.records import Assembled, Collected, DataCursor
from proximo.system.lines import JsonLines
from proximo.types import Group, Problem

State = Literal["trained", "filtered", "unscored", "abandoned", "passed_over", "expired", "carried"]
FINAL: tuple[State, ...] = ("trained", "filtered", "unscored", "abandoned", "passed_over", "expired")
"""Final states: trained; dropped by the algorithm's `keep`; not graded because every grader failed; only in updates
that were skipped; not sampled because of a curriculum; given up because it took too long."""


@dataclass(frozen=True)
class Entry:
    ordinal: int
    problem: str
    """Id of the problem."""
    epoch: int
    """Index of the pass over the task's problems; 0 if the task is endless."""
    step: int
    state: State
    source: str = ""
    """Name of the source that the problem comes from; written only where a task has several."""

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "source" or value}


def entries(
    step: int,
    before: DataCursor,
    collected: Collected,
    assembled: Assembled | None,
    updates: Sequence[Update],
    size: int | None,
) -> list[Entry]:
    """The entries of one step: for the groups that it drew, and those that were carried over to it."""
    groups: dict[int, tuple[Group, State]] = {}
    for group in collected.dropped:
        groups[_ordinal(group)] = group, "unscored" if _is_unscored(group) else "filtered"
    # After the dropped groups, since the same prompt may have been sampled again and kept.
    present, learned = _learned(assembled, updates)
    for number, group in enumerate(collected.groups):
        state: State = "trained" if number in learned else "abandoned" if number in present else "unscored"
        groups[_ordinal(group)] = group, state
    known = {group.ordinal for group in before.carried}
    for group in collected.cursor.carried:
        if group.ordinal not in known:
            groups[_ordinal(group)] = group, "carried"
    ended: dict[int, tuple[Problem, State]] = {
        ordinal: (group.problem, state) for ordinal, (group, state) in groups.items()
    }
    ended |= {ordinal: (problem, "passed_over") for ordinal, problem in collected.passed_over}
    ended |= {ordinal: (problem, "carried") for ordinal, problem in collected.late}
    ended |= {ordinal: (problem, "expired") for ordinal, problem in collected.expired}
    return [
        Entry(ordinal, problem.id, ordinal // size if size else 0, step, state, problem.source)
        for ordinal, (problem, state) in sorted(ended.items(), key=lambda each: each[0])
    ]


def _learned(assembled: Assembled | None, updates: Sequence[Update]) -> tuple[set[int], set[int]]:
    """Indices of the groups with rows to train on, and of those with rows in an applied update."""
    if assembled is None:
        return set(), set()
    group = assembled.batch.group
    learned = {number for each in updates if each.skipped is None for number in group[each.rows].tolist()}
    return set(group.tolist()), learned


def _is_unscored(group: Group) -> bool:
    return all(math.isnan(rollout.grade.verdict) for rollout in group.rollouts)


def _ordinal(group: Group) -> int:
    assert group.ordinal is not None, "a run's groups are counted"
    return group.ordinal


# Proof


@dataclass(frozen=True)
class Proof:
    """Result of checking a ledger."""

    drawn: int
    """Number of draws: the ordinals are 0 to `drawn` − 1."""
    states: Mapping[str, int]
    """Number of ordinals in each state; `carried`: sampled for a step that has not run yet."""
    wrong: tuple[str, ...]
    """Errors found; empty if every ordinal is there and ended once."""


def check_ledger(folder: Path, drawn: int | None = None) -> Proof:
    """Check that each draw of a run was made once and ended once; `drawn`: the expected number of draws, if known.

    Example: assert not check_ledger(Path("runs/a")).wrong
    """
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in JsonLines(folder / LEDGER):
        rows.setdefault(row["ordinal"], []).append(row)
    count = drawn if drawn is not None else max(rows, default=-1) + 1
    wrong = [f"draw {ordinal} is missing" for ordinal in range(count) if ordinal not in rows]
    wrong += [f"draw {ordinal} was never made" for ordinal in sorted(rows) if not 0 <= ordinal < count]
    last = {}
    for ordinal, states in sorted(rows.items()):
        wrong += _problems(ordinal, states)
        last[ordinal] = states[-1]["state"]
    return Proof(count, dict(Counter(last.values())), tuple(wrong + _uneven_epochs(rows)))


def _problems(ordinal: int, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Errors of one ordinal: it may be carried over once and end once, always with the same problem."""
    states = [row["state"] for row in rows]
    wrong = []
    if len(states) > 2 or (len(states) == 2 and (states[0] != "carried" or states[1] not in FINAL)):
        wrong.append(f"draw {ordinal} ended more than once: {', '.join(states)}")
    if unknown := sorted(set(states) - {*FINAL, "carried"}):
        wrong.append(f"draw {ordinal} has unknown states: {', '.join(unknown)}")
    if len({(row["problem"], row["epoch"]) for row in rows}) > 1:
        wrong.append(f"draw {ordinal} has more than one problem")
    if [row["step"] for row in rows] != sorted(row["step"] for row in rows):
        wrong.append(f"draw {ordinal} has decreasing steps")
    return wrong


def _uneven_epochs(rows: Mapping[int, Sequence[dict[str, Any]]]) -> list[str]:
    """Errors of epochs: all but the last must have the same problems, each equally often."""
    problems: dict[int, Counter[str]] = {}
    for states in rows.values():
        problems.setdefault(states[0]["epoch"], Counter())[states[0]["problem"]] += 1
    whole = [problems[epoch] for epoch in sorted(problems)[:-1]]
    if any(each != whole[0] for each in whole[1:]):
        return ["the epochs have different problems"]
    if whole and problems[max(problems)] - whole[0]:
        return ["the last epoch has problems that the others lack, or has some twice"]
    return []
