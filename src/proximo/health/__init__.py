"""What goes wrong in runs: rules over the rows of metrics.jsonl, each with its evidence and its first remedy.

Rules know no algorithm and no file: numbers in, findings out, with the standard library alone.
"""

from proximo.health.finding import SEVERITIES, Finding, Severity
from proximo.health.rule import Rule
from proximo.health.watch import ENOUGH, RULES, Spell, Watch, findings, watched, worst_first

__all__ = [
    "ENOUGH",
    "RULES",
    "SEVERITIES",
    "Finding",
    "Rule",
    "Severity",
    "Spell",
    "Watch",
    "findings",
    "watched",
    "worst_first",
]
