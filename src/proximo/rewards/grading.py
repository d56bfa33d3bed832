"""What the graders of one run share: the count of their failures, and the processes of its reward functions.

A task or a reward is a value that several runs may hold, and its signature has no room for the run it grades for. So
the run's `Grading` is found through a context variable: set by the run on its own thread, copied to the thread that
grades (training/rl/grading.py), and unknown to other threads. Nothing here belongs to the whole process.
"""

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from proximo.rewards.failures import Failure, Tally
from proximo.rewards.processes import Job
from proximo.rewards.workers import Crew, Threads


class Grading:
    """One run's failures and workers.

    Example:
        with Grading().active() as grading:
            scores = reward(problems, completions)
        print(*grading.failures.take())
        grading.close()
    """

    def __init__(self) -> None:
        self.failures = Tally()
        """Why completions are unscored. Graders add to it on any thread; the loop takes them out."""
        self.forms: dict[str, str] = {}
        """How reward functions that were given in Python are called, by their names."""
        self._crews: dict[object, Crew | Threads] = {}
        self._ended = weakref.finalize(self, _close, self._crews)

    def crew(self, job: Job, at_once: int = 1) -> Crew:
        """The processes of a reward function; the same ones for equal jobs."""
        if not isinstance(found := self._crews.get(job), Crew):
            found = self._crews[job] = Crew(job, at_once)
        return found

    def threads(self, of: Hashable, at_once: int) -> Threads:
        """Threads of a reward that waits in this process; the same ones for equal rewards."""
        if not isinstance(found := self._crews.get(of), Threads):
            found = self._crews[of] = Threads(at_once)
        return found

    def called(self) -> list[str]:
        """A line for each reward function of a user's that was called: as whose."""
        forms = {
            worker.job.path: worker.form for worker in self._crews.values() if isinstance(worker, Crew) and worker.form
        } | self.forms
        return [f"reward {name}: called as {form}" for name, form in forms.items()]

    def close(self) -> None:
        """Kill the workers. Also done when the object is garbage-collected, and when the program exits."""
        _close(self._crews)

    @contextmanager
    def active(self) -> Iterator["Grading"]:
        """Graders called inside, on this thread or in a copy of its context, use this one."""
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)


_CURRENT: ContextVar[Grading] = ContextVar("grading")


@contextmanager
def grading() -> Iterator[Grading]:
    """The active one; where none is active, a new one that ends with the block."""
    if (active := _CURRENT.get(None)) is not None:
        yield active
        return
    own = Grading()
    try:
        with own.active():
            yield own
    finally:
        own.close()


def note_failure(grader: str, failure: Failure) -> None:
    """Count a completion that could not be scored, in the run that is being graded for."""
    with grading() as active:
        active.failures.add(grader, failure)


def _close(crews: dict[object, Crew | Threads]) -> None:
    while crews:
        _, crew = crews.popitem()
        crew.close()
