"""Copying a string: a task that any model can learn, for tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from proximo.tasks.draws import Stream
from proximo.tasks.protocol import Split
from proximo.types import Completion, Grade, Problem


@dataclass(frozen=True)
class Echo:
    """Copy a string: `echo:bca=`, answer bca; endless."""

    length: int = 3
    """Characters to copy."""
    alphabet: str = "abcdefgh"
    """Characters to draw from."""
    held_out: int = 50
    """Number of held-out problems, never used in training."""

    while_sampling = True
    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"task.length is {self.length}: give at least 1")
        if not self.alphabet or any(letter.isspace() for letter in self.alphabet):
            raise ValueError(f"task.alphabet is {self.alphabet!r}: give visible characters")
        # Built now (and cached), so that a held-out set that cannot be filled is refused early.
        _stream(self)

    def size(self, split: Split) -> int | None:
        return _stream(self).size(split)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return _stream(self).problem(index, split, seed)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        return [Grade(float(c.text.strip() == p.answer)) for p, c in zip(problems, completions, strict=True)]

    def final_answer(self, completion: Completion) -> str:
        return completion.text.strip()

    def reference(self, problem: Problem) -> str:
        return str(problem.answer)

    def draw(self, random: Random) -> Problem:
        """Draw any problem, reserved for evaluation or not."""
        text = "".join(random.choice(self.alphabet) for _ in range(self.length))
        return Problem(id=f"echo-{text}", prompt=f"echo:{text}=", answer=text)


@cache
def _stream(task: Echo) -> Stream:
    return Stream(task.draw, _string, task.held_out)


def _string(problem: Problem) -> str:
    return str(problem.answer)
