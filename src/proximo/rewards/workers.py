"""Reward functions in processes of their own: the run continues if they are slow, leak memory, fail or crash.

A worker is asked one call at a time. A function whose calls mostly wait, for a server or a disk, gets further workers,
so that several groups are scored at once; one that computes keeps a single worker, since its time limits would
otherwise be shared between them. No score depends on how fast anything is: calls are seeded by what they ask. A worker
that had to be killed is replaced with the next call. On the places of a cluster there are as many workers as places,
whatever they do, and what a lost node was asked is asked elsewhere.
"""

import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import replace
from typing import Any

from proximo.processes.failures import Failure, Found, GraderFailed, checked, plain
from proximo.processes.remote.places import Places
from proximo.rewards.processes import NODE_LOST, TRIES, Job, NotLoaded, Process
from proximo.rewards.protocol import Result, Waiting

LONGEST = 86_400.0
"""Seconds of a call."""
RECYCLE_CALLS = 5000
"""Calls after which a worker is replaced, before a slow leak matters."""
MAX_CHILDREN = 32
"""A worker that leaves more processes behind is replaced."""
BUSY = 0.2
"""Share of its time that a call computes, above which calls do not run at once."""
LEAST_WAIT = 0.1
"""Seconds that calls wait, below which they do not run at once: on a busy machine a quick call waits a little, too."""
PAYS_OFF = 20
"""Number of calls within which the start of a further worker must pay off."""
Columns = Mapping[str, Sequence[Any]]
"""Arguments of a call by name, each with one entry for each completion."""


