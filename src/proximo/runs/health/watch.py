"""Watches a run: each finding is reported once, and again only after it was over."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from proximo.runs.health import drift, gains, reward_signal, throughput, turns, updates
from proximo.runs.health.history import HELD_OUT, History, Row
from proximo.runs.health.rule import SEVERITIES, Finding, Rule

RULES: tuple[Rule, ...] = (
    *reward_signal.RULES,
    *drift.RULES,
    *updates.RULES,
    *gains.RULES,
    *turns.RULES,
    *throughput.RULES,
)
COLLAPSE = frozenset(
    rule.name for rule in (gains.HeldOutFall, drift.EntropyCollapse, drift.SuddenCollapse, updates.HugeUpdate)
)
"""Rules that say that a policy loses what it could do."""
ENOUGH = sorted(rule.window for rule in RULES)[len(RULES) // 2]
"""Steps that most rules need."""


@dataclass
class ActiveFinding:
    """A finding, from the first row that shows it until it is over."""

    finding: Finding
    last: int
    """Last step that showed it."""
    latest: str
    """Evidence at that step."""
    quiet: int = 0
    """Rows since then without evidence."""
    is_over: bool = False


@dataclass(frozen=True)
class RuleState:
    """A rule after all rows: found, passed (now or never a finding), waiting for more rows, or without its metric."""

    rule: str
    state: Literal["found", "passed", "waiting", "unmeasured"]
    rows: int
    """Rows with its metric."""
    needs: int
    """Rows that it needs."""
    when: str
    """Threshold of the rule, in words."""


class HealthMonitor:
    """Rows in, findings out. The findings are a function of the rows alone: given the same rows again, as after a
    resume, a new monitor has the same state."""

    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        self.rules, self.history = rules, History()
        self.findings: list[ActiveFinding] = []
        self._open: dict[str, ActiveFinding] = {}

    def update(self, row: Row) -> list[Finding]:
        """Add a row; returns the findings that are new."""
        known = self.history.add(row)
        new = []
        for rule in self.rules:
            if rule.reads not in known:
                continue
            evidence, active = rule.evidence(self.history), self._open.get(rule.name)
            if evidence is None:
                self._fade(rule)
            elif active is None:
                new.append(self._begin(rule, evidence))
            else:
                active.quiet, active.last, active.latest = 0, self.history.step, evidence
        return new

    def standing(self) -> list[Finding]:
        """Findings that are not over, worst first."""
        return [active.finding for active in worst_first(self._open.values())]

    def states(self) -> list[RuleState]:
        """State of each rule now."""
        return [self._state(rule) for rule in self.rules]

    def _state(self, rule: Rule) -> RuleState:
        history = self.history
        rows = history.trained * bool(history.evaluations) if rule.reads == HELD_OUT else history.seen[rule.reads]
        needs = max(rule.window, getattr(rule, "apart", 0))
        if rule.name in self._open:
            state = "found"
        elif rows >= needs:
            state = "passed"
        else:
            state = "waiting" if rows or not history.trained else "unmeasured"
        return RuleState(rule.name, state, rows, needs, rule.when)

    def _begin(self, rule: Rule, evidence: str) -> Finding:
        step = self.history.step
        finding = Finding(rule.name, rule.severity, step, evidence, rule.remedy, rule.show)
        self._open[rule.name] = ActiveFinding(finding, step, evidence)
        self.findings.append(self._open[rule.name])
        return finding

    def _fade(self, rule: Rule) -> None:
        """Count a row without evidence. One does not end a finding: at a threshold it would be reported repeatedly."""
        active = self._open.get(rule.name)
        if active is not None:
            active.quiet += 1
            if active.quiet >= rule.window:
                active.is_over = True
                del self._open[rule.name]


def monitored(rows: Iterable[Row]) -> HealthMonitor:
    """A new monitor that has read these rows."""
    monitor = HealthMonitor()
    for row in rows:
        monitor.update(row)
    return monitor


def findings(rows: Iterable[Row]) -> list[Finding]:
    """All findings in a run's rows, in order."""
    return [active.finding for active in monitored(rows).findings]


def worst_first(findings: Iterable[ActiveFinding]) -> list[ActiveFinding]:
    return sorted(findings, key=lambda each: (SEVERITIES.index(each.finding.severity), each.finding.step))
