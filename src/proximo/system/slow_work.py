"""Lines about work that takes longer than a person waits without asking, such as reading a large file."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")
PATIENCE = 2.0
"""Seconds before the first line."""
BETWEEN = 10.0
"""Seconds between lines."""
_LOOKS = 256
"""Items between two looks at the clock."""

_say: ContextVar[Callable[[str], None] | None] = ContextVar("_say", default=None)


@contextmanager
def slow_work_told(say: Callable[[str], None]) -> Iterator[None]:
    """Tell what takes long by `say` until the end; without this, nothing is told."""
    token = _say.set(say)
    try:
        yield
    finally:
        _say.reset(token)


def told_while_slow(items: Iterable[Item], what: str, total: int | None = None, *, each: int = 1) -> Iterator[Item]:
    """The items, with a line from time to time if they take long; `each`: how many an item counts for.

    Example: told_while_slow(rows, "prompts checked", len(rows)) -> "12,800 of 100,000 prompts checked"
    """
    say, due = _say.get(), time.monotonic() + PATIENCE
    for number, item in enumerate(items):
        yield item
        if say is not None and number * each % _LOOKS == 0 and time.monotonic() > due:
            say(f"{(number + 1) * each:,}{'' if total is None else f' of {total:,}'} {what}")
            due = time.monotonic() + BETWEEN
