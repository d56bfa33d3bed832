"""Reports of a run on the way: findings of the health rules, remarks of a few checks, what happened to its parts.

Each report is an event in the log, and most are shown to the user at once.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from proximo.algorithms import Algorithm
from proximo.learner.guard import Notice
from proximo.losses.pieces.protocols import AnchorTraits, GateTraits, RatioTraits
from proximo.processes.failures import Tally
from proximo.rewards import GraderFailed
from proximo.rewards.grading import Grading
from proximo.rl.config import RunConfig
from proximo.rl.progress import Progress
from proximo.runs.files import METRICS
from proximo.runs.health import COLLAPSE, HealthMonitor
from proximo.runs.log import RunLog
from proximo.samplers.sampler import SamplerEvent
from proximo.system.lines import JsonLines
from proximo.types import Group

BAND_STEPS = 5
"""Number of a run's first steps with updates in which the clip range is measured."""
MAX_BLOCKED = 0.3
"""Share of blocked tokens above which the clip range counts as too narrow."""
WIDER = 4
"""Width of the proposed clip range on either side, in standard deviations of the measured ratio. It has a margin, since
a policy that is clipped less moves further."""
STALE_STEPS = 3
"""Number of a run's first steps with older weights that are measured."""
BAD_STEPS = 3
"""Number of steps in a row with too many unscored completions that stops the run."""


class Monitor:
    """Watches a run: rules over its metrics, failures of its graders, and notices of its parts."""

    def __init__(self, config: RunConfig, log: RunLog, progress: Progress, grading: Grading) -> None:
        self.log, self._progress, self._grading, self._stop_on = log, progress, grading, config.stop_on
        self.health = HealthMonitor()
        self.failures = GraderFailureLimit(config.rewards.max_unscored, grading.failures)
        self.failed_episodes = GraderFailureLimit(1.0, grading.failed)
        self.clip_range = ClipRangeCheck(config.algorithm)
        self.staleness = StalenessCheck(config.ahead.staleness, config.algorithm)

    def notify(self, step: int, kind: str, message: str) -> None:
        """Write an event, and show it to the user."""
        self.log.event(step, kind, message)
        self._progress.warned(step, message)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write a row of metrics, and report new findings."""
        self.log.metrics(step, values)
        for finding in self.health.update({"step": step, **values}):
            more = {
                "rule": finding.rule,
                "severity": finding.severity,
                "remedy": finding.remedy,
                "show": finding.show,
            }
            self.log.event(finding.step, "finding", finding.message, **more)
            self._progress.warned(finding.step, str(finding))
        checks = (("narrow_band", self.clip_range), ("stale", self.staleness))
        for kind, remark in [(kind, check.update(values)) for kind, check in checks]:
            if remark is not None:
                self.notify(step, kind, remark)

    def remember(self, folder: Path) -> None:
        """Read the run's earlier rows after a resume, without reporting findings again."""
        for row in JsonLines(folder / METRICS).readable():
            for check in (self.health.update, self.clip_range.update, self.staleness.update):
                check(row)

    def sampler_events(self, step: int, events: Sequence[SamplerEvent]) -> None:
        """Report what happened to the samplers."""
        for event in events:
            self.log.event(step, event.kind, event.message, **event.numbers)
            if event.warns:
                self._progress.warned(step, event.message)

    def after_step(
        self, step: int, groups: Sequence[Group], updates: Sequence[Notice], rollouts: Sequence[Notice]
    ) -> None:
        """Report what happened in a step: notices of its updates, what graders could not score of its groups, and
        notices of its rollouts."""
        graders = [Notice("unscored", line) for line in self.failures.update(groups)]
        graders += [Notice("failed_episodes", line) for line in self.failed_episodes.lines()]
        graders += [Notice("judge", line) for line in self._grading.take_notices()]
        for notice in (*updates, *graders, *rollouts):
            self.notify(step, notice.kind, notice.message)

    def after_evaluation(self, step: int) -> None:
        """Report failures of graders in an evaluation."""
        unscored, failed = self.failures.lines(), self.failed_episodes.lines()
        for line in unscored:
            self.notify(step, "unscored", line)
        for line in failed:
            self.notify(step, "failed_episodes", line)

    def collapse(self, complaint: str | None) -> str | None:
        """Say why the run ends here, if it collapsed and `stop_on` is set; `complaint`: of diverged updates."""
        if self._stop_on is None:
            return None
        finding = next((standing for standing in self.health.standing() if standing.rule in COLLAPSE), None)
        why = complaint if finding is None else f"{finding.rule}, {finding.message}"
        return None if why is None else f'the run ends here, as stop_on is "{self._stop_on}": {why}'