class Threads:
    """Daemon threads that do queued work: at most `most`, started when work would wait and `may_grow` allows it, which
    is told how many there are.

    Daemons: a call that never returns must not keep an interrupted program alive.
    """

    def __init__(self, most: int, may_grow: Callable[[int], bool] = lambda count: True) -> None:
        self._most, self._may_grow = most, may_grow
        self._queue: deque[tuple[Future[Any], Callable[[], None]]] = deque()
        self._count = self._idle = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def begin(self, work: Waiting[Result]) -> Waiting[Result]:
        """Queue the work, which runs in a copy of this thread's context."""
        future: Future[Result] = Future()
        context = copy_context()

        def done() -> None:
            try:
                future.set_result(context.run(work))
            except BaseException as error:  # raised again where the result is asked for
                future.set_exception(error)

        with self._changed:
            self._queue.append((future, done))
            self._grow()
            self._changed.notify()
        return future.result

    def close(self) -> None:
        """Drop what no thread has begun, and let the threads end. Whoever waits for it gets a CancelledError."""
        with self._changed:
            self._is_closed = True
            while self._queue:
                self._queue.pop()[0].cancel()
            self._changed.notify_all()

    def _grow(self) -> None:
        while (
            len(self._queue) > self._idle
            and self._count < self._most
            and (not self._count or self._may_grow(self._count))
        ):
            self._count, self._idle = self._count + 1, self._idle + 1
            threading.Thread(target=self._work, name="reward", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                self._idle -= 1
                _, work = self._queue.popleft()
            work()
            with self._changed:
                self._idle += 1
                self._grow()


class Crew:
    """All workers of a function: one, and further ones for calls that would wait, where that pays off."""

    def __init__(self, job: Job, at_once: int = 1, places: Places | None = None) -> None:
        """`places`: where the workers run; None: on this machine."""
        self.job, self._places = job, places
        self._threads = Threads(max(at_once, places.size if places else 1), self._may_grow)
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._lock = threading.Lock()

    @property
    def form(self) -> str:
        """How a user's function is called, in words; empty before the first call."""
        return next((worker.form for worker in self._workers if worker.form), "")

    def begin(self, work: Waiting[Result]) -> Waiting[Result]:
        """Begin work that calls the function."""
        return self._threads.begin(work)

    def call(self, columns: Columns, constants: Mapping[str, Any]) -> "list[Found] | Failure":
        """A score or a failure for each completion, or one failure of the whole call."""
        with self._lock:
            if not self._idle:
                self._idle.append(Worker(self.job, self._places))
                self._workers.append(self._idle[-1])
            worker = self._idle.pop()
        try:
            return worker.call(columns, constants)
        finally:
            with self._lock:
                self._idle.append(worker)

    def close(self) -> None:
        self._threads.close()
        for worker in self._workers:
            worker.close()

    def _may_grow(self, count: int) -> bool:
        """Whether there may be more than `count` workers: there are more places, or calls wait rather than compute, are
        slow enough for a further process, and leave memory for it."""
        workers = list(self._workers)
        if self._places is not None and count < self._places.size:
            return True
        calls, seconds = sum(each.calls for each in workers), sum(each.seconds for each in workers)
        waits = sorted(wait for each in workers for wait in each.waits)
        if len(waits) < 2 or waits[(len(waits) - 1) // 2] < LEAST_WAIT:  # the median, of two the shorter
            return False
        memory = max(each.memory for each in workers)
        return (
            sum(each.computed for each in workers) < BUSY * seconds
            and PAYS_OFF * seconds / calls > max(each.start_seconds for each in workers)
            and (len(workers) + 1) * memory <= self.job.memory_mb * 2**20
        )


class Worker:
    """A function's process, made when it is first needed and made anew when it has died."""

    def __init__(self, job: Job, places: Places | None = None) -> None:
        self.job, self._places = job, places
        self.form = ""
        """How a user's function is called, in words; empty before the first call."""
        self.calls, self.seconds, self.computed = 0, 0.0, 0.0
        """Answered calls, how long they took, and for how much of it they computed."""
        self.waits: deque[float] = deque(maxlen=5)
        """Seconds that the last calls waited."""
        self.start_seconds, self.memory = 0.0, 0
        """Of the last start, and bytes in use after the last call."""
        self._process: Process | None = None
        self._was_loaded = self._is_closed = False
        self._calls = self._first_memory = 0
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def call(self, columns: Columns, constants: Mapping[str, Any]) -> list[Found] | Failure:
        """A score or a failure for each completion, or one failure of the whole call."""
        count = len(next(iter(columns.values())))
        arguments = _encoded({name: list(column) for name, column in columns.items()} | dict(constants))
        # Random numbers follow what is asked, not when or after what.
        seed = int.from_bytes(hashlib.sha256(arguments.encode()).digest()[:6])
        with self._lock:
            answer, said = self._ask(arguments, count, seed)
            if isinstance(answer, Failure):
                self._process = None
                return _with_output(answer, said)
            result = _read(answer, count)
            if isinstance(result, Failure):
                result = _with_output(result, said)
            self._recycle(answer, result)
            return result

    def _ask(self, arguments: str, count: int, seed: int, tries: int = TRIES) -> tuple[dict[str, Any] | Failure, str]:
        """Its answer, and what it printed; of another node where one is lost."""
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

    def close(self) -> None:
        """Kill it, also in the middle of another thread's call. A process that was forked off leaves it alone."""
        self._is_closed = True
        process = self._process
        if process is None or self._owner != os.getpid():
            return
        if self._lock.acquire(blocking=False):
            process.kill()
        else:  # the other thread reads its end, and tidies up where it still can
            process.strike()

    def _ready(self) -> Process | Failure:
        if self._is_closed:
            return Failure("died", "the run has ended")
        if self._process is None or not self._process.is_alive:  # a stop request in the middle of a call killed it
            self._process, start = None, time.monotonic()
            try:
                self._process = Process.started(self.job, self._places)
            except NotLoaded as error:
                if self._was_loaded:
                    return Failure("start", f"its process could not be started again: {error}", fatal=True)
                raise GraderFailed(f"reward.path is {self.job.path!r}: {error}") from None
            self._was_loaded, self._calls, self._first_memory = True, 0, 0
            self.start_seconds = time.monotonic() - start
            self.form = self._process.form
        return self._process

    def _measure(self, answer: Mapping[str, Any], seconds: float) -> None:
        computed = answer.get("computed")
        self.calls, self.seconds, self.memory = self.calls + 1, self.seconds + seconds, _whole(answer.get("memory"))
        busy = min(computed, seconds) if isinstance(computed, float) and computed >= 0 else seconds
        self.computed += busy
        self.waits.append(seconds - busy)

    def _recycle(self, answer: Mapping[str, Any], result: list[Found] | Failure) -> None:
        """Replace a worker that is growing, out of memory, was told to exit or has closed its output."""
        assert self._process is not None
        self._calls += 1
        memory, children = _whole(answer.get("memory")), _whole(answer.get("children"))
        self._first_memory = self._first_memory or memory
        room = self.job.memory_mb * 2**20 - self._first_memory
        grew = memory - self._first_memory > room / 2
        broke = answer.get("closed") is True or (isinstance(result, Failure) and result.fatal)
        if broke or grew or children > MAX_CHILDREN or self._calls >= RECYCLE_CALLS:
            self._process.kill()
            self._process = None


def check_seconds(seconds: float) -> None:
    """Of a reward's field `seconds`."""
    if not 0 < seconds <= LONGEST:
        raise ValueError(f"reward.seconds is {seconds}: give a positive number, at most {LONGEST:g} (a day)")


def check_at_once(at_once: int) -> None:
    """Of a reward's field `at_once`."""
    if at_once < 1:
        raise ValueError(f"reward.at_once is {at_once}: give at least 1")


def _encoded(arguments: Mapping[str, Any]) -> str:
    """As JSON; what that has no word for, such as a date or a decimal number, becomes text."""
    try:
        return json.dumps(arguments, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise GraderFailed(f"a column of the data cannot be given to a reward function: {error}") from error


def _read(answer: Mapping[str, Any], count: int) -> list[Found] | Failure:
    """The answer comes from a process that ran foreign code: it is data, and nothing about it is taken on trust."""
    scores, failed = answer.get("scores"), answer.get("failed")
    if isinstance(failed, str):
        return Failure(plain(failed, 80), plain(str(answer.get("message"))), fatal=failed in ("exit", "memory"))
    if not isinstance(scores, list) or len(scores) != count:
        return Failure("junk", "its process answered no list of scores", fatal=True)
    return [checked(value) for value in scores]


def _with_output(failure: Failure, printed: str) -> Failure:
    message = f"{failure.message}; it printed: {printed}" if printed else failure.message
    return replace(failure, message=message)


def _whole(value: object) -> int:
    """A count or a number of bytes; 0 for what can be neither."""
    return value if type(value) is int and 0 <= value < 1 << 62 else 0
