"""Small arithmetic problems: the smallest task on which reinforcement learning has a visible effect."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from proximo.rewards import ExactMatch
from proximo.tasks.draws import Stream
from proximo.tasks.protocol import Split
from proximo.types import Completion, Grade, Problem

_KNOWN = ("+", "-", "*")


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic such as `37+48=`, answer 85; an endless supply of random problems."""

    operations: tuple[str, ...] = ("+",)
    """Operators to draw from: any of + - *."""
    digits: int = 2
    """Maximum digits of each number."""
    terms: int = 2
    """Numbers per problem."""
    held_out: int = 1000
    """Number of held-out problems; no ordering of their numbers is used in training."""
    chat: bool = False
    """Format with the model's chat template; the last number of the reply is graded."""
    working: bool = False
    """Allow text before the answer in a completion; its last number is graded."""

    while_sampling = True
    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        unknown = [operation for operation in self.operations if operation not in _KNOWN]
        if unknown or not self.operations or len(set(self.operations)) < len(self.operations):
            raise ValueError(f"task.operations is {self.operations}: give some of {_KNOWN}, each once")
        if self.digits < 1 or self.terms < 2:
            raise ValueError(f"task.digits is {self.digits} and task.terms {self.terms}: give at least 1 and 2")
        # Built now (and cached), so that a held-out set that cannot be filled is refused early.
        _stream(self)

    def size(self, split: Split) -> int | None:
        return _stream(self).size(split)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return _stream(self).problem(index, split, seed)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        if self.chat or self.working:
            return [Grade(outcome) for outcome in ExactMatch(last_number=True)(problems, completions)]
        return [Grade(float(_first_line(c) == p.answer)) for p, c in zip(problems, completions, strict=True)]

    def final_answer(self, completion: Completion) -> str | None:
        worked = self.chat or self.working
        return ExactMatch(last_number=True).final_answer(completion) if worked else _first_line(completion)

    def reference(self, problem: Problem) -> str:
        return str(problem.answer)

    def draw(self, random: Random) -> Problem:
        """Draw any problem, reserved for evaluation or not."""
        total, product = 0, random.randrange(10**self.digits)
        text = str(product)
        for _ in range(self.terms - 1):
            sign, number = random.choice(self.operations), random.randrange(10**self.digits)
            text += f"{sign}{number}"
            if sign == "*":
                product *= number
            else:
                total, product = total + product, number if sign == "+" else -number
        question = ({"role": "user", "content": f"What is {text}? Answer with the number only."},)
        prompt = question if self.chat else f"{text}="
        return Problem(id=f"arithmetic-{text}", prompt=prompt, answer=str(total + product))


@cache
def _stream(task: Arithmetic) -> Stream:
    return Stream(task.draw, _numbers, task.held_out)


def _numbers(problem: Problem) -> str:
    """The numbers without order and operations: a model trained on 48+37 has seen 37+48."""
    return " ".join(sorted(re.findall(r"\d+", problem.id)))


def _first_line(completion: Completion) -> str:
    """The completion's first line; the rest is not part of the answer."""
    return completion.text.strip().partition("\n")[0].strip()
