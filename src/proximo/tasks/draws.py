"""Reproducible random draws: each is seeded by a hash of what it is for."""

from array import array
from collections.abc import Callable
from functools import lru_cache
from random import Random

from proximo.data import stable_hash
from proximo.tasks.protocol import Split
from proximo.types import Problem

_RESERVED = 5
"""One problem in five is reserved for the held-out split, whether or not it is drawn for it."""
_PATIENCE = 2000
"""Draws in a row without a new problem after which the space counts as exhausted."""


def reserved(key: str) -> bool:
    """Tell whether the problem with this key is excluded from training."""
    return stable_hash("reserved", key) % _RESERVED == 0


def check_held_out(count: int) -> None:
    if count < 1:
        raise ValueError(f"task.held_out is {count}: give at least 1")


def numbered(name: str, index: int, split: Split, seed: int, held_out: int) -> tuple[int, int]:
    """A problem's position in its split, and the number that is drawn for it; held-out ones are those of every seed."""
    position = index if split == "train" else index % held_out
    return position, stable_hash(name, split, position, seed if split == "train" else 0)


class Stream:
    """An endless supply of random problems, and a fixed held-out set disjoint from it.

    `draw` makes any problem; `key` is equal for two problems when knowing one gives the other's answer away.
    """

    def __init__(self, draw: Callable[[Random], Problem], key: Callable[[Problem], str], held_out: int) -> None:
        self._draw = draw
        self._key = key
        self._held_out = self._fill(held_out)

    def size(self, split: Split) -> int | None:
        return None if split == "train" else len(self._held_out)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        if split == "held_out":
            return self._held_out[index % len(self._held_out)]
        random = Random(stable_hash("train", index, seed))
        for _ in range(_PATIENCE):
            problem = self._draw(random)
            if not reserved(self._key(problem)):
                return problem
        raise ValueError("the task has hardly any problem to train on: make it larger")

    def _fill(self, count: int) -> tuple[Problem, ...]:
        """`count` distinct reserved problems, the same for every seed."""
        check_held_out(count)
        problems: dict[str, Problem] = {}
        misses = 0
        random = Random(stable_hash("held_out"))
        while len(problems) < count:
            problem = self._draw(random)
            misses += 1
            if problem.id not in problems and reserved(self._key(problem)):
                problems[problem.id] = problem
                misses = 0
            if misses > _PATIENCE:
                raise ValueError(
                    f"task.held_out is {count}, but only about {len(problems)} problems can be kept from training: "
                    "give less, or make the task larger"
                )
        return tuple(problems.values())


def shuffled(index: int, size: int, seed: int) -> int:
    """The item at position `index` of a shuffled stream over `size` items; each epoch visits all in a new order."""
    epoch, position = divmod(index, size)
    return _permutation(size, seed, epoch)[position]


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> "array[int]":
    order = array("I" if size < 2**32 else "Q", range(size))  # four bytes of each item, where a list takes forty
    Random(stable_hash("shuffle", size, seed, epoch)).shuffle(order)
    return order
