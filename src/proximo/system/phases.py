"""Names of what a step does at the moment, for a profile of it; without a profile a name costs nothing.

Parts of a run name their work with `phase`, wherever they are. A run that is profiled watches its own thread; what
other threads do at the same time is no part of the step's wall time, and is not seen.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from threading import get_ident
from typing import ParamSpec, Protocol, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class PhaseWatch(Protocol):
    """Measures phases."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Count the time inside as this phase's, inside of the phase that is open."""
        ...


_watch: ContextVar[tuple[PhaseWatch, int] | None] = ContextVar("_watch", default=None)
"""A watch, and the thread that it watches: threads may be given their starter's context."""
_NOTHING = nullcontext()


@contextmanager
def watched(watch: PhaseWatch) -> Iterator[None]:
    """Let this thread's phases be measured until the end."""
    token = _watch.set((watch, get_ident()))
    try:
        yield
    finally:
        _watch.reset(token)


def phase(name: str) -> AbstractContextManager[object]:
    """Name the work inside, such as "decoding"; phases may lie in each other."""
    watch = _here()
    return _NOTHING if watch is None else watch.phase(name)


def phased(name: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Name all that a function does."""

    def named(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @wraps(function)
        def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
            with phase(name):
                return function(*arguments, **options)

        return call

    return named


def is_watched() -> bool:
    """True if this thread's phases are measured: what usually runs as one captured whole then runs in its parts."""
    return _here() is not None


def _here() -> PhaseWatch | None:
    known = _watch.get()
    return None if known is None or known[1] != get_ident() else known[0]
