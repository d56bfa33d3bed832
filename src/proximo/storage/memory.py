"""Memory that a long-lived process gives back."""

import ctypes
from contextlib import suppress

THRESHOLD, TRIM = -3, -1
"""Options of glibc's mallopt: sizes from which memory is taken from the system by itself, and given back at the end."""
LARGE = 1 << 21
"""Bytes of a large buffer, more than a part of a step needs: memory for those, taken anew each time, would double the
time."""


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
