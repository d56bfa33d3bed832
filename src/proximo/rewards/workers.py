"""Reward functions in processes of their own: the run continues if they are slow, leak memory, fail or crash.

A worker is asked one call at a time. A function whose calls mostly wait, for a server or a disk, gets further workers,
so that several groups are scored at once; one that computes keeps a single worker, since its time limits would
otherwise be shared between them. No score depends on how fast anything is: calls are seeded by what they ask. A worker
that had to be killed is replaced with the next call. On the places of a cluster there are as many workers as places,
whatever they do, and what a lost node was asked is asked elsewhere.
"""

import hashlib
import json
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from proximo.processes.child import NODE_LOST, TRIES, NodePlaces, NotLoaded, WorkerProcess, located
from proximo.processes.failures import Failure, GraderFailed, Outcome, checked, plain
from proximo.processes.pool import Result, Threads, Waiting, WorkerSlot
from proximo.rewards.calling import MAX_NAMES

SCRIPT = Path(__file__).with_name("worker.py")
LONGEST = 86_400.0
"""Seconds of a call at most."""
RECYCLE_CALLS = 5000
"""Calls after which a worker is replaced, before a slow leak matters."""
MAX_CHILDREN = 32
"""Processes that a worker may leave behind before it is replaced."""
BUSY = 0.2
"""Share of its time that a call computes, above which calls do not run at once."""
LEAST_WAIT = 0.1
"""Seconds that calls wait, below which they do not run at once: on a busy machine a quick call waits a little, too."""
PAYS_OFF = 20
"""Number of calls within which the start of a further worker must pay off."""
NAME = re.compile(r"[\w.-]{1,80}")
"""Names that a metric of a user's may have."""
Measured = Mapping[str, Sequence[float]]
"""Numbers of a step by the names of their metrics; the empty one is that of the function."""
Columns = Mapping[str, Sequence[Any]]
"""Arguments of a call by name, each with one entry for each completion."""


@dataclass(frozen=True)
class Scored:
    """Result of a call of a reward function."""

    scores: list[Outcome]
    """Score or failure of each completion."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the function logged, by their names."""


@dataclass(frozen=True)
class FunctionJob:
    """A function for a worker, and the limits of a call."""

    path: str
    """package.module:function, or path/to/file.py:function."""
    seconds: float
    memory_mb: int
    is_users: bool = False
    """True if it is a user's function, called as its parameters say; ours take their arguments as they are."""
    measures: bool = False
    """True if it gives metrics of a step, and no scores."""

    @property
    def field(self) -> str:
        """Field of a config that names it, for errors."""
        return "metrics" if self.measures else "reward.path"

    def message(self) -> dict[str, Any]:
        """Message that says what the process loads."""
        path, name = located(self.path)
        return {"place": path, "name": name, "user": self.is_users, "measures": self.measures}


