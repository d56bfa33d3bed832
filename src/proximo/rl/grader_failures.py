"""Watches how much of a step could not be scored, and stops a run whose grader has failed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from proximo.processes.failures import Tally
from proximo.rewards import GraderFailed
from proximo.types import Group

STEPS = 3
"""Number of steps in a row with too many unscored completions that stops the run."""


class UnscoredWatch:
    """Watches every step and reports failures of graders: each kind once, and again at ten times the count."""

    def __init__(self, most: float, failures: Tally) -> None:
        """`most` is the largest allowed share of unscored completions in a step; graders count `failures`."""
        self.most, self._failures = most, failures
        self._bad_steps = self._unscored = self._completions = 0
        self._total: dict[tuple[str, str], int] = {}
        self._reported: dict[tuple[str, str], int] = {}
        self._examples: dict[tuple[str, str], str] = {}

    def look(self, groups: Sequence[Group]) -> list[str]:
        """Count a step's completions; returns messages for the user."""
        rewards = [rollout.grade.verdict for group in groups for rollout in group.rollouts]
        self._unscored, self._completions = sum(reward != reward for reward in rewards), len(rewards)
        is_bad = self._unscored > self.most * self._completions
        self._bad_steps = self._bad_steps + 1 if is_bad else 0
        if not is_bad:
            self._examples.clear()
        return self.lines()

    def check(self) -> None:
        """Raise GraderFailed if the run should stop."""
        if self._bad_steps < STEPS:
            return
        failures = "".join(f"\n  {example}" for example in self._examples.values())
        raise GraderFailed(
            f"{self._unscored} of {self._completions} completions could not be scored, and in each of the last "
            f"{STEPS} steps more than rewards.max_unscored = {self.most:g} of them: correct the grader, then run the "
            f"same command again{failures}"
        )

    def lines(self) -> list[str]:
        """New failures of graders since the last call."""
        lines = []
        for failures in self._failures.take():
            key = failures.grader, failures.kind
            self._total[key] = self._total.get(key, 0) + failures.unscored
            self._examples.setdefault(key, str(failures))
            if key not in self._reported or self._total[key] >= 10 * max(self._reported[key], 1):
                self._reported[key] = self._total[key]
                lines.append(str(replace(failures, unscored=self._total[key])))
        return lines

    def state(self) -> dict[str, int]:
        """State for a resume, so that a resumed run stops at the same point."""
        return {"bad_steps": self._bad_steps}

    def load(self, state: Mapping[str, int]) -> None:
        self._bad_steps = state["bad_steps"]
