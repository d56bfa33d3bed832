"""A thread that does one job after another, and can be stopped in the middle of one."""

import ctypes
import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from typing import Any, TypeVar

import torch

from proximo.learner.memory import is_out_of_memory

PATIENCE = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds to wait for the thread after each attempt to stop it: it may be in a call that cannot be interrupted, or on
its way out."""
Result = TypeVar("Result")


class Abandoned(BaseException):
    """Raised inside a job whose result is no longer needed."""


class Worker:
    """Does jobs in order, on one thread. The thread starts with the first job, in the context of that call.

    A job that runs out of memory is done again when the caller waits for a result: it does nothing else then, and
    what it needed for its own work is free.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        """On a GPU the thread has a stream of its own, so that its kernels do not wait for the caller's."""
        self._name, self._device = name, device
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._caller_waits = self._closed = self._busy = False
        self._thread: threading.Thread | None = None
        self.repeated = 0
        """Number of jobs that ran out of memory and were done again."""

    def submit(self, job: Callable[[], Result], *, first: bool = False) -> "Future[Result]":
        """Queue a job; `first`: before all that wait."""
        future: Future[Result] = Future()
        with self._changed:
            assert not self._closed, "the worker is closed"
            (self._jobs.appendleft if first else self._jobs.append)((future, job))
            self._changed.notify_all()
        if self._thread is None:
            # A daemon: a call that never returns must not keep an interrupted program alive.
            self._thread = threading.Thread(target=copy_context().run, args=(self._work,), name=self._name, daemon=True)
            self._thread.start()
        return future

    def wait(self, future: "Future[Result]") -> Result:
        """The result of a job; raises what the job raised."""
        self._set_waiting(True)
        try:
            return future.result()
        finally:
            self._set_waiting(False)

    def close(self) -> None:
        """Drop all jobs and end the thread, also in the middle of a job."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()
        if (thread := self._thread) is None:
            return
        with _abandoning_quietly():
            for seconds in PATIENCE:
                with self._changed:  # a thread that is not in a job ends by itself
                    if self._busy:
                        _interrupt(thread)
                thread.join(seconds)
                if not thread.is_alive():
                    return

    def _set_waiting(self, waits: bool) -> None:
        with self._changed:
            self._caller_waits = waits
            self._changed.notify_all()

    def _work(self) -> None:
        on_gpu = self._device.type == "cuda"
        with (
            suppress(Abandoned),
            torch.cuda.stream(torch.cuda.Stream(self._device)) if on_gpu else nullcontext(),
        ):
            while (job := self._next()) is not None:
                self._do(*job)
                del job  # it holds weights, and the next job may come much later
        with suppress(Abandoned), self._changed:
            self._busy = False  # from here on the thread is Python's, which clears up: nothing may be raised in it

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._busy = False
            self._changed.wait_for(lambda: self._jobs or self._closed)
            self._busy = not self._closed
            return None if self._closed else self._jobs.popleft()

    def _do(self, future: Future[Any], job: Callable[[], Any]) -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(self._done(job))
        except Abandoned:
            raise
        except BaseException as error:  # raised again in the caller's thread
            future.set_exception(error)

    def _done(self, job: Callable[[], Result]) -> Result:
        try:
            return job()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        with self._changed:
            self._busy = False  # what follows ends by itself
        # Not in the clause above: while an error is handled, the frames it went through keep their tensors.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        with self._changed:
            self._changed.wait_for(lambda: self._caller_waits or self._closed)
            if self._closed:
                raise Abandoned
            self._busy = True
        self.repeated += 1
        return job()


@contextmanager
def _abandoning_quietly() -> Iterator[None]:
    """Where Abandoned is raised in a callback of Python's garbage collector, Python prints it and goes on. That is no
    fault: the thread gets another one."""
    before = sys.unraisablehook

    def report(found: Any) -> None:
        if found.exc_type is not Abandoned:
            before(found)

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = before


def _interrupt(thread: threading.Thread) -> None:
    """Raise Abandoned at the thread's next instruction, as a signal would in the main thread."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Abandoned))
