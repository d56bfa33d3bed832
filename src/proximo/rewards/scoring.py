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
from proximo.rewards.workers import Columns, FunctionJob, Scored
from proximo.types import Completion, Problem

MAX_DEATHS = 4
"""Completions of one call that may cost a worker each, when they are tried one by one; the rest is given up."""


class Caller(Protocol):
    """A function that scores, wherever it runs."""

    def call(self, columns: Columns, constants: Mapping[str, Any]) -> Scored | Failure:
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
    """Begin `scores_of`, and return at once if the reward waits for something else. Others score here and now, so that
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

    def call(self, columns: Columns, constants: Mapping[str, Any]) -> Scored | Failure:
        problems, completions = columns["problems"], columns["completions"]
        return _caught(lambda: self.reward(problems, completions), len(completions))

    def begin(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Waiting[Scored | Failure]:
        assert isinstance(self.reward, Begins)
        waiting = self.reward.begin(problems, completions)
        return lambda: _caught(waiting, len(completions))


def _caught(scoring: Waiting[Scores], count: int) -> Scored | Failure:
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
    return Scored([math.nan if score != score else checked(score) for score in map(to_number, scores)])


def score(
    job: FunctionJob,
    completions: Sequence[Completion],
    columns: Columns,
    constants: Mapping[str, Any] | None = None,
    *,
    grader: str,
    alone: bool = True,
) -> list[float]:
    """Do `score_or_pass` for a function of our own: where it returns None the completion is unscored."""
    scores = score_or_pass(job, completions, columns, constants, grader=grader, alone=alone)
    for value, completion in zip(scores, completions, strict=True):
        if value is None:
            note_failure(grader, Failure("none", f"it returned None; the completion: {plain(completion.text, 100)!r}"))
    return [math.nan if value is None else value for value in scores]


def score_or_pass(
    job: FunctionJob,
    completions: Sequence[Completion],
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
        return called(active.workers(job), completions, columns, constants, grader=grader, alone=alone)


def called(
    function: Caller,
    completions: Sequence[Completion],
    columns: Columns,
    constants: Mapping[str, Any] | None = None,
    *,
    grader: str,
    alone: bool = True,
) -> list[float | None]:
    """Do `score_or_pass` for a function in a process of its own or in this one."""
    return noted(ask(function, columns, constants, alone=alone), completions, grader=grader)


@dataclass(frozen=True)
class Answer:
    """A function's scores and failures of the completions of a call."""

    scores: Sequence[Outcome]
    together: Failure | None = None
    """Failure of the call for all of them, if they were tried one by one after it."""
    logged: Sequence[Mapping[str, float]] = ()
    """Numbers that the function logged of each; none, or one entry for each."""


def ask(
    function: Caller, columns: Columns, constants: Mapping[str, Any] | None = None, *, alone: bool = True
) -> Answer:
    """Call a function, and for single completions again where that fails and `alone` allows it. Counts nothing, so
    that it may run on any thread."""
    return _retried(function, function.call(columns, constants or {}), columns, constants or {}, alone=alone)


def _retried(
    function: Caller,
    result: Scored | Failure,
    columns: Columns,
    constants: Mapping[str, Any],
    *,
    alone: bool,
) -> Answer:
    count = len(next(iter(columns.values())))
    if isinstance(result, Failure) and alone and count > 1:
        alone_each = _one_by_one(function, columns, constants, count)
        scores = [score for each in alone_each for score in each.scores]
        return Answer(scores, result, [each.logged for each in alone_each])
    if isinstance(result, Failure):
        return Answer([result] * count)
    return Answer(result.scores, logged=[result.logged] * count)


def noted(answer: Answer, completions: Sequence[Completion], *, grader: str) -> list[float | None]:
    """The scores of an answer; failures are counted in the run's `Grading`, which keeps what the function logged."""
    with grading() as active:
        if answer.together is not None:
            # Counted even where each of them alone is scored: then the function fails for several at once.
            active.failures.add(grader, answer.together, unscored=0)
        for score, completion in zip(answer.scores, completions, strict=True):
            if isinstance(score, Failure):
                example = f"{score.message}; the completion: {plain(completion.text, 100)!r}"
                active.failures.add(grader, replace(score, message=example))
        for completion, logged in zip(completions, answer.logged, strict=False):
            active.log(completion, logged)
    return [math.nan if isinstance(score, Failure) else score for score in answer.scores]


def _one_by_one(function: Caller, columns: Columns, constants: Mapping[str, Any], count: int) -> list[Scored]:
    scored: list[Scored] = []
    deaths = 0
    for row in range(count):
        if deaths == MAX_DEATHS:
            scored.append(Scored([Failure("given up", f"{deaths} completions of its group had cost a process each")]))
            continue
        result = function.call({name: [column[row]] for name, column in columns.items()}, constants)
        deaths += isinstance(result, Failure) and result.fatal
        scored.append(Scored([result]) if isinstance(result, Failure) else result)
    return scored


def groups(
    problems: Sequence[Problem], completions: Sequence[Completion]
) -> Iterator[tuple[Sequence[Problem], Sequence[Completion]]]:
    """Group what is asked in one call: siblings, which share their problem and follow each other."""
    for _, rows in groupby(zip(problems, completions, strict=True), key=lambda row: id(row[0])):
        asked, siblings = zip(*rows, strict=True)
        yield asked, siblings
