"""Pools: threads that do queued work, and workers that are made anew when they have died."""

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from proximo.processes.child import Loads, NodePlaces, WorkerProcess

Result = TypeVar("Result")
Waiting = Callable[[], Result]
"""Work that was begun: calling it waits for the result, or raises what the work raised."""


class Threads:
    """Daemon threads that do queued work, started when work would wait and `may_grow`, given their number, allows it.

    Daemons: a call that never returns must not keep an interrupted program alive.
    """

    def __init__(self, max_threads: int, may_grow: Callable[[int], bool] = lambda count: True) -> None:
        self._max_threads, self._may_grow = max_threads, may_grow
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
            and self._count < self._max_threads
            and (not self._count or self._may_grow(self._count))
        ):
            self._count, self._idle = self._count + 1, self._idle + 1
            threading.Thread(target=self._work, name="work", daemon=True).start()

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


class WorkerSlot:
    """Slot for one worker, which is started when it is first needed and anew when it has died. Whoever asks the worker
    holds the slot."""

    def __init__(self, script: Path, job: Loads, places: NodePlaces | None) -> None:
        """`places`: where the worker may run; None: on this machine."""
        self._start = partial(WorkerProcess.started, script, job, places)
        self._process: WorkerProcess | None = None
        self._is_closed = False
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def __enter__(self) -> "WorkerSlot":
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def is_filled(self) -> bool:
        """True if there is a worker that lives."""
        return self._process is not None and self._process.is_alive

    def worker(self) -> WorkerProcess | None:
        """The worker, None after the end of the run; NotLoaded where none can be started."""
        if self._is_closed:
            return None
        if not self.is_filled:  # a stop request in the middle of a call killed it
            self._process = None
            self._process = self._start()
        return self._process

    def replace(self) -> None:
        """End the worker: the next call has a new one."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def close(self) -> None:
        """Kill the worker, also in the middle of another thread's call. A process that was forked off leaves it
        alone."""
        self._is_closed = True
        process = self._process
        if process is None or self._owner != os.getpid():
            return
        if self._lock.acquire(blocking=False):
            try:
                process.kill()
            finally:
                self._lock.release()
        else:  # the other thread reads its end, and tidies up where it still can
            process.strike()
