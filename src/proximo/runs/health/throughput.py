"""Rules about the time line of runs with engines, ranks or older weights: who waits for whom, and what that costs."""

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from proximo.runs.health.history import History
from proximo.runs.health.rule import Rule, Severity


@dataclass(frozen=True)
class IdleLearner:
    """A learner that waits for rollouts of others; a process that samples itself is not idle."""

    window: int = 10
    max_share: float = 0.6
    name: ClassVar[str] = "idle-learner"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "learner_idle"
    show: ClassVar[str] = ""
    why: ClassVar[str] = "the learner's GPUs wait for rollouts most of the time"
    remedy: ClassVar[str] = (
        "a higher ahead.staleness, so that steps are sampled while others are trained; then more engines for fewer "
        "ranks, as `proximo plan --gpus N` of proximo-lab splits them"
    )

    @property
    def when(self) -> str:
        return f"over {self.window} steps the learner waits for rollouts more than {self.max_share:.0%} of the time"

    def evidence(self, history: History) -> str | None:
        idle = history.typical(self.reads, self.window)
        return (
            f"over {self.window} steps the learner waited for rollouts {idle:.0%} of the time"
            if idle > self.max_share
            else None
        )


@dataclass(frozen=True)
class IdleEngines:
    """Time for pushes and probes is no idle time."""

    window: int = 10
    max_share: float = 0.6
    name: ClassVar[str] = "idle-engines"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "engines_idle"
    show: ClassVar[str] = ""
    why: ClassVar[str] = "the engines' GPUs have nothing to sample most of the time"
    remedy: ClassVar[str] = (
        "a higher ahead.staleness, so that the next steps are sampled during updates; then fewer sampler.engines, or "
        "more ranks"
    )

    @property
    def when(self) -> str:
        return f"over {self.window} steps engines have no request more than {self.max_share:.0%} of the time"

    def evidence(self, history: History) -> str | None:
        idle = history.typical(self.reads, self.window)
        return (
            f"over {self.window} steps engines had no request {idle:.0%} of the time" if idle > self.max_share else None
        )


@dataclass(frozen=True)
class SlowPush:
    """Pushes that take long: from the pause of an engine until it has answered the probe."""

    window: int = 10
    max_share: float = 0.2
    name: ClassVar[str] = "slow-push"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "push_share"
    show: ClassVar[str] = ""
    why: ClassVar[str] = "engines sample nothing while new weights arrive and are probed"
    remedy: ClassVar[str] = (
        'sampler.sync = "gloo" or "nccl" instead of a folder, or a folder in memory (TMPDIR=/dev/shm); with LoRA, '
        'sampler.sync = "adapter" pushes the adapter alone; otherwise more groups a step, so that pushes are fewer'
    )

    @property
    def when(self) -> str:
        return f"over {self.window} steps pushes and probes take more than {self.max_share:.0%} of the time"

    def evidence(self, history: History) -> str | None:
        share = history.typical(self.reads, self.window)
        return (
            f"over {self.window} steps pushes and probes took {share:.0%} of the time"
            if share > self.max_share
            else None
        )


@dataclass(frozen=True)
class Straggler:
    """The same engine or rank must be the slowest nearly always: the longest completions are somewhere at each step."""

    window: int = 10
    min_pace: float = 0.5
    often: float = 0.8
    name: ClassVar[str] = "straggler"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "pace"
    show: ClassVar[str] = ""
    why: ClassVar[str] = "all others wait for the slowest"
    remedy: ClassVar[str] = (
        "look for what else runs on its machine or GPU, and for throttling; an engine that is stopped is replaced"
    )

    @property
    def when(self) -> str:
        return (
            f"in {self.often:.0%} of {self.window} steps the same engine or rank samples at less than "
            f"{self.min_pace:.0%} of the others' speed"
        )

    def evidence(self, history: History) -> str | None:
        columns = [history.last(name, self.window) for name in (self.reads, "slowest", "slowest_is_rank")]
        slow = Counter(
            (int(number), bool(is_rank)) for pace, number, is_rank in zip(*columns, strict=True) if pace < self.min_pace
        )
        for (number, is_rank), times in slow.most_common(1):
            if times >= self.often * self.window:
                name, pace = f"rank {number}" if is_rank else f"engine-{number}", statistics.median(columns[0])
                return (
                    f"{name} was the slowest in {times} of {self.window} steps and sampled at {pace:.0%} of the "
                    "others' speed"
                )
        return None


RULES: tuple[Rule, ...] = (IdleLearner(), IdleEngines(), SlowPush(), Straggler())
