"""Memory: what a long-lived process gives back, and how much one may take."""

import ctypes
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

THRESHOLD, TRIM = -3, -1
"""Options of glibc's mallopt: sizes from which memory is taken from the system by itself, and given back at the end."""
LARGE = 1 << 21
"""Bytes of a large buffer, more than a part of a step needs: memory for those, taken anew each time, would double the
time."""
_ALONE = threading.RLock()


def return_memory() -> None:
    """Return large buffers to the system as soon as they are free: glibc keeps those of up to 32 MiB, and a page that
    has shown one large step would hold that step's memory for good. Nothing happens elsewhere than on glibc."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(THRESHOLD, LARGE)
        mallopt(TRIM, LARGE)


def return_free_memory() -> None:
    """Return what is free between small buffers, too, where glibc does that: a few milliseconds."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def limit_memory(more: int) -> None:
    """Let this process take no more than so many bytes beyond those that it has: then there is a MemoryError."""
    with suppress(OSError, ValueError):  # elsewhere than on Linux there is no such file
        held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = held + more if hard == resource.RLIM_INFINITY else min(held + more, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


@contextmanager
def within_memory(more: int) -> Iterator[None]:
    """Limit it for a while, for all threads. One after the other: who ends last would put back the limit of another."""
    with _ALONE:
        limits = resource.getrlimit(resource.RLIMIT_DATA)
        try:
            limit_memory(more)
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, limits)
