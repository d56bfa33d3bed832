"""SIGTERM, SIGINT and SIGHUP: stop a run at a point where nothing is lost.

Before a step's first update, work can be repeated and is abandoned at once; from the first update on, the step is
finished. Either way the caller saves the state at the last boundary between two steps.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a run; SIGHUP is sent when a terminal is closed."""


class Stopped(SystemExit):
    """Asked to stop by a signal; the exit status is 130, 143 or 129, as shells expect."""

    def __init__(self, asked: signal.Signals) -> None:
        super().__init__(128 + asked)
        self.signal = asked


class Stop:
    """Handles signals inside `with`, on the main thread only, since Python delivers them to no other: a run in another
    thread is not stopped by signals.

    A second SIGINT ends everything at once, as KeyboardInterrupt.

    Example:
        with Stop() as stop:
            for step in range(steps):
                with stop.anywhere():
                    groups = collect()  # long, and changes nothing
                update(groups)
                stop.check()
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """First signal received."""
        self._before: dict[signal.Signals, Any] = {}
        self._depth = 0
        """Nesting depth of regions that may be abandoned."""

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for each in SIGNALS:
                # Ignored: a shell started it in the background, so Ctrl-C is not meant for it. None: not set by Python.
                if signal.getsignal(each) not in (signal.SIG_IGN, None):
                    self._before[each] = signal.signal(each, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before.clear()

    def check(self) -> None:
        """Raise Stopped if a signal has arrived."""
        if self.signal is not None:
            raise Stopped(self.signal)

    @contextmanager
    def anywhere(self) -> Iterator[None]:
        """A region that a signal may interrupt at any moment; it must not change anything that is saved."""
        self._depth += 1
        try:
            self.check()
            yield
        finally:
            self._depth -= 1
        self.check()  # a signal during a finalizer, where Python drops exceptions from handlers

    @contextmanager
    def held(self) -> Iterator[None]:
        """A part of such a region that a signal must not interrupt: it takes effect at the end."""
        depth, self._depth = self._depth, 0
        try:
            yield
        finally:
            self._depth = depth
        if depth:
            self.check()

    def _asked(self, number: int, _: FrameType | None) -> None:
        again, asked = self.signal is not None, signal.Signals(number)
        if again and asked == signal.SIGINT:
            raise KeyboardInterrupt
        if again:
            return
        self.signal = asked
        what = "stopping" if self._depth else "stopping after this step"
        # Not print: the signal may have interrupted one.
        with suppress(OSError):
            os.write(2, f"{asked.name}: {what}, Ctrl-C again to stop at once\n".encode())
        if self._depth:
            raise Stopped(asked)
