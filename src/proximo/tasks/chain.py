"""Running sums: every answer needs a given number of written steps, and each step can be checked."""

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from random import Random

from proximo.rewards import ExactMatch
from proximo.tasks.draws import Stream
from proximo.tasks.protocol import Split
from proximo.types import Completion, Grade, Problem

_DIGITS = ExactMatch(last_number=True)


@dataclass(frozen=True)
class Chain:
    """Running sums of digits, of which only the last digit counts: `a3b4c9=`, worked out as `3 b4=7 c9=6`,
    answer 6.

    A problem has one more term than steps. Each number of steps is a source of its own, so that metrics and evaluation
    show the accuracy of each: `sources/steps-08/accuracy`.
    """

    steps: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of steps to draw from, each from 1 to 25."""
    held_out: int = 1000
    """Number of held-out problems, never used in training."""

    while_sampling = True
    grades_steps = True
    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        if not self.steps or len(set(self.steps)) < len(self.steps) or not all(1 <= step <= 25 for step in self.steps):
            raise ValueError(f"task.steps is {self.steps}: give numbers from 1 to 25, each once")
        # Built now (and cached), so that a held-out set that cannot be filled is refused early.
        _stream(self)

    def size(self, split: Split) -> int | None:
        return _stream(self).size(split)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return _stream(self).problem(index, split, seed)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        """Grade the last number, and the steps: one is right if its result is the running sum up to its letter."""
        outcomes = _DIGITS(problems, completions)
        steps = [_graded_steps(*pair) for pair in zip(problems, completions, strict=True)]
        return [Grade(outcome, steps=rewards) for outcome, rewards in zip(outcomes, steps, strict=True)]

    def final_answer(self, completion: Completion) -> str | None:
        return _DIGITS.final_answer(completion)

    def reference(self, problem: Problem) -> str:
        return " ".join(solution(problem))

    def draw(self, random: Random) -> Problem:
        """Draw any problem, reserved for evaluation or not."""
        count = random.choice(self.steps)
        digits = [random.randrange(10) for _ in range(count + 1)]
        text = "".join(f"{letter}{digit}" for letter, digit in zip(string.ascii_lowercase, digits, strict=False))
        return Problem(f"chain-{text}", f"{text}=", str(sum(digits) % 10), source=f"steps-{count:02}")


def solution(problem: Problem) -> list[str]:
    """The right work, such as ["3", "b4=7", "c9=6"]."""
    text = str(problem.prompt).rstrip("=")
    letters, digits = text[::2], [int(digit) for digit in text[1::2]]
    sums = [total % 10 for total in accumulate(digits)]
    steps = [f"{letter}{digit}={total}" for letter, digit, total in zip(letters, digits, sums, strict=True)]
    return [str(digits[0]), *steps[1:]]


def _graded_steps(problem: Problem, completion: Completion) -> tuple[tuple[int, float], ...]:
    """The end of each step of the completion, and 1 where it is right; one step too many is wrong, one less is left
    out."""
    right = solution(problem)
    written = list(re.finditer(r"\S+", completion.text))
    return tuple((step.end(), float([step[0]] == right[index : index + 1])) for index, step in enumerate(written))


@cache
def _stream(task: Chain) -> Stream:
    return Stream(task.draw, _terms, task.held_out)


def _terms(problem: Problem) -> str:
    return str(problem.prompt)
