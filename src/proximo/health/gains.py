"""Rules about a rising reward that does not mean real improvement."""

import math
from dataclasses import dataclass
from typing import ClassVar

from proximo.health.finding import Severity
from proximo.health.history import EARLY, HELD_OUT, Evaluated, History, has_risen, mean


@dataclass(frozen=True)
class OnePart:
    """The task's outcome is one of the parts: if it rises, outcomes rise."""

    window: int = EARLY
    share: float = 0.9
    size: float = 0.5
    solved: float = 0.9
    name: ClassVar[str] = "one-reward-part"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "reward"
    show: ClassVar[str] = "best"
    why: ClassVar[str] = "the policy learns the part that is easiest to raise instead of the task"
    remedy: ClassVar[str] = "read the completions with the highest rewards, then lower that part's weight or cap it"

    @property
    def when(self) -> str:
        return (
            f"from the first {EARLY} steps to the last {self.window} a single part of the reward made more than "
            f"{self.share:.0%} of its gain, which is more than {self.size:g} of the reward's spread within groups, and "
            "outcomes did not rise"
        )

    def evidence(self, history: History) -> str | None:
        gains = {name: _gain(history, name, self.window) for name in history.parts}
        gains = {name: gain for name, gain in gains.items() if gain > 0}
        if len(history.parts) < 2 or not gains or history.typical("solved_by_all", self.window) >= self.solved:
            return None
        name = max(gains, key=lambda each: gains[each])
        share = gains[name] / sum(gains.values())
        spread = mean(history.first("spread"))
        if not (share > self.share and gains[name] > self.size * spread) or not history.first("outcome"):
            return None
        outcome = history.first("outcome"), history.last("outcome", self.window)
        if has_risen(*outcome, 2.0) or not has_risen(history.first(name), history.last(name, self.window), 3.0):
            return None
        first, now = (mean(values) for values in outcome)
        return (
            f"{name.removeprefix('rewards/')} made {share:.0%} of what the reward gained since the first {EARLY} steps "
            f"({gains[name]:+.3g}), while the outcome went from {first:.3g} to {now:.3g}"
        )


def _gain(history: History, name: str, window: int) -> float:
    """The gain of a metric from the first to the last steps; NaN if too little is known."""
    return mean(history.last(name, window)) - mean(history.first(name))


@dataclass(frozen=True)
class HeldOutFlat:
    """Compared with the first evaluation as good as the last; comparing with all, the unluckiest would decide."""

    window: int = 1
    apart: int = 3 * EARLY
    least: float = 0.1
    errors: float = 5.0
    name: ClassVar[str] = "held-out-flat"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = HELD_OUT
    show: ClassVar[str] = "best"
    why: ClassVar[str] = "a gain in training only is memorized, or the reward is being gamed"
    remedy: ClassVar[str] = (
        "read the completions with the highest rewards: where they are right, train on more problems; where they are "
        "not, correct the grader"
    )

    @property
    def when(self) -> str:
        return (
            "since the first evaluation that was as good as the last, up to chance (1/√problems), and was "
            f"{self.apart} or more steps ago, outcomes in training rose by more than {self.least:g} and three times "
            f"that chance, or rewards by more than their spread within groups, and by {self.errors:g} standard errors"
        )

    def evidence(self, history: History) -> str | None:
        now = history.evaluations[-1]
        if not 0 <= now.outcome <= 1 or now.problems < 1:
            return None  # the size of chance variation is known only for shares
        chance = 1 / math.sqrt(now.problems)
        if now.outcome >= 1 - chance:
            return None
        then = next(each for each in history.evaluations if now.outcome - each.outcome <= chance)
        rise = self._rose(history, then, chance) if now.after - then.after >= self.apart else None
        return rise and (
            f"from step {then.after} to {now.after} {rise}, held-out outcomes {then.outcome:.3f} → {now.outcome:.3f} "
            f"({now.problems:.0f} problems: accurate to ±{chance:.2f})"
        )

    def _rose(self, history: History, then: Evaluated, chance: float) -> str | None:
        """What rose in training, in words; None if nothing did."""
        before = [row["outcome"] for row in then.following if "outcome" in row]
        after = history.last("outcome", EARLY)
        first, last = mean(before), mean(after)
        if last - first > max(self.least, 3 * chance) and has_risen(before, after, self.errors):
            return f"training outcomes went {first:.3f} → {last:.3f}"
        rewards = [row["reward"] for row in then.following if "reward" in row]
        spread = mean(row["spread"] for row in then.following if "spread" in row)
        latest = history.last("reward", EARLY)
        if history.parts and mean(latest) - mean(rewards) > spread and has_risen(rewards, latest, self.errors):
            return f"the reward went {mean(rewards):.3g} → {mean(latest):.3g} and outcomes {first:.3f} → {last:.3f}"
        return None
