"""Parts of a step, computed two at a time: torch and numpy let other threads run, and two parts take little memory,
where all would take as much as the step."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

AT_ONCE = 2

Part = TypeVar("Part")
Item = TypeVar("Item")


class Made(Sequence[Item], Generic[Part, Item]):
    """A sequence whose items are computed each time they are asked for, and not kept."""

    def __init__(self, make: Callable[[Part], Item], of: Sequence[Part]) -> None:
        self._make, self._of = make, of

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, index: int) -> Item:  # pyright: ignore[reportIncompatibleMethodOverride] -- of no slice
        return self._make(self._of[index])

    def __iter__(self) -> Iterator[Item]:  # a sequence's own would end at an IndexError of the function
        return map(self._make, self._of)


def computed(function: Callable[[Part], Item], parts: Iterable[Part], *, threads: bool = True) -> Iterator[Item]:
    """The function of each part, in order. A part is taken when there is a thread for it, so that not all are held.
    Without `threads` in this one, for few tokens: to start others would take longer."""
    if not threads:
        yield from map(function, parts)
        return
    waiting: deque[Future[Item]] = deque()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for part in parts:
            waiting.append(pool.submit(function, part))
            del part
            if len(waiting) == AT_ONCE:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
