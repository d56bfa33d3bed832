"""SIGTERM, SIGINT and SIGHUP: a run ends where nothing is lost.

A step is worth keeping from its first update on: what comes before can be done again and is abandoned at once, what
comes after is finished. Either way the caller saves what stands at the last boundary between two steps.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The last comes when a terminal is closed."""


class Stopped(SystemExit):
    """Asked to stop by a signal; 130, 143 or 129 to who started the program, as shells have it."""

    def __init__(self, asked: signal.Signals) -> None:
        super().__init__(128 + asked)
        self.signal = asked


class Stop:
    """Listens to signals, inside `with`; on the main thread alone, for Python gives them to no other: a run in another
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
        """The first that came."""
        self._before: dict[signal.Signals, Any] = {}
        self._depth = 0
        """Of regions that may be abandoned."""

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for each in SIGNALS:
                # Ignored: started in the background by a shell, whose Ctrl-C is not meant for it. None: not Python's.
                if signal.getsignal(each) not in (signal.SIG_IGN, None):
                    self._before[each] = signal.signal(each, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before.clear()

    def check(self) -> None:
        """Leave here, if that was asked for."""
        if self.signal is not None:
            raise Stopped(self.signal)

    @contextmanager
    def anywhere(self) -> Iterator[None]:
        """What is done inside may be left at any moment, as by Ctrl-C: it is to change nothing that is saved."""
        self._depth += 1
        try:
            self.check()
            yield
        finally:
            self._depth -= 1
        self.check()  # one that came where Python drops what a handler raises, such as a finalizer

    def _asked(self, number: int, _: FrameType | None) -> None:
        again, asked = self.signal is not None, signal.Signals(number)
        if again and asked == signal.SIGINT:
            raise KeyboardInterrupt
        if again:
            return
        self.signal = asked
        what = "stopping" if self._depth else "stopping after this step"
        # Not print: the signal may have come in the middle of one.
        with suppress(OSError):
            os.write(2, f"{asked.name}: {what}, Ctrl-C again to stop at once\n".encode())
        if self._depth:
            raise Stopped(asked)
