"""Deadlines of programs that may never end. One thread watches all of them: a file has a hundred thousand prompts, and
a thread for each would take longer than their templates."""

import ctypes
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def within(seconds: float, error: type[Exception]) -> Iterator[None]:
    """Raise an error of this kind in this thread when the time is over; a signal would only reach the main thread."""
    deadline = _Deadline(seconds, error)
    _watch.add(deadline)
    try:
        yield
        if time.monotonic() > deadline.at:  # inside one instruction, after which nothing could be raised
            raise error
    finally:
        deadline.end()
        _watch.forget(deadline)


class _Deadline:
    """Time at which an error is raised in the thread that set it, unless its block has ended."""

    def __init__(self, seconds: float, error: type[Exception]) -> None:
        self.at = time.monotonic() + seconds
        self._thread, self._error = ctypes.c_ulong(threading.get_ident()), error
        self._lock, self._is_over, self._is_raised = threading.Lock(), False, False

    def strike(self) -> None:
        with self._lock:
            if not self._is_over:
                self._is_raised = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, ctypes.py_object(self._error))

    def end(self) -> None:
        with self._lock:
            self._is_over = True
        if self._is_raised:  # at the last moment: it must not arrive after the block
            ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, None)


class _Watch:
    """A thread that waits for the next deadline, and ends where it finds none; the next one starts it again."""

    def __init__(self) -> None:
        self._lock, self._news = threading.Lock(), threading.Event()
        self._waiting: set[_Deadline] = set()
        self._is_running, self._wakes = False, math.inf

    def add(self, deadline: _Deadline) -> None:
        with self._lock:
            self._waiting.add(deadline)
            if not self._is_running:
                self._is_running, self._wakes = True, deadline.at
                threading.Thread(target=self._run, name="proximo-deadlines", daemon=True).start()
            elif deadline.at < self._wakes:
                self._news.set()

    def forget(self, deadline: _Deadline) -> None:
        self._waiting.discard(deadline)  # atomic: an error may arrive here, and a lock would stay taken

    def _run(self) -> None:
        while self._has_next():
            self._news.wait(max(0.0, self._wakes - time.monotonic()))
            for deadline in tuple(self._waiting):
                if deadline.at <= time.monotonic():
                    self._waiting.discard(deadline)
                    deadline.strike()

    def _has_next(self) -> bool:
        with self._lock:
            self._news.clear()
            self._wakes = min((deadline.at for deadline in tuple(self._waiting)), default=math.inf)
            self._is_running = self._wakes < math.inf
            return self._is_running


_watch = _Watch()


def _start_anew() -> None:
    """Watch with a thread of its own in a process that was forked, which has none of its parent's."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_start_anew)
