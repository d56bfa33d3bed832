"""A grader that is wrong now and then, always in the same places."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from proximo.rl.evaluate import known_mean
from proximo.types import Completion, Problem


@dataclass(frozen=True)
class NoisyVerdict:
    """1 for the right answer and 0 for any other, with some verdicts turned round. Which ones follows from the problem
    and the tokens alone, so a resumed run meets the same."""

    missed: float = 0.0
    """Share of the right answers that are called wrong."""
    let_through: float = 0.0
    """Share of the wrong answers that are called right."""
    graders: int = 1
    """Independent graders whose mean is the reward."""

    needs_answer = True
    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        if not (0 <= self.missed <= 1 and 0 <= self.let_through <= 1 and self.graders >= 1):
            raise ValueError(f"{self}: give shares from 0 to 1, and at least one grader")

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
        return [self._score(problem, each) for problem, each in zip(problems, completions, strict=True)]

    def reference(self, problem: Problem) -> str | None:
        """Give no reference: even the right answer may be called wrong."""
        return None

    def _score(self, problem: Problem, completion: Completion) -> float:
        right = completion.text.strip().partition("\n")[0].strip() == problem.answer
        share = self.missed if right else self.let_through
        turned = (_drawn(f"{problem.id} {completion.tokens} {index}") < share for index in range(self.graders))
        return known_mean(float(right != each) for each in turned)


def _drawn(text: str) -> float:
    """A number from 0 to 1 that is always the same for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48
