"""Parts of a step, computed two at a time: torch and numpy let other threads run, and two parts take little memory,
where all would take as much as the step."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

AT_ONCE = 2

Part = TypeVar("Part")
Found = TypeVar("Found")


class Made(Sequence[Found], Generic[Part, Found]):
    """A sequence whose items are computed each time they are asked for, and not kept."""

    def __init__(self, make: Callable[[Part], Found], of: Sequence[Part]) -> None:
        self._make, self._of = make, of

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, place: int) -> Found:  # pyright: ignore[reportIncompatibleMethodOverride] -- of no slice
        return self._make(self._of[place])

    def __iter__(self) -> Iterator[Found]:  # a sequence's own would end at an IndexError of the function
        return map(self._make, self._of)


def computed(function: Callable[[Part], Found], parts: Iterable[Part], *, threads: bool = True) -> Iterator[Found]:
    """The function of each part, in order. A part is taken when there is a thread for it, so that not all are held.
    Without `threads` in this one, for few tokens: to start others would take longer."""
    if not threads:
        yield from map(function, parts)
        return
    waiting: deque[Future[Found]] = deque()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for part in parts:
            waiting.append(pool.submit(function, part))
            del part
            if len(waiting) == AT_ONCE:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
