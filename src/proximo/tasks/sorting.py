"""Sorting letters: a graded reward that is known exactly, to compare a learned reward with."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from random import Random

from proximo.tasks.draws import Stream
from proximo.tasks.protocol import Split
from proximo.types import Completion, Grade, Problem


@dataclass(frozen=True)
class Sorting:
    """Sort letters, with partial credit: `sort:dbeac=`, answer abcde; endless.

    The task score is the share of letter pairs in the right order: 1 only for the sorted string, 0 for the reversed
    one, 0.5 on average for a random order. A completion with a letter missing, added or repeated, or an empty
    one, scores 0.
    """

    length: int = 5
    """Letters per problem, all different."""
    alphabet: str = "abcdefghijkl"
    """Letters to draw from, in the order to sort by."""
    held_out: int = 200
    """Number of held-out problems; no ordering of their letters is used in training."""

    while_sampling = True
    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        if any(letter.isspace() for letter in self.alphabet) or len(set(self.alphabet)) < len(self.alphabet):
            raise ValueError(f"task.alphabet is {self.alphabet!r}: give visible characters, each once")
        if not 2 <= self.length <= len(self.alphabet):
            raise ValueError(
                f"task.length is {self.length}: give at least 2, and at most the {len(self.alphabet)} letters of "
                "task.alphabet"
            )
        # Built now (and cached), so that a held-out set that cannot be filled is refused early.
        _stream(self)

    def size(self, split: Split) -> int | None:
        return _stream(self).size(split)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return _stream(self).problem(index, split, seed)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        return [Grade(_in_order(c.text.strip(), p.answer)) for p, c in zip(problems, completions, strict=True)]

    def reference(self, problem: Problem) -> str:
        return str(problem.answer)

    def draw(self, random: Random) -> Problem:
        """Draw any problem, reserved for evaluation or not."""
        letters = "".join(random.sample(self.alphabet, self.length))
        return Problem(
            id=f"sorting-{letters}",
            prompt=f"sort:{letters}=",
            answer="".join(sorted(letters, key=self.alphabet.index)),
        )


@cache
def _stream(task: Sorting) -> Stream:
    return Stream(task.draw, _letters, task.held_out)


def _letters(problem: Problem) -> str:
    """The letters without their order: a model trained on dbeac has seen the answer to ecabd."""
    return str(problem.answer)


def _in_order(given: str, answer: str) -> float:
    """The share of pairs in order; 0 unless the letters are the right ones."""
    if len(given) != len(answer) or set(given) != set(answer):
        return 0.0
    pairs = [answer.index(first) < answer.index(second) for first, second in combinations(given, 2)]
    return sum(pairs) / len(pairs)
