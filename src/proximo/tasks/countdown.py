"""Countdown: find an expression that reaches a target. Any correct expression counts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from proximo.tasks.draws import Stream
from proximo.tasks.expressions import NotAnExpression, evaluate
from proximo.tasks.protocol import Split
from proximo.types import Completion, Grade, Problem


@dataclass(frozen=True)
class Countdown:
    """Reach a target from given numbers with + - * /, each number used at most once. Endless, always solvable."""

    numbers: int = 3
    """Numbers given per problem."""
    largest: int = 20
    """Largest number that is given; the smallest is 1."""
    highest_target: int = 100
    """Largest target; the smallest is 1."""
    held_out: int = 200
    """Number of held-out problems; no ordering of their numbers is used in training."""

    while_sampling = True
    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.numbers < 2:
            raise ValueError(f"task.numbers is {self.numbers}: give at least 2")
        if self.largest < 1:
            raise ValueError(f"task.largest is {self.largest}: give at least 1")
        random = Random(0)
        if sum(self._attempt(random) is not None for _ in range(200)) < 10:
            raise ValueError(
                f"task.highest_target is {self.highest_target}: {self.numbers} numbers up to {self.largest} hardly "
                "ever meet it; give more, or another number of numbers"
            )
        # Built now (and cached), so that a held-out set that cannot be filled is refused early.
        _stream(self)

    def size(self, split: Split) -> int | None:
        return _stream(self).size(split)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return _stream(self).problem(index, split, seed)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        return [Grade(float(_solves(c.text, p))) for p, c in zip(problems, completions, strict=True)]

    def reference(self, problem: Problem) -> str:
        return problem.data["solution"]

    def draw(self, random: Random) -> Problem:
        """Draw any problem, reserved for evaluation or not."""
        problem = None
        while problem is None:
            problem = self._attempt(random)
        return problem

    def _attempt(self, random: Random) -> Problem | None:
        """Draw a solution and use its value as the target, so that one exists; None if it came out too high."""
        numbers = [random.randint(1, self.largest) for _ in range(self.numbers)]
        combined = _combined(numbers, self.highest_target, random)
        if combined is None or combined[1] in numbers:
            return None
        solution, target = combined
        given = " ".join(map(str, numbers))
        return Problem(
            id=f"countdown-{given}-{target}",
            prompt=f"Numbers {given}, target {target}, expression:",
            answer=target,
            data={"numbers": tuple(numbers), "solution": solution},
        )


@cache
def _stream(task: Countdown) -> Stream:
    return Stream(task.draw, _unordered, task.held_out)


def _combined(numbers: Sequence[int], highest: int, random: Random) -> tuple[str, int] | None:
    """A random expression over all numbers and its value; every intermediate value is a positive whole number."""
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        random.shuffle(parts)
        (b, right), (a, left) = sorted([parts.pop(), parts.pop()])
        values = {"+": a + b, "*": a * b} | ({"-": a - b} if a > b else {}) | ({"/": a // b} if a % b == 0 else {})
        # Only the final value must stay below the limit; high intermediate values make better puzzles.
        signs = sorted(sign for sign, value in values.items() if parts or value <= highest)
        if not signs:
            return None
        sign = random.choice(signs)
        parts.append((values[sign], f"({left}{sign}{right})"))
    return parts[0][1].removeprefix("(").removesuffix(")"), parts[0][0]


def _unordered(problem: Problem) -> str:
    return f"{sorted(problem.data['numbers'])} {problem.answer}"


def _solves(text: str, problem: Problem) -> bool:
    """Tell whether the first line solves the problem; it may end with its own result, as in `3*7+10=31`."""
    expression = text.strip().partition("\n")[0].partition("=")[0]
    try:
        value, used = evaluate(expression)
    except NotAnExpression:
        return False
    return value == problem.answer and Counter(used) <= Counter(problem.data["numbers"])
