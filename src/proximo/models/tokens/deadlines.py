"""Deadlines of programs that may never end. One thread watches all of them: a file has a hundred thousand prompts, and
a thread for each would take longer than their templates."""

import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN = 0.25
"""Seconds until an error is raised again, where something has swallowed it."""


@contextmanager
def within(seconds: float, error: type[Exception]) -> Iterator[None]:
    """Raise an error of this kind in this thread when the time is over; a signal would only reach the main thread."""
    deadline = _Deadline(seconds, error, sys._getframe(2))  # of the block: the one between is contextlib's
    try:
        _watch.add(deadline)
        yield
        if time.monotonic() > deadline.at:  # inside one instruction, after which nothing could be raised
            raise error
    except Exception as other:
        if not isinstance(other, error) and isinstance(other.__context__, error):  # Jinja makes a TypeError of it, too
            raise error from other
        raise
    finally:
        deadline.end()
        _watch.forget(deadline)


class _Deadline:
    """Time at which an error is raised in the thread that set it, unless its block has ended; again and again, until it
    has: Jinja swallows whatever arrives at some of its instructions, and a thread holds one such error at a time."""

    def __init__(self, seconds: float, error: type[Exception], block: FrameType) -> None:
        self.at = self.due = time.monotonic() + seconds
        self.is_over = False
        self.thread, self.is_raised = threading.get_ident(), False
        self._error, self._block, self._lock = error, block, threading.Lock()

    def strike(self) -> None:
        with self._lock:
            if self.is_over or (self.is_raised and not self._is_inside()):  # the error has come while the block ended
                self.is_over = True
                return
            self.is_raised, self.due = True, time.monotonic() + AGAIN
            _raise_in(self.thread, self._error)

    @property
    def is_ours(self) -> bool:
        """True while the block of this thread goes on."""
        return self.thread == threading.get_ident() and not self.is_over

    def forked(self) -> "_Deadline":
        """Go on in a process that was forked inside the block: who held the lock may not be there."""
        self._lock = threading.Lock()
        return self

    def end(self) -> None:
        with self._lock:
            self.is_over = True
        if self.is_raised:  # at the last moment: it must not arrive after the block
            _raise_in(self.thread, None)

    def _is_inside(self) -> bool:
        frame = sys._current_frames().get(self.thread)
        while frame is not None and frame is not self._block:
            frame = frame.f_back
        return frame is not None


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    """Raise an error in a thread at its next instruction; None: one that has not arrived yet does not."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


class _Watch:
    """A thread that waits for the next deadline, and ends where it finds none; the next one starts it again."""

    def __init__(self) -> None:
        self._lock, self._news = threading.Lock(), threading.Event()
        self._waiting: dict[_Deadline, None] = {}
        """In the order in which they were set: an outer one before those inside its block."""
        self._is_running, self._wakes = False, math.inf

    def add(self, deadline: _Deadline) -> None:
        with self._lock:
            self._waiting[deadline] = None
            if not self._is_running:
                threading.Thread(target=self._run, name="proximo-deadlines", daemon=True).start()
                self._is_running, self._wakes = True, deadline.due
            elif deadline.due < self._wakes:
                self._news.set()

    def forget(self, deadline: _Deadline) -> None:
        self._waiting.pop(deadline, None)  # atomic: an error may arrive here, and a lock would stay taken

    def _run(self) -> None:
        while self._has_next():
            self._news.wait(max(0.0, self._wakes - time.monotonic()))
            self._strike(time.monotonic())

    def _strike(self, now: float) -> None:
        """Strike all deadlines that are due, of a thread only the outermost: its error would be overwritten else."""
        struck: set[int] = set()
        for deadline in tuple(self._waiting):
            if deadline.due <= now and deadline.thread in struck:
                deadline.due = now + AGAIN
            elif deadline.due <= now:
                deadline.strike()
            if deadline.is_over:
                self._waiting.pop(deadline, None)
            elif deadline.is_raised:
                struck.add(deadline.thread)

    def _has_next(self) -> bool:
        with self._lock:
            self._news.clear()
            self._wakes = min((deadline.due for deadline in tuple(self._waiting)), default=math.inf)
            self._is_running = self._wakes < math.inf
            return self._is_running


_watch = _Watch()


def _start_anew() -> None:
    """Watch with a thread of its own in a process that was forked, which has none of its parent's; the deadlines in
    whose blocks it was forked are its own, too."""
    global _watch
    inherited = [each.forked() for each in tuple(_watch._waiting) if each.is_ours]
    _watch = _Watch()
    for each in inherited:
        _watch.add(each)


os.register_at_fork(after_in_child=_start_anew)
