"""Mathematical equality, judged by math-verify: ½, 0.5 and \\frac{1}{2} are the same answer."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proximo.rewards.grading import grading
from proximo.rewards.scoring import score, score_or_pass
from proximo.rewards.text import ExactMatch
from proximo.rewards.workers import FunctionJob, check_seconds
from proximo.types import Completion, Problem

MEMORY_MB = 2048
_PLAIN = re.compile(r"0|-?[1-9]\d*|-?(?:0|[1-9]\d*)\.\d*[1-9]", re.ASCII)
"""A decimal number in its shortest form."""


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
        """The expression in the last \\boxed{}, else the last number, as written."""
        expression = boxed(completion.text)
        return expression if expression is not None else ExactMatch(last_number=True).final_answer(completion)

    def united(self, answers: Sequence[str]) -> list[str]:
        """Each answer, or the first of them that math-verify finds equal to it: ½ and 0.5 are one."""
        firsts: dict[str, str] = {}
        with grading():  # so that all are compared by one process
            for answer in answers:
                if answer not in firsts:
                    firsts[answer] = self._first_equal(answer, list(dict.fromkeys(firsts.values())))
        return [firsts[answer] for answer in answers]

    def _first_equal(self, answer: str, others: Sequence[str]) -> str:
        """The first of the others that is equal; the answer itself if none is."""
        if _PLAIN.fullmatch(answer):  # two plain numbers of different text differ
            others = [other for other in others if not _PLAIN.fullmatch(other)]
        if not others:
            return answer
        columns = {"answers": [marked(other) for other in others], "texts": [marked(answer)] * len(others)}
        completions = [Completion((), (), answer, "stop")] * len(others)
        scores = score_or_pass(self._job, completions, columns, grader="MathVerify")
        return next((other for other, is_equal in zip(others, scores, strict=True) if is_equal == 1), answer)

    @property
    def _job(self) -> FunctionJob:
        return FunctionJob(f"{Path(__file__).with_name('equality.py')}:equal", self.seconds, MEMORY_MB)

    def reference(self, problem: Problem) -> str | None:
        """A completion that scores 1."""
        return None if problem.answer is None else marked(str(problem.answer))

    def _score(self, answer: object, completion: Completion) -> float:
        if answer is None:
            return math.nan
        columns = {"answers": [marked(str(answer))], "texts": [completion.text]}
        [value] = score(self._job, [completion], columns, grader="MathVerify")
        return value


def marked(answer: str) -> str:
    """The answer so that all of it is read: unmarked, `3x+5` would count as 5."""
    if any(mark in answer for mark in ("\\boxed", "$", "\\(", "\\[")):
        return answer
    return f"\\boxed{{{answer.rpartition('####')[2].strip()}}}"


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{}, without spaces; None if there is none, or if it does not end."""
    _, mark, rest = text.rpartition("\\boxed{")
    depth = 1
    for index, character in enumerate(rest if mark else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return "".join(rest[:index].split())
    return None
