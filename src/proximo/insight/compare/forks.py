"""A run and its forks as a comparison: nothing is trained, and only the steps from the fork on count.

Several runs that differ in their seed, each with its forks, are one comparison with several seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from proximo.config import toml
from proximo.insight.compare.measured import MeasuredRun
from proximo.insight.compare.plan import Budget, ComparisonPlan, Contender, RunJob, refuse_different, unique_names
from proximo.insight.compare.result import ComparisonResult, Fork, make_result
from proximo.insight.folder import RunFolder
from proximo.insight.lens.fork_divergence import fork_point, parting, parting_in_words
from proximo.insight.report.run_details import gather
from proximo.runs.config_changes import differences
from proximo.runs.forking import parent_of

PARENTS = "parent"
"""Name of the runs that were forked, if there are several."""


@dataclass(frozen=True)
class _Fork:
    """A fork, its parent and where it begins."""

    run: RunFolder
    parent: RunFolder
    at: int

    @property
    def arm(self) -> tuple[int, tuple[tuple[str, str], ...]]:
        """Step and changed settings, which forks of an arm have in common."""
        changed = differences(_seedless(self.parent), _seedless(self.run))
        return self.at, tuple(sorted(changed.items()))


def fork_result(folders: Sequence[Path], command: str) -> ComparisonResult:
    """The comparison of a run with its forks; ValueError if the folders are something else. A parent that is not
    given is added."""
    parents, forks = _sorted([RunFolder(folder, own_code=True) for folder in folders])
    arms: dict[tuple[int, tuple[tuple[str, str], ...]], list[_Fork]] = {}
    for fork in forks:
        arms.setdefault(fork.arm, []).append(fork)
    single = len(parents) == 1
    names = unique_names(
        [parents[0].name if single else PARENTS, *(_name(arm[0], single=single) for arm in arms.values())]
    )
    first, *others = names
    start = min(fork.at for fork in forks)
    members = {first: [(run, start) for run in parents]}
    members |= {name: [(fork.run, fork.at) for fork in arm] for name, arm in zip(others, arms.values(), strict=True)}
    contenders = [Contender(name, runs[0][0].config) for name, runs in members.items()]
    refuse_different([(each.name, each.config) for each in contenders])
    runs, unfinished = _read(members)
    last = max((run.details.steps_done for each in runs.values() for run in each), default=start + 1)
    plan = ComparisonPlan(
        tuple(contenders), tuple(run.config.seed for run in parents), Budget("steps", max(last - start, 1))
    )
    forked = {
        name: Fork(arm[0].at, parting_in_words(parting(arm[0].run, arm[0].parent), name, first))
        for name, arm in zip(others, arms.values(), strict=True)
    }
    return make_result(plan, runs, unfinished, command, forked)


def _sorted(runs: Sequence[RunFolder]) -> tuple[list[RunFolder], list[_Fork]]:
    """The parents, by seed, and the forks."""
    parents: dict[Path, RunFolder] = {}
    origins: list[tuple[RunFolder, Path, int]] = []
    for run in runs:
        origin = parent_of(run.path.resolve(), run.record)
        # A fork of a fork is compared with that one; with its own parent given, it is a fork.
        if origin is None or any(fork_point(other, run) is not None for other in runs):
            parents[run.path.resolve()] = run
        else:
            origins.append((run, *origin))
    if not origins:
        names = ", ".join(str(run.path) for run in runs)
        raise ValueError(
            f"none of {names} is a fork of another: `proximo fork` makes one; give configs to train them anew, or see "
            "the runs in one chart with `proximo view`"
        )
    for run, path, _ in origins:
        parents.setdefault(path, _parent(run, path))
    if wrong := [run for path, run in parents.items() if all(path != each for _, each, _ in origins)]:
        raise ValueError(f"{wrong[0].path} has no fork among these runs: give one of its forks, or leave it out")
    seeds = [run.config.seed for run in parents.values()]
    if len(set(seeds)) < len(seeds):
        raise ValueError("two of the forked runs have the same seed: compare them one after the other")
    ordered = sorted(parents.values(), key=lambda run: run.config.seed)
    return ordered, [_Fork(run, parents[path], at) for run, path, at in origins]


def _parent(fork: RunFolder, path: Path) -> RunFolder:
    try:
        return RunFolder(path, own_code=True)
    except ValueError:
        raise ValueError(
            f"{fork.path} is a fork of {path}, which is not there: give the folder of that run too"
        ) from None


def _read(
    members: dict[str, list[tuple[RunFolder, int]]],
) -> tuple[dict[str, list[MeasuredRun]], dict[str, dict[int, str]]]:
    runs: dict[str, list[MeasuredRun]] = {name: [] for name in members}
    unfinished: dict[str, dict[int, str]] = {name: {} for name in members}
    for name, folders in members.items():
        for folder, after in folders:
            details = gather(folder)
            if details.result is None:
                unfinished[name][folder.config.seed] = f"it is {details.state}"
            else:
                runs[name].append(MeasuredRun(RunJob(name, folder.config), details, after))
    return runs, unfinished


def _name(fork: _Fork, *, single: bool) -> str:
    """A fork's own name; of several parents' forks what they have in common."""
    return fork.run.name if single else fork.run.name.removeprefix(f"{fork.parent.name}-")


def _seedless(run: RunFolder) -> str:
    return toml.dumps(replace(run.config, seed=0))
