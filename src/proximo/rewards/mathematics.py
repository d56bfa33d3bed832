"""Mathematical equality, judged by math-verify: ½, 0.5 and \\frac{1}{2} are the same answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proximo.rewards.processes import Job
from proximo.rewards.scoring import score
from proximo.rewards.text import ExactMatch
from proximo.rewards.workers import check_seconds
from proximo.types import Completion, Problem

MEMORY_MB = 2048


@dataclass(frozen=True)
class MathVerify:
    """1 where the completion's final expression equals the answer, else 0; NaN where it cannot be decided in time.

    The answer is a bare expression, or a text that marks it with \\boxed{}, $ $ or #### as published solutions do.
    """

    seconds: float = 5.0
    """Time limit for one completion in seconds."""

    needs_answer = True
    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        check_seconds(self.seconds)

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
        return [self._score(p.answer, c) for p, c in zip(problems, completions, strict=True)]

    def final_answer(self, completion: Completion) -> str | None:
        """The expression in the last \\boxed{}, else the last number, as written: ½ and 0.5 are two answers here."""
        found = boxed(completion.text)
        return found if found is not None else ExactMatch(last_number=True).final_answer(completion)

    def reference(self, problem: Problem) -> str | None:
        """A completion that scores 1."""
        return None if problem.answer is None else marked(str(problem.answer))

    def _score(self, answer: object, said: Completion) -> float:
        if answer is None:
            return math.nan
        job = Job(f"{Path(__file__).with_name('equality.py')}:equal", self.seconds, MEMORY_MB)
        columns = {"answers": [marked(str(answer))], "texts": [said.text]}
        [found] = score(job, [said], columns, grader="MathVerify")
        return found


def marked(answer: str) -> str:
    """The answer so that all of it is read: unmarked, `3x+5` would count as 5."""
    if any(mark in answer for mark in ("\\boxed", "$", "\\(", "\\[")):
        return answer
    return f"\\boxed{{{answer.rpartition('####')[2].strip()}}}"


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{}, without spaces; None if there is none, or if it does not end."""
    _, mark, rest = text.rpartition("\\boxed{")
    depth = 1
    for place, character in enumerate(rest if mark else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return "".join(rest[:place].split())
    return None