class ClipRangeCheck:
    """Watches every step's metrics and gives at most one remark, after the first steps. It is not a finding: the run
    may learn well, only more slowly than with a clip range that fits its lengths."""

    def __init__(self, algorithm: Algorithm) -> None:
        low, high = GateTraits.read(algorithm.gate).band
        self._edges = (1 - low, high - 1)
        applies = RatioTraits.read(algorithm.ratio).length_normalised and max(self._edges) > 0
        self._left, self._rows = BAND_STEPS if applies else 0, list[tuple[float, float, float]]()

    def update(self, metrics: Mapping[str, object]) -> str | None:
        """The remark, if there is one."""
        values = [metrics.get(name) for name in ("blocked", "length", "ratio_spread")]
        numbers = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
        if not self._left or len(numbers) < len(values):
            return None
        self._left -= 1
        self._rows.append((numbers[0], numbers[1], numbers[2]))
        if self._left:
            return None
        blocked, length, spread = (statistics.mean(column) for column in zip(*self._rows, strict=True))
        if blocked <= MAX_BLOCKED or spread <= max(self._edges):
            return None
        low, high = (float(f"{edge * WIDER * spread / statistics.mean(self._edges):.1g}") for edge in self._edges)
        return (
            f"the clip range −{self._edges[0]:.2g} / +{self._edges[1]:.2g} blocked {blocked:.0%} of the tokens in "
            f"the first {BAND_STEPS} steps: the ratio is a mean over a completion's tokens, and with {length:.3g} "
            f"tokens its standard deviation is {spread:.2g}. This slows learning; algorithm.gate.low = {low:g} "
            f"and algorithm.gate.high = {high:g}, about {WIDER} times that, would fit these lengths"
        )


class StalenessCheck:
    """Watches every step's metrics and warns at most once, with the measured gap."""

    def __init__(self, staleness: int, algorithm: Algorithm) -> None:
        # With the sampler's own policy as the anchor, the ratio is the correction.
        is_corrected = algorithm.correct is not None or AnchorTraits.read(algorithm.anchor).needs_sampler_logprobs
        self._staleness = 0 if is_corrected else staleness
        self._gaps: list[tuple[float, float]] = []

    def update(self, metrics: Mapping[str, object]) -> str | None:
        """The warning, if there is one."""
        values = [metrics.get(name) for name in ("mismatch_kl", "mismatch_ess")]
        gap = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
        if not self._staleness or len(gap) < len(values):
            return None
        self._gaps.append((gap[0], gap[1]))
        if len(self._gaps) <= STALE_STEPS:  # the first step has the policy's own weights
            return None
        kl, effective = (statistics.mean(column) for column in zip(*self._gaps[1:], strict=True))
        staleness, self._staleness = self._staleness, 0
        return (
            f"ahead.staleness is {staleness} and the algorithm has no correction: in the first {STALE_STEPS} steps "
            f"with older weights the sampler was {kl:.2g} nats a token from the policy, and the effective sample size "
            f"{effective:.0%} of the tokens. Use TokenTruncated in algorithm.correct: ratios still compare with the "
            "policy at the start of the step, and the correction with the sampler"
        )


class GraderFailureLimit:
    """Watches every step and reports failures of graders: each kind once, and again at ten times the count."""

    def __init__(self, limit: float, failures: Tally) -> None:
        """`limit` is the largest allowed share of unscored completions in a step; graders count `failures`."""
        self.limit, self._failures = limit, failures
        self._bad_steps = self._unscored = self._completions = 0
        self._total: dict[tuple[str, str], int] = {}
        self._reported: dict[tuple[str, str], int] = {}
        self._examples: dict[tuple[str, str], str] = {}

    def update(self, groups: Sequence[Group]) -> list[str]:
        """Count a step's completions; returns messages for the user."""
        rewards = [rollout.grade.verdict for group in groups for rollout in group.rollouts]
        self._unscored, self._completions = sum(reward != reward for reward in rewards), len(rewards)
        is_bad = self._unscored > self.limit * self._completions
        self._bad_steps = self._bad_steps + 1 if is_bad else 0
        if not is_bad:
            self._examples.clear()
        return self.lines()

    def check(self) -> None:
        """Raise GraderFailed if the run should stop."""
        if self._bad_steps < BAD_STEPS:
            return
        failures = "".join(f"\n  {example}" for example in self._examples.values())
        raise GraderFailed(
            f"{self._unscored} of {self._completions} completions could not be scored, and in each of the last "
            f"{BAD_STEPS} steps more than rewards.max_unscored = {self.limit:g} of them: correct the grader, then run "
            f"the same command again{failures}"
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
