"""The runs of a comparison: which are finished, and their combined result."""

from collections.abc import Sequence

from proximo.config import toml
from proximo.insight.compare.comparison_folder import ComparisonFolder
from proximo.insight.compare.measured import MeasuredRun
from proximo.insight.compare.plan import ComparisonPlan, RunJob
from proximo.insight.compare.result import ComparisonResult, make_result
from proximo.insight.compare.workers import RunFailure
from proximo.insight.folder import RunFolder
from proximo.insight.report.run_details import gather
from proximo.runs.config_changes import allowed_in
from proximo.runs.session import open_session


def is_finished(job: RunJob, layout: ComparisonFolder, accept_lost: bool = False) -> bool:
    """True if a run is finished; ValueError if its folder holds another run, is in use, or its log has lost rows and
    that is not accepted."""
    folder = layout.run(job)
    if not folder.exists():
        return False
    text = toml.dumps(job.config)
    with open_session(
        folder, text, allowed=allowed_in(folder, text, layout.allowed), accept_lost=accept_lost
    ) as session:
        return session.result is not None


def gathered(
    plan: ComparisonPlan, layout: ComparisonFolder, failures: Sequence[RunFailure], command: str
) -> ComparisonResult:
    """The result from the folders of the finished runs, with the reasons why others are not finished."""
    runs: dict[str, list[MeasuredRun]] = {contender.name: [] for contender in plan.contenders}
    unfinished: dict[str, dict[int, str]] = {contender.name: {} for contender in plan.contenders}
    failed = {failure.job.name: failure.message for failure in failures}
    for job in plan.jobs():
        try:
            details = gather(RunFolder(layout.run(job), own_code=True))
        except ValueError:
            details = None
        if details is not None and details.result is not None:
            runs[job.contender].append(MeasuredRun(job, details))
        else:
            unfinished[job.contender][job.seed] = failed.get(job.name, "it ended early")
    return make_result(plan, runs, unfinished, command)
