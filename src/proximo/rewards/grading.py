"""State that the graders of one run share: the count of their failures, the processes of its reward functions.

A task or a reward is a value that several runs may hold, and its signature has no room for the run it grades for. So
the run's `Grading` is found through a context variable: set by the run on its own thread, copied to the thread that
grades (rl/grading.py), and unknown to other threads. Nothing here belongs to the whole process.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Lock
from typing import Protocol, TypeVar, cast

from proximo.processes.child import NodePlaces
from proximo.processes.failures import Failure, Tally
from proximo.processes.pool import Threads
from proximo.rewards.judges.usage import Usage
from proximo.rewards.workers import FunctionJob, WorkerPool
from proximo.types import Completion


class Closes(Protocol):
    """Holds processes or threads."""

    def close(self) -> None: ...


Shared = TypeVar("Shared", bound=Closes)


class Grading:
    """One run's failures and workers.

    Example:
        with Grading().active() as grading:
            scores = reward(problems, completions)
        print(*grading.failures.take())
        grading.close()
    """

    def __init__(self, folder: Path | None = None, places: NodePlaces | None = None) -> None:
        """`folder`: the run's, for verdicts of judges. `places`: where workers run; None: on this machine."""
        self.folder, self.places = folder, places
        self.failures = Tally()
        """Why completions are unscored. Graders add to it on any thread; the loop takes them out."""
        self.failed = Tally()
        """Errors that replies of the policy have caused in an environment: their episodes have the lowest reward."""
        self.usage = Usage("judge")
        """Requests and seconds that judges cost."""
        self.episodes = Usage("episode")
        """Number of the episodes of training, and their seconds."""
        self.notices: list[str] = []
        """Further lines that a person should know; the loop takes them out."""
        self.forms: dict[str, str] = {}
        """How reward functions that were given in Python are called, by their names."""
        self._logged: dict[int, tuple[Completion, dict[str, float]]] = {}
        """Completions being graded, by their identity, and what reward functions logged of them."""
        # What is first here is closed last: workers end before the places that they run at.
        self._shared: dict[Hashable, Closes] = {} if places is None else {NodePlaces: places}
        self._lock = Lock()
        self._ended = weakref.finalize(self, _close, self._shared)

    def shared(self, key: Hashable, make: Callable[[], Shared]) -> Shared:
        """Get what all calls of one reward share; the first call makes it."""
        with self._lock:
            if key not in self._shared:
                self._shared[key] = make()
            return cast(Shared, self._shared[key])

    def workers(self, job: FunctionJob, at_once: int = 1) -> WorkerPool:
        """The processes of a reward function; the same ones for equal jobs."""
        return self.shared(job, lambda: WorkerPool(job, at_once, self.places))

    def threads(self, of: Hashable, at_once: int) -> Threads:
        """Threads of a reward that waits in this process; the same ones for equal rewards."""
        return self.shared(of, lambda: Threads(at_once))

    def log(self, completion: Completion, numbers: Mapping[str, float]) -> None:
        """Keep what a reward function logged of a completion, until its grade is there."""
        if numbers:
            with self._lock:
                self._logged.setdefault(id(completion), (completion, {}))[1].update(numbers)

    def take_logged(self, completion: Completion) -> dict[str, float]:
        """Take what was logged of a completion since the last call."""
        with self._lock:
            _, numbers = self._logged.pop(id(completion), (completion, {}))
        return numbers

    def take_notices(self) -> list[str]:
        taken, self.notices = self.notices, []
        return taken

    def called(self) -> list[str]:
        """A line for each reward function of a user's that was called: as whose."""
        pools = [pool for pool in self._shared.values() if isinstance(pool, WorkerPool)]
        forms = {pool.job.path: pool.form for pool in pools if pool.form and not pool.job.measures} | self.forms
        return [f"reward {name}: called as {form}" for name, form in forms.items()]

    def close(self) -> None:
        """Kill the workers. Also done when the object is garbage-collected, and when the program exits."""
        _close(self._shared)

    @contextmanager
    def active(self) -> Iterator["Grading"]:
        """Give this one to graders called inside, on this thread or in a copy of its context."""
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)


_CURRENT: ContextVar[Grading] = ContextVar("grading")


@contextmanager
def grading() -> Iterator[Grading]:
    """Open the active `Grading`; where none is active, a new one that ends with the block."""
    if (active := _CURRENT.get(None)) is not None:
        yield active
        return
    new = Grading()
    try:
        with new.active():
            yield new
    finally:
        new.close()


def note_failure(grader: str, failure: Failure) -> None:
    """Count a completion that could not be scored, or that failed, in the run that is being graded for."""
    with grading() as active:
        (active.failed if failure.graded else active.failures).add(grader, failure)


def _close(shared: dict[Hashable, Closes]) -> None:
    while shared:
        _, held = shared.popitem()
        held.close()
