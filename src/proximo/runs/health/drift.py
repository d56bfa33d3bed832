"""Rules about the policy: its entropy, its lengths, its distance from the reference."""

import math
from dataclasses import dataclass
from typing import ClassVar

from proximo.runs.health.history import EARLY, History, mean
from proximo.runs.health.rule import Rule, Severity


@dataclass(frozen=True)
class EntropyCollapse:
    """Entropy falls in every healthy run, since a policy that knows the answer is sure of it. So it counts only
    together with what is still unsolved."""

    window: int = 10
    min_ratio: float = 1 / 3
    solved: float = 0.9
    name: ClassVar[str] = "entropy-collapse"
    severity: ClassVar[Severity] = "failing"
    reads: ClassVar[str] = "entropy"
    show: ClassVar[str] = "duplicates"
    why: ClassVar[str] = "a policy that is certain of wrong answers stops exploring and never finds better ones"
    remedy: ClassVar[str] = (
        "go back to a checkpoint from before, with a lower training.learning_rate or a wider algorithm.gate.high "
        "(clip-higher, as in DAPO)"
    )

    @property
    def when(self) -> str:
        return (
            f"over {self.window} steps entropy is below {self.min_ratio:.2f} times its value in the first {EARLY}, "
            f"fewer than {self.solved:.0%} of the prompts have a right completion, and task scores no longer rise"
        )

    def evidence(self, history: History) -> str | None:
        first, now = mean(history.first(self.reads)), history.typical(self.reads, self.window)
        solved = history.typical("solved_by_any", self.window)
        if not now < self.min_ratio * first or solved >= self.solved or history.is_learning():
            return None
        prompts = "rewards do not rise" if math.isnan(solved) else f"only {solved:.0%} of the prompts have a right one"
        return (
            f"entropy was {first:.3g} nats a token in the first {EARLY} steps and is {now:.3g} over {self.window}, "
            f"while {prompts}"
        )


@dataclass(frozen=True)
class SuddenCollapse:
    """A collapse within a few steps: compared with the very first values, not with the first ten steps."""

    window: int = 2
    min_ratio: float = 0.05
    solved: float = 0.9
    name: ClassVar[str] = "sudden-collapse"
    severity: ClassVar[Severity] = "failing"
    reads: ClassVar[str] = "entropy"
    show: ClassVar[str] = "duplicates"
    why: ClassVar[str] = "an update was far too large, and the policy now always gives the same answer"
    remedy: ClassVar[str] = "start again with a training.learning_rate that is ten times lower"

    @property
    def when(self) -> str:
        return (
            f"over {self.window} steps entropy is below {self.min_ratio:g} times its value at step 1, fewer than "
            f"{self.solved:.0%} of the prompts have a right completion, and task scores are no better than at step 1"
        )

    def evidence(self, history: History) -> str | None:
        entropy, outcome = (history.last(name, self.window) for name in (self.reads, "outcome"))
        first, before = history.start(self.reads), history.start("outcome")
        if not entropy or not max(entropy) < self.min_ratio * first:
            return None
        if history.typical("solved_by_any", self.window) >= self.solved or not max(outcome, default=math.nan) <= before:
            return None
        return (
            f"entropy was {first:.3g} nats a token at step 1 and is {entropy[-1]:.3g}, while the task score went from "
            f"{before:.3g} to {outcome[-1]:.3g}"
        )


