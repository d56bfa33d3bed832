"""Rewards that look at the text alone."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from proximo.rewards.scoring import groups, score
from proximo.rewards.workers import FunctionJob, check_seconds
from proximo.types import Completion, Problem

MEMORY_MB = 512

# A sign counts only where it does not subtract: the last number of "5-3" is 3, that of "-$5" is -5. Commas group
# thousands, and 1e5 is one number.
_NUMBER = re.compile(
    r"(?:(?<![\d.)])-[$€£¥]?)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,2}(?!\w))?", re.ASCII
)
_UNREAD = re.compile("[,$€£¥]")


@dataclass(frozen=True)
class ExactMatch:
    """1 if the completion equals the answer, else 0; surrounding spaces are ignored."""

    last_number: bool = False
    """True: compare only the last numbers of completion and answer; 1,000, $1000.0 and 1e3 are equal."""

    needs_answer = True
    reward_range = (0.0, 1.0)

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
        return [self._score(p.answer, c.text) for p, c in zip(problems, completions, strict=True)]

    def final_answer(self, completion: Completion) -> str | None:
        """The text that is compared: all of it, or its last number."""
        if not self.last_number:
            return completion.text.strip()
        number = last_number(completion.text)
        return None if number is None else f"{number.normalize():f}"

    def reference(self, problem: Problem) -> str | None:
        """A completion that scores 1."""
        return None if problem.answer is None else str(problem.answer)

    def _score(self, answer: object, text: str) -> float:
        if answer is None:
            return math.nan
        if not self.last_number:
            return float(text.strip() == str(answer).strip())
        wanted = last_number(str(answer))
        return math.nan if wanted is None else float(last_number(text) == wanted)


@dataclass(frozen=True)
class FormatReward:
    """1 where the whole completion matches a regular expression, else 0."""

    pattern: str
    """Regular expression in Python's syntax; (?s) at its start lets a dot match line breaks."""

    seconds: float = 5.0
    """Time limit for one group in seconds; after it each completion is tried alone with the same limit.
    Some patterns never finish on some texts."""

    needs_answer = False
    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        check_seconds(self.seconds)
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"reward.pattern is {self.pattern!r}: not a regular expression, {error}") from None

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
        job = FunctionJob(f"{Path(__file__).with_name('patterns.py')}:matched", self.seconds, MEMORY_MB)
        scores = []
        for _, siblings in groups(problems, completions):
            texts = [completion.text for completion in siblings]
            scores += score(job, siblings, {"texts": texts}, {"pattern": self.pattern}, grader="FormatReward")
        return scores

    def reference(self, problem: Problem) -> str | None:
        """Return None: a pattern does not say what it matches."""
        return None


def last_number(text: str) -> Decimal | None:
    """The last decimal number of a text, exactly."""
    numbers = _NUMBER.findall(text)
    return Decimal(_UNREAD.sub("", numbers[-1])) if numbers else None
