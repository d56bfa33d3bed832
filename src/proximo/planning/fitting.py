"""Limits of a device: the longest completions and the largest groups that fit, and the smallest card that would do."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from proximo.planning.cards import CARDS, DeviceCard
from proximo.planning.holdings import Holding
from proximo.planning.memory import StepSize, memory_use

LENGTHS = tuple(factor * 2**power for power in range(6, 17) for factor in (2, 3))
"""Completion lengths that are tried: 128, 192, 256, 384 and so on, up to 196,608."""
GROUP_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def longest_completions(holding: Holding, size: StepSize, card: DeviceCard) -> int | None:
    """The largest `max_tokens` with which the step fits, all else being equal; None if none does."""
    positions = holding.shape.max_positions
    longest = LENGTHS[-1] if positions is None else positions - size.prompt_tokens
    lengths = (length for length in LENGTHS if length <= longest)
    return _last(lengths, lambda length: fits(holding, replace(size, max_tokens=length, mean_tokens=None), card))


def largest_groups(holding: Holding, size: StepSize, card: DeviceCard) -> int | None:
    """The largest `group_size` with which the step fits, all else being equal; None if none does."""
    return _last(GROUP_SIZES, lambda number: fits(holding, replace(size, group_size=number), card))


def smallest_card(holding: Holding, size: StepSize) -> DeviceCard | None:
    """The card of the table with the least memory on which the step fits; None if none has enough."""
    by_memory = sorted(CARDS, key=lambda card: card.memory)
    return next((card for card in by_memory if fits(holding, size, card)), None)


def fits(holding: Holding, size: StepSize, card: DeviceCard) -> bool:
    return memory_use(holding, size, card).fits


def _last(numbers: Iterable[int], is_good: Callable[[int], bool]) -> int | None:
    """The last number before the first that is not good, so that every smaller one is good too."""
    last = None
    for number in numbers:
        if not is_good(number):
            break
        last = number
    return last
