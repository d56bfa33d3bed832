"""Rules about gains that are none: a reward that rises alone, held-out task scores that fall again."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from proximo.runs.health.history import EARLY, HELD_OUT, Evaluated, History, has_risen, mean
from proximo.runs.health.rule import Rule, Severity


@dataclass(frozen=True)
class OnePart:
    """The task's score is one of the parts: if it rises, task scores rise."""

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
            "task scores did not rise"
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
            f"({gains[name]:+.3g}), while the task score went from {first:.3g} to {now:.3g}"
        )


def _gain(history: History, name: str, window: int) -> float:
    """The gain of a metric from the first to the last steps; NaN if too little is known."""
    return mean(history.last(name, window)) - mean(history.first(name))


@dataclass(frozen=True)
class HeldOutFlat:
    """Compared with the first evaluation as good as the last; comparing with all, the unluckiest would decide."""

    window: int = 1
    apart: int = 3 * EARLY
    min_rise: float = 0.1
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
            f"{self.apart} or more steps ago, task scores in training rose by more than {self.min_rise:g} and three "
            f"times that chance, or rewards by more than their spread within groups, and by {self.errors:g} "
            "standard errors"
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
            f"from step {then.after} to {now.after} {rise}, held-out task scores {then.outcome:.3f} → "
            f"{now.outcome:.3f} ({now.problems:.0f} problems: accurate to ±{chance:.2f})"
        )

    def _rose(self, history: History, then: Evaluated, chance: float) -> str | None:
        """Metric that rose in training, in words; None if none did."""
        before = [row["outcome"] for row in then.following if "outcome" in row]
        after = history.last("outcome", EARLY)
        first, last = mean(before), mean(after)
        if last - first > max(self.min_rise, 3 * chance) and has_risen(before, after, self.errors):
            return f"training task scores went {first:.3f} → {last:.3f}"
        rewards = [row["reward"] for row in then.following if "reward" in row]
        spread = mean(row["spread"] for row in then.following if "spread" in row)
        latest = history.last("reward", EARLY)
        if history.parts and mean(latest) - mean(rewards) > spread and has_risen(rewards, latest, self.errors):
            rise = f"the reward went {mean(rewards):.3g} → {mean(latest):.3g}"
            return f"{rise} and task scores {first:.3f} → {last:.3f}"
        return None


@dataclass(frozen=True)
class HeldOutFall:
    """The best of many evaluations was lucky, too. So how far below it the last two have to be grows with their number:
    of runs that stay flat 2 to 3 % are called falling within 20 evaluations, and 3 % within 150. The average of two
    neighbours is less lucky than a single one, and a smaller fall from it counts."""

    window: int = 1
    min_evaluations: int = 3
    errors: float = 2.7
    growth: float = 0.55
    paired: float = 0.5
    name: ClassVar[str] = "held-out-fall"
    severity: ClassVar[Severity] = "failing"
    reads: ClassVar[str] = HELD_OUT
    show: ClassVar[str] = "worst"
    why: ClassVar[str] = "the policy forgets what it had learned: the last checkpoint is worse than an earlier one"
    remedy: ClassVar[str] = (
        "take the best checkpoint, and train on from it or again with a training.learning_rate that is three to ten "
        'times lower; stop_on = "collapse" ends such a run by itself'
    )

    @property
    def when(self) -> str:
        return (
            f"of {self.min_evaluations} or more evaluations of held-out problems the last two are below the best by "
            f"more than {self.errors:g} + {self.growth:g} ln(evaluations) standard errors of one, or their mean is "
            f"below the best mean of two in a row by {self.paired:g} fewer"
        )

    def evidence(self, history: History) -> str | None:
        seen = history.evaluations
        error = _error_of_one(seen[-2:]) if len(seen) >= self.min_evaluations else math.nan
        if math.isnan(error):
            return None
        values = [each.outcome for each in seen]
        *earlier, before, now = values
        far = self.errors + self.growth * math.log(len(seen))
        pairs = [(one + two) / 2 for one, two in pairwise(earlier)]
        fall, fall_of_pairs = max(earlier) - max(before, now), max(pairs, default=-math.inf) - (before + now) / 2
        if not (
            fall > far * error or (max(before, now) < max(earlier) and fall_of_pairs > (far - self.paired) * error)
        ):
            return None
        best = self._best(seen)
        where = f"checkpoints/step-{best.step:06d}" if best.step > 0 else "the model as it was before training"
        return (
            f"held-out task scores were {best.outcome:.3f} at best, after step {best.step}, and were {before:.3f} and "
            f"{now:.3f} after steps {seen[-2].step} and {seen[-1].step} ({seen[-1].problems:.0f} problems, a standard "
            f"error of {error:.3f}); the best: {where}"
        )

    def _best(self, seen: Sequence[Evaluated]) -> Evaluated:
        """The one whose checkpoint is kept, where the row says so."""
        kept = [each for each in seen[:-2] if each.step == seen[-1].best_step]
        return kept[-1] if kept else max(seen[:-2], key=lambda each: each.outcome)


def _error_of_one(last: Sequence[Evaluated]) -> float:
    """Standard error of an evaluation in a run that stays flat: from the differences by problem, of which each has the
    errors of two evaluations, or where those are unknown from the number of problems; NaN if neither is known."""
    known = [each.error for each in last if not math.isnan(each.error)]
    problems = min(each.problems for each in last)
    if known and problems >= 1:
        return max(max(known) / math.sqrt(2), 1 / problems / 2)
    share = mean(each.outcome for each in last)
    if problems < 1 or not all(0 <= each.outcome <= 1 for each in last):
        return math.nan
    return math.sqrt((share * (1 - share) + 1 / (4 * problems)) / problems)


RULES: tuple[Rule, ...] = (OnePart(), HeldOutFlat(), HeldOutFall())
