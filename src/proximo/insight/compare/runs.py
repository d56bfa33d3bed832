"""The runs of a comparison: which are finished, and their combined result."""

from collections.abc import Sequence

from proximo.config import toml
from proximo.insight.compare.comparison_folder import Place
from proximo.insight.compare.measured import Run
from proximo.insight.compare.plan import ComparisonPlan, Job
from proximo.insight.compare.result import Result, make_result
from proximo.insight.compare.workers import Failure
from proximo.insight.folder import RunFolder
from proximo.insight.report.facts import gather
from proximo.runs.session import begin


def is_finished(job: Job, place: Place, accept_lost: bool = False) -> bool:
    """Whether a run is finished; ValueError if its folder holds another run, is in use, or its log has lost rows and
    that is not accepted."""
    folder = place.run(job)
    if not folder.exists():
        return False
    with begin(folder, toml.dumps(job.config), accept_lost=accept_lost) as attempt:
        return attempt.result is not None


def gathered(plan: ComparisonPlan, place: Place, failures: Sequence[Failure], command: str) -> Result:
    """The result from the folders of the finished runs, with the reasons why others are not finished."""
    runs: dict[str, list[Run]] = {contender.name: [] for contender in plan.contenders}
    unfinished: dict[str, dict[int, str]] = {contender.name: {} for contender in plan.contenders}
    failed = {failure.job.name: failure.message for failure in failures}
    for job in plan.jobs():
        try:
            facts = gather(RunFolder(place.run(job), own_code=True))
        except ValueError:
            facts = None
        if facts is not None and facts.result is not None:
            runs[job.contender].append(Run(job, facts))
        else:
            unfinished[job.contender][job.seed] = failed.get(job.name, "it ended early")
    return make_result(plan, runs, unfinished, command)
