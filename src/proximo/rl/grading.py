"""Grading during sampling: groups are begun one by one, as the sampler finishes them, and may wait together."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Protocol

from proximo.processes.failures import Failure, plain
from proximo.rewards.grading import grading, note_failure
from proximo.rewards.protocol import Waiting
from proximo.samplers.sampler import Stream, gathered
from proximo.system.phases import phase
from proximo.tasks import Task
from proximo.tasks.protocol import begin_grading
from proximo.types import Completion, Problem, Rollout

REPORT_EVERY = 60.0
"""Seconds of waiting for grades after which a message says for which problem."""
LONGEST = 3600.0
"""Seconds that grading one group may take when everything else is done. Graders have shorter limits, so that a group
that takes longer will never finish."""

Begins = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Graded:
    rollouts: list[tuple[Rollout, ...]]
    """Completions and grades of each problem, in order."""
    seconds: float
    """Seconds that grading took after everything was sampled."""


def graded(task: Task, problems: Sequence[Problem], stream: Stream, begins: Begins = nullcontext) -> Graded:
    """The completions of each problem from a stream, and the task's grades.

    `begins`: held while a group is begun, not while it waits, where several threads grade with one task."""
    judge = _graded_along if task.while_sampling else _graded_after
    with grading():  # so that all groups use the same workers
        return judge(task, problems, stream, begins)


def _graded_along(task: Task, problems: Sequence[Problem], stream: Stream, begins: Begins) -> Graded:
    with GroupGrader(task, begins) as grader:
        for number, completions in stream:
            grader.give(number, problems[number], completions)
        start = time.perf_counter()
        with phase("waiting for grades"):
            rollouts = grader.finish()
    seconds = time.perf_counter() - start
    return Graded([rollouts[number] for number in range(len(problems))], seconds)


def _graded_after(task: Task, problems: Sequence[Problem], stream: Stream, begins: Begins) -> Graded:
    answers = gathered(stream, len(problems))
    start = time.perf_counter()
    asked = [problem for problem, siblings in zip(problems, answers, strict=True) for _ in siblings]
    completions = [completion for siblings in answers for completion in siblings]
    with phase("waiting for grades"):
        with begins():
            waiting = _begun(task, asked, completions)
        rollouts = iter(waiting())
    seconds = time.perf_counter() - start
    return Graded([tuple(islice(rollouts, len(siblings))) for siblings in answers], seconds)


def _begun(task: Task, problems: Sequence[Problem], completions: Sequence[Completion]) -> Waiting[tuple[Rollout, ...]]:
    """Begin to grade; tasks that do not wait for anything else have then graded."""
    waiting = begin_grading(task, problems, completions)

    def finish() -> tuple[Rollout, ...]:
        grades = waiting()
        for problem, grade in zip(problems, grades, strict=True):
            if not grade.applies:
                message = f"every reward function returned None for {plain(problem.id, 100)}"
                note_failure("rewards", Failure("none", message))
        with grading() as active:
            return tuple(
                Rollout(
                    completion, replace(grade, logged=logged) if (logged := active.take_logged(completion)) else grade
                )
                for completion, grade in zip(completions, grades, strict=True)
            )

    return finish


class StepGrader(Protocol):
    """Grades groups that come one by one."""

    def give(self, number: int, problem: Problem, completions: tuple[Completion, ...]) -> None: ...

    def settled(self) -> Mapping[int, tuple[Rollout, ...]]:
        """Wait for the grades of all groups that were given, and return them by number."""
        ...


@contextmanager
def opened_grader(task: Task) -> Iterator[StepGrader]:
    """The grader that fits a task: beside sampling where the task allows that, else when its grades are waited for."""
    with grading():
        if not task.while_sampling:
            yield WaitingGrader(task)
            return
        with GroupGrader(task) as grader:
            yield grader


class WaitingGrader:
    """Grades all groups together when their grades are waited for, in the order of their numbers."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._given: dict[int, tuple[Problem, tuple[Completion, ...]]] = {}
        self._rollouts: dict[int, tuple[Rollout, ...]] = {}

    def give(self, number: int, problem: Problem, completions: tuple[Completion, ...]) -> None:
        self._given[number] = problem, completions

    def settled(self) -> Mapping[int, tuple[Rollout, ...]]:
        groups, self._given = sorted(self._given.items()), {}
        if groups:
            done = _graded_after(
                self._task,
                [problem for _, (problem, _) in groups],
                ((order, completions) for order, (_, (_, completions)) in enumerate(groups)),
                nullcontext,
            )
            self._rollouts |= {number: each for (number, _), each in zip(groups, done.rollouts, strict=True)}
        return self._rollouts


