"""Fair comparisons of algorithms or configs: same task, seeds and first rollout, equal budget, and verdicts from
paired differences with intervals."""

from proximo.insight.compare.comparison_folder import ComparisonFolder
from proximo.insight.compare.forks import fork_result
from proximo.insight.compare.page.verdicts import fair_line, verdict_lines
from proximo.insight.compare.page.writing import JSON, MARKDOWN, PAGE, write_reports
from proximo.insight.compare.plan import Budget, ComparisonPlan, Contender, RunJob, make_plan
from proximo.insight.compare.result import ComparisonResult
from proximo.insight.compare.runs import gathered, is_finished
from proximo.insight.compare.workers import RunFailure, at_once, run_jobs

__all__ = [
    "JSON",
    "MARKDOWN",
    "PAGE",
    "Budget",
    "ComparisonFolder",
    "ComparisonPlan",
    "ComparisonResult",
    "Contender",
    "RunFailure",
    "RunJob",
    "at_once",
    "fair_line",
    "fork_result",
    "gathered",
    "is_finished",
    "make_plan",
    "run_jobs",
    "verdict_lines",
    "write_reports",
]