class WorkerPool:
    """All workers of a function: one, and further ones for calls that would wait, where that pays off."""

    def __init__(self, job: FunctionJob, at_once: int = 1, places: NodePlaces | None = None) -> None:
        """`places`: where the workers run; None: on this machine."""
        self.job, self._places = job, places
        self._threads = Threads(max(at_once, places.size if places else 1), self._may_grow)
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._lock = threading.Lock()

    @property
    def form(self) -> str:
        """Form in which a user's function is called, in words; empty before the first call."""
        return next((worker.form for worker in self._workers if worker.form), "")

    def begin(self, work: Waiting[Result]) -> Waiting[Result]:
        """Begin work that calls the function."""
        return self._threads.begin(work)

    def call(self, columns: Columns, constants: Mapping[str, Any]) -> "Scored | Failure":
        """A score or a failure for each completion, or one failure of the whole call."""
        return self._with_worker(lambda worker: worker.call(columns, constants))

    def measure(self, columns: Columns) -> "Measured | Failure":
        """The metrics of a step's completions."""
        return self._with_worker(lambda worker: worker.measure(columns))

    def check(self) -> None:
        """Raise GraderFailed if the function cannot be loaded or called."""
        self._with_worker(lambda worker: worker.start())

    def _with_worker(self, work: "Callable[[Worker], Result]") -> Result:
        with self._lock:
            if not self._idle:
                self._idle.append(Worker(self.job, self._places))
                self._workers.append(self._idle[-1])
            worker = self._idle.pop()
        try:
            return work(worker)
        finally:
            with self._lock:
                self._idle.append(worker)

    def close(self) -> None:
        self._threads.close()
        for worker in self._workers:
            worker.close()

    def _may_grow(self, count: int) -> bool:
        """Tell whether there may be more than `count` workers: there are more places, or calls wait rather than
        compute, are slow enough for a further process, and leave memory for it."""
        workers = list(self._workers)
        if self._places is not None and count < self._places.size:
            return True
        calls, seconds = sum(worker.calls for worker in workers), sum(worker.seconds for worker in workers)
        waits = sorted(wait for worker in workers for wait in worker.waits)
        if len(waits) < 2 or waits[(len(waits) - 1) // 2] < LEAST_WAIT:  # the median, of two the shorter
            return False
        memory = max(worker.memory for worker in workers)
        return (
            sum(worker.computed for worker in workers) < BUSY * seconds
            and PAYS_OFF * seconds / calls > max(worker.start_seconds for worker in workers)
            and (len(workers) + 1) * memory <= self.job.memory_mb * 2**20
        )


class Worker:
    """A function's process, and what its calls have taken."""

    def __init__(self, job: FunctionJob, places: NodePlaces | None = None) -> None:
        self.job = job
        self.form = ""
        """Form in which a user's function is called, in words; empty before the first call."""
        self.calls, self.seconds, self.computed = 0, 0.0, 0.0
        """Answered calls, how long they took, and for how much of it they computed."""
        self.waits: deque[float] = deque(maxlen=5)
        """Seconds that the last calls waited."""
        self.start_seconds, self.memory = 0.0, 0
        """Seconds of the last start, and bytes in use after the last call."""
        self._slot = WorkerSlot(SCRIPT, job, places)
        self._process: WorkerProcess | None = None
        """The process of the last call."""
        self._calls = self._first_memory = 0

    def call(self, columns: Columns, constants: Mapping[str, Any]) -> Scored | Failure:
        """A score or a failure for each completion, or one failure of the whole call."""
        return self._answered(columns, constants, _read)

    def measure(self, columns: Columns) -> "Measured | Failure":
        """The metrics of a step's completions."""
        return self._answered(columns, {}, _read_measured)

    def start(self) -> None:
        """Start the process, if it is not there; raises GraderFailed where the function cannot be loaded."""
        with self._slot:
            self._ready()

    def _answered(
        self,
        columns: Columns,
        constants: Mapping[str, Any],
        read: Callable[[Mapping[str, Any], int], Result | Failure],
    ) -> Result | Failure:
        count = len(next(iter(columns.values())))
        arguments = _encoded({name: list(column) for name, column in columns.items()} | dict(constants))
        # Random numbers follow what is asked, not when or after what.
        seed = int.from_bytes(hashlib.sha256(arguments.encode()).digest()[:6])
        with self._slot:
            answer, printed = self._ask(arguments, count, seed)
            if isinstance(answer, Failure):
                return _with_output(answer, printed)
            result = read(answer, count)
            if isinstance(result, Failure):
                result = _with_output(result, printed)
            self._recycle(answer, result)
            return result

    def close(self) -> None:
        self._slot.close()

    def _ask(self, arguments: str, count: int, seed: int, tries: int = TRIES) -> tuple[dict[str, Any] | Failure, str]:
        """Ask the process, or one on another node where its node is lost; returns the answer and what was printed."""
        process = self._ready()
        if isinstance(process, Failure):
            return process, ""
        start = time.monotonic()
        answer = process.ask(arguments, count, seed, self.job.seconds)
        if not isinstance(answer, Failure):
            self._measure(answer, time.monotonic() - start)
        elif answer.kind == NODE_LOST and tries > 1:
            return self._ask(arguments, count, seed, tries - 1)
        return answer, process.printed

    def _ready(self) -> WorkerProcess | Failure:
        start = time.monotonic()
        try:
            process = self._slot.worker()
        except NotLoaded as error:
            if self._process is not None:
                return Failure("start", f"its process could not be started again: {error}", fatal=True)
            raise GraderFailed(f"{self.job.field} is {self.job.path!r}: {error}") from None
        if process is None:
            return Failure("died", "the run has ended")
        if process is not self._process:
            self._process, self._calls, self._first_memory = process, 0, 0
            self.start_seconds, self.form = time.monotonic() - start, process.form
        return process

    def _measure(self, answer: Mapping[str, Any], seconds: float) -> None:
        computed = answer.get("computed")
        self.calls, self.seconds, self.memory = self.calls + 1, self.seconds + seconds, _whole(answer.get("memory"))
        busy = min(computed, seconds) if isinstance(computed, float) and computed >= 0 else seconds
        self.computed += busy
        self.waits.append(seconds - busy)

    def _recycle(self, answer: Mapping[str, Any], result: object) -> None:
        """Replace a worker that is growing, out of memory, was told to exit or has closed its output."""
        self._calls += 1
        memory, children = _whole(answer.get("memory")), _whole(answer.get("children"))
        self._first_memory = self._first_memory or memory
        room = self.job.memory_mb * 2**20 - self._first_memory
        grew = memory - self._first_memory > room / 2
        broke = answer.get("closed") is True or (isinstance(result, Failure) and result.fatal)
        if broke or grew or children > MAX_CHILDREN or self._calls >= RECYCLE_CALLS:
            self._slot.replace()


def check_seconds(seconds: float) -> None:
    """Check a reward's field `seconds`."""
    if not 0 < seconds <= LONGEST:
        raise ValueError(f"reward.seconds is {seconds}: give a positive number, at most {LONGEST:g} (a day)")


def check_at_once(at_once: int) -> None:
    """Check a reward's field `at_once`."""
    if at_once < 1:
        raise ValueError(f"reward.at_once is {at_once}: give at least 1")


def _encoded(arguments: Mapping[str, Any]) -> str:
    """Write arguments as JSON; what that has no word for, such as a date or a decimal number, becomes text."""
    try:
        return json.dumps(arguments, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise GraderFailed(f"a column of the data cannot be given to a reward function: {error}") from error


def _read(answer: Mapping[str, Any], count: int) -> Scored | Failure:
    """Read the answer of a process that ran foreign code: it is data, and nothing about it is taken on trust."""
    scores, failed = answer.get("scores"), answer.get("failed")
    if isinstance(failed, str):
        return Failure(plain(failed, 80), plain(str(answer.get("message"))), fatal=failed in ("exit", "memory"))
    if not isinstance(scores, list) or len(scores) != count:
        return Failure("junk", "its process answered no list of scores", fatal=True)
    return Scored([checked(value) for value in scores], _read_logged(answer.get("logged")))


def _read_logged(named: object) -> dict[str, float]:
    """Read what a function logged; nothing where that is no metrics."""
    if not isinstance(named, dict) or len(named) > MAX_NAMES:
        return {}
    numbers = {name: value for name, value in named.items() if isinstance(value, float) and math.isfinite(value)}
    return {name: value for name, value in numbers.items() if isinstance(name, str) and NAME.fullmatch(name)}


def _read_measured(answer: Mapping[str, Any], count: int) -> "Measured | Failure":
    """Read the metrics that a process of foreign code answers, likewise."""
    if isinstance(failed := answer.get("failed"), str):
        return Failure(plain(failed, 80), plain(str(answer.get("message"))), fatal=failed in ("exit", "memory"))
    return checked_measures(answer.get("measured"), count)


def checked_measures(named: object, count: int) -> "Measured | Failure":
    """Metrics that a function gave by their names, or what is wrong with them; what is no finite number of a row is
    left out."""
    if not isinstance(named, dict) or len(named) > MAX_NAMES:
        return Failure("junk", "it answered no metrics", fatal=True)
    measures = dict[str, list[float]]()
    for name, items in named.items():
        if not isinstance(name, str) or not isinstance(items, list) or len(items) > max(count, 1):
            return Failure("junk", "it answered no lists of numbers", fatal=True)
        if name and not NAME.fullmatch(name):
            return Failure("junk", f"it named a metric {plain(name, 100)!r}: use letters, digits, _, - and .")
        if texts := [item for item in items if item is not None and not isinstance(item, float)]:
            return Failure("not a number", f"it returned {plain(str(texts[0]), 150)} for {name or 'a completion'}")
        measures[name] = [item for item in items if item is not None and math.isfinite(item)]
    return measures


def _with_output(failure: Failure, printed: str) -> Failure:
    message = f"{failure.message}; it printed: {printed}" if printed else failure.message
    return replace(failure, message=message)


def _whole(value: object) -> int:
    """A count or a number of bytes; 0 for what can be neither."""
    return value if type(value) is int and 0 <= value < 1 << 62 else 0
