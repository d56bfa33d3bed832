"""Sums and their like: the smallest task on which reinforcement learning shows."""

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
    """`37+48=` and the answer 85, character by character; endless."""

    operations: tuple[str, ...] = ("+",)
    """Drawn for every gap between terms, among + - *."""
    digits: int = 2
    """Numbers have up to so many digits."""
    terms: int = 2
    """How many numbers stand in a row."""
    held_out: int = 1000
    """Problems kept for evaluation; no ordering of their numbers is ever trained on."""
    chat: bool = False
    """Ask in a conversation, for models with a chat template; the last number of the reply counts."""

    while_sampling = True
    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        unknown = [operation for operation in self.operations if operation not in _KNOWN]
        if unknown or not self.operations or len(set(self.operations)) < len(self.operations):
            raise ValueError(f"task.operations is {self.operations}: give some of {_KNOWN}, each once")
        if self.digits < 1 or self.terms < 2:
            raise ValueError(f"task.digits is {self.digits} and task.terms {self.terms}: give at least 1 and 2")
        # Made now and remembered: a held-out set that cannot be filled is an error of the value.
        _stream(self)

    def size(self, split: Split) -> int | None:
        return _stream(self).size(split)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return _stream(self).problem(index, split, seed)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        if self.chat:
            return [Grade(outcome) for outcome in ExactMatch(last_number=True)(problems, completions)]
        return [Grade(float(_said(c) == p.answer)) for p, c in zip(problems, completions, strict=True)]

    def reference(self, problem: Problem) -> str:
        return str(problem.answer)

    def draw(self, random: Random) -> Problem:
        """Any problem, reserved or not."""
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
    """Without order and operations: who trained on 48+37 has seen 37+48."""
    return " ".join(sorted(re.findall(r"\d+", problem.id)))


def _said(completion: Completion) -> str:
    """The first line; what follows it is not part of the answer."""
    return completion.text.strip().partition("\n")[0].strip()
