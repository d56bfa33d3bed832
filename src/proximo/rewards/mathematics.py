"""Mathematical equality, judged by math-verify: ½, 0.5 and \\frac{1}{2} are the same answer."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from proximo.types import Completion, Problem


@dataclass(frozen=True)
class MathVerify:
    """1 where the completion's final expression equals the answer, else 0; NaN where it cannot be decided in time.

    The answer is a bare expression, or a text that marks it with \\boxed{}, $ $ or #### as published solutions do.
    """

    seconds: int = 5
    """For parsing and for comparing, each. Kept on the main thread only, where Python can be interrupted."""

    needs_answer = True
    # Elsewhere than on the main thread nothing would end an expression that sympy never finishes.
    while_sampling = False

    def __post_init__(self) -> None:
        if self.seconds < 1:
            raise ValueError(f"reward.seconds is {self.seconds}: give at least 1")

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
        return [self._score(p.answer, c.text) for p, c in zip(problems, completions, strict=True)]

    def reference(self, problem: Problem) -> str | None:
        """A completion that scores 1."""
        return None if problem.answer is None else marked(str(problem.answer))

    def _score(self, answer: object, text: str) -> float:
        # Imported late: it brings sympy along, which other rewards need not wait for.
        from math_verify import parse, verify
        from math_verify.errors import TimeoutException

        if answer is None:
            return math.nan
        # math-verify interrupts itself with a signal, and refuses to on other threads; 0 is no limit.
        limit = self.seconds if threading.current_thread() is threading.main_thread() else 0
        try:
            wanted = parse(marked(str(answer)), parsing_timeout=limit, raise_on_error=True)
            if not wanted:
                return math.nan
            said = parse(text, parsing_timeout=limit, raise_on_error=True)
            return float(verify(wanted, said, timeout_seconds=limit, raise_on_error=True))
        # Sympy fails on strange input in every possible way, and none of them is a verdict. Neither is the time
        # that ran out, which is no Exception.
        except (Exception, TimeoutException):
            return math.nan


def marked(answer: str) -> str:
    """The answer so that all of it is read: unmarked, `3x+5` would count as 5."""
    if any(mark in answer for mark in ("\\boxed", "$", "\\(", "\\[")):
        return answer
    return f"\\boxed{{{answer.rpartition('####')[2].strip()}}}"
