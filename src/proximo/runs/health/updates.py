"""Rules about the gradient: sampler mismatch, the gate, the size of updates, the baseline."""

import statistics
from dataclasses import dataclass
from typing import ClassVar

from proximo.runs.health.history import EARLY, History, mean
from proximo.runs.health.rule import Rule, Severity


@dataclass(frozen=True)
class SamplerGap:
    """A sampler away from the learner; with a correction, only one that hardly overlaps with it is reported."""

    window: int = 10
    max_kl: float = 1e-3
    least_effective: float = 0.5
    name: ClassVar[str] = "sampler-gap"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "mismatch_kl"
    show: ClassVar[str] = "gap"
    why: ClassVar[str] = "completions come from a different policy than the one being updated: the gradient is biased"
    remedy: ClassVar[str] = (
        "sample with newer weights and in the learner's precision; otherwise correct for it with TokenTruncated in "
        "algorithm.correct"
    )

    @property
    def when(self) -> str:
        return (
            f"over {self.window} steps the sampler is more than {self.max_kl:g} nats a token from the learner and "
            f"there is no correction, or the effective sample size is below {self.least_effective:.0%} of the tokens"
        )

    def evidence(self, history: History) -> str | None:
        kl, effective = (history.typical(name, self.window) for name in (self.reads, "mismatch_ess"))
        is_corrected = bool(history.last("correction", 1))
        if not (effective < self.least_effective or (kl > self.max_kl and not is_corrected)):
            return None
        return (
            f"before any update the sampler is {kl:.2g} nats a token from the learner over {self.window} "
            f"steps, {'' if is_corrected else 'un'}corrected; the effective sample size is {effective:.0%} of the "
            "tokens"
        )


@dataclass(frozen=True)
class GrowingGap:
    """A gap that grows under staleness, where each step moves the policy away from the weights that sample the next."""

    window: int = 3 * EARLY
    times: float = 3.0
    max_kl: float = 1e-3
    name: ClassVar[str] = "growing-gap"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "stale_gap"
    show: ClassVar[str] = "gap"
    why: ClassVar[str] = "the policy moves further in a step than before, so that older weights sample another policy"
    remedy: ClassVar[str] = (
        "a lower ahead.staleness or training.learning_rate; and TokenTruncated in algorithm.correct, if there is none"
    )

    @property
    def when(self) -> str:
        return (
            f"under staleness the sampler is {self.times:g} times as far from the learner as {2 * EARLY} steps before, "
            f"and more than {self.max_kl:g} nats a token"
        )

    def evidence(self, history: History) -> str | None:
        before, now = history.last(self.reads, EARLY, before=2 * EARLY), history.last(self.reads, EARLY)
        if not before:
            return None
        first, last = statistics.median(before), statistics.median(now)
        if not last > max(self.max_kl, self.times * first):
            return None
        return (
            f"with older weights the sampler is {last:.2g} nats a token from the learner; {2 * EARLY} steps before it "
            f"was {first:.2g}"
        )


@dataclass(frozen=True)
class ClipSaturation:
    """One number for hard and soft gates: the share of the gradient that passes. A narrow clip range like GSPO's stops
    much of it in healthy runs, so it counts only if task scores no longer rise."""

    window: int = 10
    max_share: float = 0.5
    name: ClassVar[str] = "clip-saturation"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "blocked_share"
    show: ClassVar[str] = "clipped"
    why: ClassVar[str] = "the step's first updates move the policy so far that the gradient of later ones is discarded"
    remedy: ClassVar[str] = (
        "a lower training.learning_rate, or fewer training.minibatches and training.epochs; then a wider algorithm.gate"
    )

    @property
    def when(self) -> str:
        return (
            f"over {self.window} steps clipping or the soft gate stops more than {self.max_share:.0%} of the gradient, "
            "and task scores no longer rise"
        )

    def evidence(self, history: History) -> str | None:
        stopped = history.typical(self.reads, self.window)
        if not stopped > self.max_share or history.is_learning():
            return None
        low, high = (history.typical(name, self.window) for name in ("clip_low", "clip_high"))
        return (
            f"over {self.window} steps clipping stopped {stopped:.0%} of the gradient ({high:.0%} of the "
            f"tokens clipped above, {low:.0%} below), and task scores do not rise"
        )


@dataclass(frozen=True)
class HugeUpdate:
    """The updates of a healthy step move the policy by hundredths of a nat; at a nat, ratios are meaningless."""

    window: int = 1
    max_kl: float = 1.0
    name: ClassVar[str] = "huge-update"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "old_kl"
    show: ClassVar[str] = "clipped"
    why: ClassVar[str] = "one step moved the policy so far from the one that sampled that its later updates are noise"
    remedy: ClassVar[str] = "a training.learning_rate that is ten times lower, or a longer warm-up"

    @property
    def when(self) -> str:
        return f"within one step the policy moves more than {self.max_kl:g} nat a token from the one that sampled"

    def evidence(self, history: History) -> str | None:
        [moved] = history.last(self.reads, 1)
        return f"one step moved the policy {moved:.3g} nats a token" if moved > self.max_kl else None


@dataclass(frozen=True)
class WeakValueModel:
    """The first `window` steps are skipped: a value model starts untrained."""

    window: int = 20
    times: float = 1.15
    name: ClassVar[str] = "weak-value-model"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "baseline_error/value"
    show: ClassVar[str] = "worst"
    why: ClassVar[str] = "a baseline worse than the group mean makes advantages noisier than GRPO's"
    remedy: ClassVar[str] = (
        "a higher value.learning_rate, some value.pretrain_steps or a larger value.form; or a group advantage (GRPO), "
        "which needs no value model"
    )

    @property
    def when(self) -> str:
        return (
            f"over {self.window} steps, not counting the first {self.window}, the squared error of the values is more "
            f"than {self.times:g} times that of the group mean"
        )

    def evidence(self, history: History) -> str | None:
        value, group = (mean(history.last(f"baseline_error/{name}", self.window)) for name in ("value", "group"))
        if history.seen[self.reads] < 2 * self.window or not value > self.times * group:  # a near tie does not count
            return None
        return (
            f"over {self.window} steps the squared error of the value model is {value:.3g}, that of the group mean "
            f"{group:.3g}: the group mean would be the better baseline"
        )


RULES: tuple[Rule, ...] = (SamplerGap(), GrowingGap(), ClipSaturation(), HugeUpdate(), WeakValueModel())