class GroupGrader:
    """Grades groups on a separate thread, in the order given. Rewards that wait, such as judges behind a server, are
    begun in that order and wait together.

    So no verdict depends on how fast anything is, a task need not be ready for several threads, and one that draws
    random numbers draws them in the same order in every run.
    """

    def __init__(self, task: Task, begins: Begins = nullcontext) -> None:
        self._task, self._begins = task, begins
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._settled: SimpleQueue[None] = SimpleQueue()
        """An entry for each time that all grades were there, and one when the thread ends."""
        self._begun: deque[tuple[int, Problem, Waiting[tuple[Rollout, ...]]]] = deque()
        self._rollouts: dict[int, tuple[Rollout, ...]] = {}
        self._failure: BaseException | None = None
        self._left = False
        self._current: tuple[str, float] | None = None
        """Problem that is being graded, and its start time."""
        # A daemon: a grader that never returns must not keep an interrupted program alive. It has the caller's
        # context (the run's `Grading`, decimal's precision); torch's modes are reset on every thread.
        self._thread = Thread(target=copy_context().run, args=(self._work,), name="grader", daemon=True)

    def __enter__(self) -> "GroupGrader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the remaining groups after an error, without waiting; the thread ends after the current one."""
        self._left = True
        self._jobs.put(None)

    def give(self, number: int, problem: Problem, completions: tuple[Completion, ...]) -> None:
        """Queue a group for grading; returns at once. Raises what the task has raised so far."""
        if self._failure is not None:
            raise self._failure
        self._jobs.put(partial(self._begin, number, problem, completions))

    def settled(self) -> Mapping[int, tuple[Rollout, ...]]:
        """Wait for the grades of all groups so far; more may be given. Raises what the task raised."""
        self._jobs.put(self._settle)
        while True:
            try:
                self._settled.get(timeout=REPORT_EVERY)
            except Empty:
                self._look()
            else:
                break
        if self._failure is not None:
            raise self._failure
        return self._rollouts

    def finish(self) -> dict[int, tuple[Rollout, ...]]:
        """Wait for all queued groups. Raises what the task raised; later groups are not graded."""
        self._jobs.put(None)
        while self._thread.is_alive():
            self._thread.join(REPORT_EVERY)
            self._look()
        if self._failure is not None:
            raise self._failure
        return self._rollouts

    def _look(self) -> None:
        """Report a slow group; one that never finishes ends the run."""
        current = self._current
        if current is None or not self._thread.is_alive():
            return
        problem, since = current
        seconds = monotonic() - since
        if seconds > LONGEST:
            raise ValueError(
                f"grading problem {problem!r} has taken {seconds:.0f} s without a result: give the task's "
                "grade a time limit, after which a completion is unscored"
            )
        with suppress(OSError):  # stderr may be closed
            print(f"waiting for the grades of problem {problem!r} ({seconds:.0f} s)", file=sys.stderr)

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None and not self._left:
                job()
            self._finish_begun()
        except BaseException as failure:  # raised again in the caller's thread
            self._failure = failure
        finally:
            self._settled.put(None)

    def _begin(self, number: int, problem: Problem, completions: tuple[Completion, ...]) -> None:
        self._current = problem.id, monotonic()
        with self._begins():
            waiting = _begun(self._task, [problem] * len(completions), completions)
        self._begun.append((number, problem, waiting))

    def _finish_begun(self) -> None:
        while self._begun and not self._left:  # not after an error elsewhere
            number, problem, waiting = self._begun.popleft()
            self._current = problem.id, monotonic()
            self._rollouts[number] = waiting()

    def _settle(self) -> None:
        self._finish_begun()
        self._settled.put(None)
