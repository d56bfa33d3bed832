"""Errors of memory that has run out: known by what allocators say, and told with a remedy."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ALLOCATION_FAILED = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed", "bad_alloc")
"""Words of allocators that have no exception of their own: torch's on a CPU, libraries on a GPU."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for an error that says no memory could be had, on whatever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in ALLOCATION_FAILED)


@contextmanager
def explaining_memory(remedy: str) -> Iterator[None]:
    """End in a line that says what to change, where memory runs out and less cannot be done at a time."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(f"out of memory ({first_line(error)}): {remedy}") from error


def first_line(error: BaseException) -> str:
    """Beginning of what an error says; its name where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