@dataclass(frozen=True)
class EntropyRise:
    """Entropy that rises without learning; more exploration for a while is no fault of a policy that learns."""

    window: int = 10
    times: float = 2.0
    min_rise: float = 0.5
    name: ClassVar[str] = "entropy-rise"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "entropy"
    show: ClassVar[str] = "worst"
    why: ClassVar[str] = "a policy that becomes less and less certain drifts towards noise"
    remedy: ClassVar[str] = "a lower training.learning_rate or entropy bonus, or a KL to the reference (algorithm.kl)"

    @property
    def when(self) -> str:
        return (
            f"over {self.window} steps entropy is more than {self.times:g} times its value in the first {EARLY} and "
            f"{self.min_rise:g} nats above it, and task scores no longer rise"
        )

    def evidence(self, history: History) -> str | None:
        first, now = mean(history.first(self.reads)), history.typical(self.reads, self.window)
        if not now > max(self.times * first, first + self.min_rise) or history.is_learning():
            return None
        return (
            f"entropy was {first:.3g} nats a token in the first {EARLY} steps and is {now:.3g} over {self.window}, "
            "and task scores do not rise"
        )


@dataclass(frozen=True)
class LengthExplosion:
    window: int = 10
    times: float = 2.0
    truncated: float = 0.2
    name: ClassVar[str] = "length-explosion"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "length"
    show: ClassVar[str] = "longest"
    why: ClassVar[str] = (
        "completions grow until they are cut off: the reward favours length, or does not reward stopping"
    )
    remedy: ClassVar[str] = "a penalty on overlong completions: SoftOverlong in algorithm.shape"

    @property
    def when(self) -> str:
        return (
            f"over {self.window} steps completions are more than {self.times:g} times as long as in the first {EARLY}, "
            f"and more than {self.truncated:.0%} are cut at the limit"
        )

    def evidence(self, history: History) -> str | None:
        first, now = mean(history.first(self.reads)), history.typical(self.reads, self.window)
        cut = history.typical("truncated", self.window)
        if not (now > self.times * first and cut > self.truncated):
            return None
        return (
            f"completions had {first:.4g} tokens in the first {EARLY} steps and have {now:.4g} over "
            f"{self.window}; {cut:.0%} are cut at the limit"
        )


@dataclass(frozen=True)
class Truncation:
    """Completions cut at the limit. Exploding length implies them and is reported alone, so this rule looks at more
    steps."""

    window: int = 20
    max_share: float = 0.2
    name: ClassVar[str] = "truncation"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "truncated"
    show: ClassVar[str] = "truncated"
    why: ClassVar[str] = "a completion that is cut off is graded without its answer"
    remedy: ClassVar[str] = (
        "raise sampling.max_tokens; or take cut completions out of the loss: algorithm.keep.truncated = false"
    )

    @property
    def when(self) -> str:
        return f"over {self.window} steps more than {self.max_share:.0%} of the completions are cut at the limit"

    def evidence(self, history: History) -> str | None:
        cut = history.typical(self.reads, self.window)
        if not cut > self.max_share or LengthExplosion().evidence(history) is not None:
            return None
        length = history.typical("length", self.window)
        return (
            f"{cut:.0%} of the completions of {self.window} steps were cut at the limit; the mean length is "
            f"{length:.4g} tokens"
        )


@dataclass(frozen=True)
class KlRunaway:
    window: int = 10
    max_kl: float = 1.0
    name: ClassVar[str] = "kl-runaway"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "kl_per_token"
    show: ClassVar[str] = "kl"
    why: ClassVar[str] = "at this distance from the reference a policy has usually lost much of what the model could do"
    remedy: ClassVar[str] = (
        "a larger KL coefficient (algorithm.kl.coefficient, for PPO algorithm.shape.coefficient), or a lower "
        "training.learning_rate"
    )

    @property
    def when(self) -> str:
        return f"over {self.window} steps the policy is more than {self.max_kl:g} nat a token from its reference"

    def evidence(self, history: History) -> str | None:
        now, first = history.typical(self.reads, self.window), mean(history.first(self.reads))
        if not now > self.max_kl:
            return None
        return (
            f"the policy is {now:.3g} nats a token from its reference over {self.window} steps, and was "
            f"{first:.3g} in the first {EARLY}"
        )


RULES: tuple[Rule, ...] = (
    SuddenCollapse(),
    EntropyCollapse(),
    EntropyRise(),
    LengthExplosion(),
    Truncation(),
    KlRunaway(),
)
