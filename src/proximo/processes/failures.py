"""Failures of graders, counted by kind: a person is told once a kind, not once a completion."""

import math
import threading
from dataclasses import dataclass, field, replace

from proximo.system.secrets import masked

LARGEST = 1e6
"""A score beyond it, on either side, is taken for a mistake: one such number would drown a whole step."""


class GraderFailed(ValueError):
    """A grader that cannot be trained with; the run stops and says what it did."""


@dataclass(frozen=True)
class Failure:
    """Reason why there is no score."""

    kind: str
    """An exception's name, or one of: time, died, node lost, memory, exit, output, junk, none, not a number, too large,
    start, given up."""
    message: str
    fatal: bool = False
    """True if the process did not survive it."""
    graded: bool = False
    """True if there is a score all the same: the lowest, since the policy has caused it."""


LABELS = {"junk": "malformed result"}
"""Words that people read for a kind, where they are not its name."""
Outcome = float | Failure | None
"""Result of a function for one completion; it may return None itself."""


@dataclass(frozen=True)
class Failures:
    """Failures of one grader and one kind."""

    grader: str
    kind: str
    unscored: int
    """Completions."""
    example: str
    graded: bool = False
    """True if these completions have the lowest score instead of none."""

    def __str__(self) -> str:
        if self.graded:
            episodes = f"{self.unscored} episode{'s' * (self.unscored != 1)} failed, with the lowest reward"
            return f"{self.grader}: {episodes} ({LABELS.get(self.kind, self.kind)}): {self.example}"
        completions = f"{self.unscored} completion{'s' * (self.unscored != 1)} unscored"
        if not self.unscored:
            completions = "fails for several completions together and for none of them alone"
        return f"{self.grader}: {completions} ({LABELS.get(self.kind, self.kind)}): {self.example}"


@dataclass
class Tally:
    """Failures since they were last taken. Graders add to it on any thread."""

    _failures: dict[tuple[str, str], Failures] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, grader: str, failure: Failure, unscored: int = 1) -> None:
        key = grader, failure.kind
        with self._lock:
            so_far = self._failures.get(key)
            if so_far is None or not so_far.unscored:  # an example with a completion is the better one
                so_far = Failures(grader, failure.kind, 0, masked(failure.message), failure.graded)
            self._failures[key] = replace(so_far, unscored=so_far.unscored + unscored)

    def take(self) -> list[Failures]:
        """Return the failures, in the order in which each kind was first met, and forget them."""
        with self._lock:
            failures = list(self._failures.values())
            self._failures.clear()
        return failures


def plain(text: str, max_length: int = 500) -> str:
    """Put a text on one line, without anything that a terminal would act upon."""
    cut = text if len(text) <= max_length else f"{text[: max_length // 2]} … {text[-max_length // 2 :]}"
    return "".join(
        character if character.isprintable() else " " if character.isspace() else "�" for character in cut
    ).strip()


def checked(value: object) -> Outcome:
    """Check a function's value for one completion: a number within bounds, None, or what is wrong with it."""
    if value is None:
        return None
    if not isinstance(value, float):  # a worker sends nothing else, but a function may write to its pipe
        return Failure("not a number", f"it returned {plain(str(value), 150)}")
    if not math.isfinite(value):
        return Failure("not a number", f"it returned {value}")
    if abs(value) > LARGEST:
        return Failure("too large", f"it returned {value:g}; what is beyond {LARGEST:g} is taken for a mistake")
    return value
