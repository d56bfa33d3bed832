"""Grading while sampling goes on: groups are judged one by one, as they come out of the sampler."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from threading import Thread
from time import monotonic

from proximo.rewards.failures import Failure, plain
from proximo.rewards.grading import grading, note_failure
from proximo.samplers import Stream, gathered
from proximo.tasks import Task
from proximo.types import Completion, Grade, Problem, Rollout

SAID_EVERY = 60.0
"""Seconds of waiting for grades after which it is said what for."""
LONGEST = 3600.0
"""Seconds that one group may be graded for, when everything else has been done. Who grades has limits of their own; a
group that is not done by then never will be."""


@dataclass(frozen=True)
class Graded:
    rollouts: list[tuple[Rollout, ...]]
    """The siblings of each problem, in order."""
    seconds: float
    """That grading took once everything had been sampled."""


def graded(task: Task, problems: Sequence[Problem], stream: Stream) -> Graded:
    """The completions of each problem as a stream gives them, and the task's verdicts on them."""
    judge = _graded_along if task.while_sampling else _graded_after
    with grading():  # so that all groups use the same workers
        return judge(task, problems, stream)


def _graded_along(task: Task, problems: Sequence[Problem], stream: Stream) -> Graded:
    with Grader(task) as grader:
        for number, completions in stream:
            grader.give(number, problems[number], completions)
        start = time.perf_counter()
        rollouts = grader.finish()
    seconds = time.perf_counter() - start
    return Graded([rollouts[number] for number in range(len(problems))], seconds)


def _graded_after(task: Task, problems: Sequence[Problem], stream: Stream) -> Graded:
    answers = gathered(stream, len(problems))
    start = time.perf_counter()
    asked = [problem for problem, siblings in zip(problems, answers, strict=True) for _ in siblings]
    rollouts = iter(_judged(task, asked, [completion for siblings in answers for completion in siblings]))
    seconds = time.perf_counter() - start
    return Graded([tuple(islice(rollouts, len(siblings))) for siblings in answers], seconds)


def _judged(task: Task, problems: Sequence[Problem], completions: Sequence[Completion]) -> tuple[Rollout, ...]:
    grades: list[Grade] = task.grade(problems, completions)
    for problem, grade in zip(problems, grades, strict=True):
        if not grade.applies:
            message = f"every reward function returned None for {plain(problem.id, 100)}"
            note_failure("rewards", Failure("none", message))
    return tuple(Rollout(completion, grade) for completion, grade in zip(completions, grades, strict=True))


class Grader:
    """Judges groups on a thread of its own, one at a time and in the order they are given.

    So no verdict depends on how fast anything is, a task need not be ready for several threads, and one that draws
    random numbers draws them in the same order in every run.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._groups: SimpleQueue[tuple[int, Problem, tuple[Completion, ...]] | None] = SimpleQueue()
        self._rollouts: dict[int, tuple[Rollout, ...]] = {}
        self._failure: BaseException | None = None
        self._left = False
        self._current: tuple[str, float] | None = None
        """The problem that is being graded, and since when."""
        # A daemon: a grader that never returns must not keep an interrupted program alive. It has the caller's
        # context (the run's `Grading`, decimal's precision); torch's modes begin anew on every thread.
        self._thread = Thread(target=copy_context().run, args=(self._work,), name="grader", daemon=True)

    def __enter__(self) -> "Grader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Not a wait: after an error what has not been graded is forgotten, and the thread ends with its group."""
        self._left = True
        self._groups.put(None)

    def give(self, number: int, problem: Problem, completions: tuple[Completion, ...]) -> None:
        """To be graded; returns at once. What the task has raised by now is raised here."""
        if self._failure is not None:
            raise self._failure
        self._groups.put((number, problem, completions))

    def finish(self) -> dict[int, tuple[Rollout, ...]]:
        """Wait for all that was given. What the task raised is raised here; nothing after it was graded."""
        self._groups.put(None)
        while self._thread.is_alive():
            self._thread.join(SAID_EVERY)
            self._look()
        if self._failure is not None:
            raise self._failure
        return self._rollouts

    def _look(self) -> None:
        """Say what is waited for; a group that takes for ever ends the run."""
        current = self._current
        if current is None or not self._thread.is_alive():
            return
        problem, since = current
        seconds = monotonic() - since
        if seconds > LONGEST:
            raise ValueError(
                f"problem {problem!r} has been graded for {seconds:.0f} s and no verdict has come: give the task's "
                "grade a limit of its own, after which a completion is unscored"
            )
        with suppress(OSError):  # nobody reads it any more
            print(f"waiting for the grades of problem {problem!r} ({seconds:.0f} s)", file=sys.stderr)

    def _work(self) -> None:
        try:
            while (group := self._groups.get()) is not None and not self._left:
                number, problem, completions = group
                self._current = problem.id, monotonic()
                self._rollouts[number] = _judged(self._task, [problem] * len(completions), completions)
        except BaseException as failure:  # whatever it is, it is the caller's to see
            self._failure = failure
