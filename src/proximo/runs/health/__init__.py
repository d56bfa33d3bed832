"""Rules over the rows of metrics.jsonl that detect what goes wrong in runs, each with evidence and a remedy.

Rules do not depend on algorithms or files: numbers in, findings out, with the standard library only.
"""

from proximo.runs.health.rule import SEVERITIES, Finding, Rule, Severity
from proximo.runs.health.watch import (
    COLLAPSE,
    ENOUGH,
    RULES,
    ActiveFinding,
    HealthMonitor,
    RuleState,
    findings,
    monitored,
    worst_first,
)

__all__ = [
    "COLLAPSE",
    "ENOUGH",
    "RULES",
    "SEVERITIES",
    "ActiveFinding",
    "Finding",
    "HealthMonitor",
    "Rule",
    "RuleState",
    "Severity",
    "findings",
    "monitored",
    "worst_first",
]
