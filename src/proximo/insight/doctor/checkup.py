"""The check-up of a run from its folder alone: findings in its metrics, events, damaged files."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from proximo.insight.doctor.damage import damage, unreadable
from proximo.insight.doctor.verdict import Verdict, judge
from proximo.insight.folder import RunFolder, State
from proximo.runs.files import EVENTS, METRICS, TIMELINE
from proximo.runs.health import ENOUGH, ActiveFinding, Finding, RuleState, Severity, monitored, worst_first
from proximo.runs.health.timeline import with_loads
from proximo.runs.step_profile import StepProfile, profile_lines, read_profile


@dataclass(frozen=True)
class Happened:
    """A kind of event, with its count and its last occurrence."""

    kind: str
    times: int
    step: int
    """Step of the last event."""
    message: str
    """Message of the last event."""


@dataclass(frozen=True)
class Checkup:
    """The result of a check-up."""

    name: str
    state: State
    steps: int
    """Steps done, by the last row of metrics, since earlier rows may be lost."""
    held_out: Sequence[float]
    """Held-out task scores of its evaluations."""
    standing: Sequence[ActiveFinding]
    """Current findings, including damaged files, worst first."""
    passed: Sequence[ActiveFinding]
    """Findings that are over."""
    events: Sequence[Happened]
    rules: Sequence[RuleState]
    """Verdict of each rule, or what it still needs; empty for stages other than reinforcement learning."""
    unreadable: Mapping[str, tuple[int, int] | str]
    """Number of unreadable rows and of all rows by file, or the reason why the file cannot be read."""
    verdict: Verdict
    profile: StepProfile | None = None
    """Time of some steps, by their parts, if that was measured."""

    @property
    def severity(self) -> Severity | None:
        """Severity of the worst current finding; None: healthy."""
        return self.standing[0].finding.severity if self.standing else None

    @property
    def is_short(self) -> bool:
        """True if the run is too short for most rules, so that the absence of findings means little."""
        return self.steps < ENOUGH

    def link(self, finding: Finding) -> str:
        """Address in `proximo view`: the step that shows the finding, or the run."""
        where = f"&step={finding.step}&show={finding.show}" if finding.show else ""
        return f"#run={quote(self.name, safe='')}{where}"

    def to_dict(self) -> dict[str, Any]:

        def plain(active: ActiveFinding) -> dict[str, Any]:
            more = {"last": active.last, "latest": active.latest, "link": self.link(active.finding)}
            return asdict(active.finding) | more

        return {
            "run": self.name,
            "state": self.state,
            "steps": self.steps,
            "enough_steps": ENOUGH,
            "severity": self.severity,
            "held_out": list(self.held_out),
            "findings": [plain(each) for each in self.standing],
            "passed": [plain(each) for each in self.passed],
            "events": [asdict(each) for each in self.events],
            "rules": [asdict(each) for each in self.rules],
            "unreadable": dict(self.unreadable),
            "verdict": asdict(self.verdict),
            "profile": None
            if self.profile is None
            else self.profile.to_dict() | {"lines": profile_lines(self.profile)},
        }


def check_up(run: RunFolder) -> Checkup:
    """The findings that doctor, report and view show. Reads all checkpoints and rollouts completely."""
    rows = run.rows(METRICS)
    monitor = monitored(with_loads(rows, run.rows(TIMELINE)))
    damaged = [ActiveFinding(each, each.step, each.message) for each in damage(run)]
    current = worst_first([*(active for active in monitor.findings if not active.is_over), *damaged])
    steps = rows[-1]["step"] + (run.format == 1) if rows else 0  # format 1 counted from 0
    return Checkup(
        name=run.name,
        state=run.state,
        steps=steps,
        held_out=[each.outcome for each in monitor.history.evaluations],
        standing=current,
        passed=[active for active in monitor.findings if active.is_over],
        events=list(_events(run)),
        rules=monitor.states() if monitor.history.trained or not steps else [],
        unreadable=unreadable(run),
        verdict=judge(run, rows, steps, [active.finding for active in current]),
        profile=_profile(run),
    )


def _profile(run: RunFolder) -> StepProfile | None:
    """The profile of the run's steps; one that cannot be read is among the damage."""
    with suppress(OSError, ValueError):
        return read_profile(run.path)
    return None


def standing(folder: Path) -> list[Finding]:
    """Current findings in a run's metrics, worst first; empty if there is no run."""
    try:
        run = RunFolder(folder)
        return monitored(with_loads(run.rows(METRICS), run.rows(TIMELINE))).standing()
    except ValueError:
        return []


def summary(folder: Path, limit: int = 3) -> list[str]:
    """Lines for the end of a run: the worst current findings and how to see them all; empty if there are none."""
    findings = standing(folder)
    lines = [f"{each.severity}, {each.rule} since step {each.step}: {each.message}" for each in findings[:limit]]
    more = f"{len(findings) - limit} more, and w" if len(findings) > limit else "w"
    return [*lines, f"{more}hat to do first: proximo doctor {folder}"] if lines else []


def _events(run: RunFolder) -> Iterator[Happened]:
    """Events that are not findings, by kind, in the order of their first occurrence."""
    rows = [row for row in run.rows(EVENTS) if row.get("kind") != "finding"]
    for kind, times in Counter(str(row.get("kind")) for row in rows).items():
        last = next(row for row in reversed(rows) if str(row.get("kind")) == kind)
        step = last.get("step")
        yield Happened(kind, times, step if isinstance(step, int) else 0, str(last.get("message", "")))
