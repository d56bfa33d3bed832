"""Scores of completions from reward functions, in processes of their own or in this one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

from proximo.processes.failures import Failure, GraderFailed, Outcome, checked, plain
from proximo.processes.worker import Junk, described
from proximo.rewards.calling import listed, to_number
from proximo.rewards.grading import grading, note_failure
from proximo.rewards.protocol import Begins, Grader, Scores, Waiting
from proximo.rewards.workers import Columns, Job
from proximo.types import Completion, Problem

MAX_DEATHS = 4
"""So many completions of one call may cost a worker each, when they are tried one by one; the rest is given up."""


class Caller(Protocol):
    """A function that scores, wherever it runs."""

    def call(self, columns: Columns, constants: Mapping[str, Any]) -> list[Outcome] | Failure:
        """A score or a failure for each completion, or one failure of the whole call."""
        ...


def scores_of(reward: Grader, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
    """The scores that a reward gives. Completions for which it raises are unscored, and the run's `Grading` counts them
    under the name of its class; a `GraderFailed` is raised."""
    with grading():
        return begin_scores(reward, problems, completions)()


def begin_scores(
    reward: Grader, problems: Sequence[Problem], completions: Sequence[Completion]
) -> Waiting[list[float | None]]:
    """As `scores_of`, and returns at once if the reward waits for something else. Others score here and now, so that
    each is asked about one group after the other. A `Grading` must be active until the result is there."""
    columns = {"problems": problems, "completions": completions}
    rewarding, name = _Rewarding(reward), type(reward).__name__
    if not isinstance(reward, Begins):
        scores = called(rewarding, completions, columns, grader=name)
        return lambda: scores
    first = rewarding.begin(problems, completions)

    def finish() -> list[float | None]:
        return noted(_retried(rewarding, first(), columns, {}, alone=True), completions, grader=name)

    return finish


@dataclass(frozen=True)
class _Rewarding:
    """Calls a reward."""

    reward: Grader

    def call(self, columns: Columns, constants: Mapping[str, Any]) -> list[Outcome] | Failure:
        problems, completions = columns["problems"], columns["completions"]
        return _caught(lambda: self.reward(problems, completions), len(completions))

    def begin(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Waiting[list[Outcome] | Failure]:
        assert isinstance(self.reward, Begins)
        waiting = self.reward.begin(problems, completions)
        return lambda: _caught(waiting, len(completions))


def _caught(scoring: Waiting[Scores], count: int) -> list[Outcome] | Failure:
    """The scores, or why there are none."""
    try:
        scores = listed(scoring(), count)
    except GraderFailed:
        raise
    except Junk as error:
        return Failure("junk", plain(str(error)))
    except Exception as error:
        return Failure(type(error).__name__, plain(described(error)))
    # NaN is a reward's own word for unscored, and it has counted why itself.
    return [math.nan if score != score else checked(score) for score in map(to_number, scores)]


def score(
    job: Job,
    said: Sequence[Completion],
    columns: Columns,
    constants: Mapping[str, Any] | None = None,
    *,
    grader: str,
    alone: bool = True,
) -> list[float]:
    """As `score_or_pass`, for a function of our own: where it returns None the completion is unscored."""
    found = score_or_pass(job, said, columns, constants, grader=grader, alone=alone)
    for each, completion in zip(found, said, strict=True):
        if each is None:
            note_failure(grader, Failure("none", f"it returned None; the completion: {plain(completion.text, 100)!r}"))
    return [math.nan if each is None else each for each in found]


def score_or_pass(
    job: Job,
    said: Sequence[Completion],
    columns: Columns,
    constants: Mapping[str, Any] | None = None,
    *,
    grader: str,
    alone: bool = True,
) -> list[float | None]:
    """A score for each completion: NaN where there is none, None where the function returned None. Why there is none is
    counted in the run's `Grading` under the grader's name.

    Where a call fails its completions are tried one by one, so that only the guilty one is unscored; not so where
    the function compares them (`alone=False`).
    """
    with grading() as active:
        return called(active.crew(job), said, columns, constants, grader=grader, alone=alone)


def called(
    function: Caller,
    said: Sequence[Completion],
    columns: Columns,
    constants: Mapping[str, Any] | None = None,
    *,
    grader: str,
    alone: bool = True,
) -> list[float | None]:
    """As `score_or_pass`, of a function in a process of its own or in this one."""
    return noted(ask(function, columns, constants, alone=alone), said, grader=grader)


@dataclass(frozen=True)
class Answer:
    """What a function says of the completions of a call."""

    found: Sequence[Outcome]
    together: Failure | None = None
    """How the call for all of them failed, if they were tried one by one after it."""


def ask(
    function: Caller, columns: Columns, constants: Mapping[str, Any] | None = None, *, alone: bool = True
) -> Answer:
    """Call a function, and for single completions again where that fails and `alone` allows it. Counts nothing, so
    that it may run on any thread."""
    return _retried(function, function.call(columns, constants or {}), columns, constants or {}, alone=alone)


def _retried(
    function: Caller,
    result: list[Outcome] | Failure,
    columns: Columns,
    constants: Mapping[str, Any],
    *,
    alone: bool,
) -> Answer:
    count = len(next(iter(columns.values())))
    if isinstance(result, Failure) and alone and count > 1:
        return Answer(_one_by_one(function, columns, constants, count), result)
    return Answer([result] * count if isinstance(result, Failure) else result)


def noted(answer: Answer, said: Sequence[Completion], *, grader: str) -> list[float | None]:
    """The scores of an answer; failures are counted in the run's `Grading`."""
    with grading() as active:
        if answer.together is not None:
            # Counted even where each of them alone is scored: then the function fails for several at once.
            active.failures.add(grader, answer.together, unscored=0)
        for each, completion in zip(answer.found, said, strict=True):
            if isinstance(each, Failure):
                example = f"{each.message}; the completion: {plain(completion.text, 100)!r}"
                active.failures.add(grader, replace(each, message=example))
    return [math.nan if isinstance(each, Failure) else each for each in answer.found]


def _one_by_one(function: Caller, columns: Columns, constants: Mapping[str, Any], count: int) -> list[Outcome]:
    found: list[Outcome] = []
    deaths = 0
    for row in range(count):
        if deaths == MAX_DEATHS:
            found.append(Failure("given up", f"{deaths} completions of its group had cost a process each"))
            continue
        result = function.call({name: [column[row]] for name, column in columns.items()}, constants)
        deaths += isinstance(result, Failure) and result.fatal
        found += [result] if isinstance(result, Failure) else result
    return found


def groups(
    problems: Sequence[Problem], completions: Sequence[Completion]
) -> Iterator[tuple[Sequence[Problem], Sequence[Completion]]]:
    """What is asked in one call: siblings, which share their problem and follow each other."""
    for _, rows in groupby(zip(problems, completions, strict=True), key=lambda row: id(row[0])):
        asked, said = zip(*rows, strict=True)
        yield asked, said
