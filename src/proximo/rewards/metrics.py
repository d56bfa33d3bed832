"""Metrics of a user's own: functions that measure the completions of a step, and reward nothing.

They are called as TRL calls reward functions, once a step with all that was sampled for it, and give a number for each
completion, or a dict of such lists and of numbers of the step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from proximo.config.plugins import callable_elsewhere
from proximo.config.unions import classes
from proximo.processes.failures import Failure, GraderFailed, plain
from proximo.processes.pool import Waiting
from proximo.processes.worker import Junk, described
from proximo.rewards.calling import adapted, to_number
from proximo.rewards.function import columns_of
from proximo.rewards.grading import Grading
from proximo.rewards.notebook_function import fingerprint, name_of
from proximo.rewards.workers import FunctionJob, Measured, WorkerPool, check_seconds, checked_measures
from proximo.types import Group

PREFIX = "user/"
"""Beginning of the names under which such metrics are logged."""
Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class PythonMetric:
    """A function in a file, called in a process of its own as a reward function is."""

    path: str
    """Function to call: package.module:function, or path/to/file.py:function."""
    seconds: float = 30.0
    """Time limit for the call of a step in seconds."""
    memory_mb: int = 4096
    """Memory limit for the function's own data."""

    def __post_init__(self) -> None:
        source, _, name = self.path.rpartition(":") if isinstance(self.path, str) else ("", "", "")
        if not source or not name.isidentifier():
            raise ValueError(f"metrics has {self.path!r}: give a function, FILE.py:NAME or package.module:NAME")
        check_seconds(self.seconds)
        if self.memory_mb < 64:
            raise ValueError(f"metrics has memory_mb {self.memory_mb}: Python itself needs 64")

    @property
    def label(self) -> str:
        """Name of its metric, where it gives a list."""
        return self.path.rpartition(":")[2]

    def check(self, grading: Grading) -> None:
        """Raise ValueError if the function cannot be loaded or called."""
        self._workers(grading).check()

    def begin(self, columns: Columns, grading: Grading) -> Waiting[Measured | Failure]:
        """Begin to measure a step."""
        pool = self._workers(grading)
        return pool.begin(partial(pool.measure, columns))

    def _workers(self, grading: Grading) -> WorkerPool:
        return grading.workers(FunctionJob(self.path, self.seconds, self.memory_mb, is_users=True, measures=True))


@dataclass(frozen=True)
class GivenMetric:
    """A function given in Python that no other process could import, called in the trainer's own.

    A config file holds its name and a fingerprint only, so a resume needs the same function again.
    """

    name: str
    """Name of the function, which names its metric."""
    code: str
    """Fingerprint of the function's code."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "GivenMetric":
        """The metric that calls this function.

        Example: GivenMetric.of(lambda completions, **columns: {"longest": max(map(len, completions))})
        """
        made = cls(name=name_of(function), code=fingerprint(function))
        object.__setattr__(made, "_function", function)  # no field: a config file cannot hold it
        return made

    @property
    def label(self) -> str:
        """Name of its metric, where it gives a list."""
        return self.name

    def check(self, grading: Grading) -> None:
        """Raise ValueError if the function is not there or cannot be called."""
        self._adapted()

    def begin(self, columns: Columns, grading: Grading) -> Waiting[Measured | Failure]:
        """Measure a step, here and now."""
        measured = self._measured(columns)
        return lambda: measured

    def _measured(self, columns: Columns) -> Measured | Failure:
        count = len(next(iter(columns.values())))
        try:
            # Copies: what a function does to its arguments must not reach the problems of a later step.
            named = self._adapted().measured(deepcopy(dict(columns)), count)
            numbers = {name: [to_number(item) for item in items] for name, items in named.items()}
        except Junk as error:
            return Failure("junk", plain(str(error)))
        except Exception as error:  # not BaseException: Ctrl-C ends the program that the function is part of
            return Failure(type(error).__name__, plain(described(error)))
        return checked_measures(numbers, count)

    def _adapted(self) -> Any:
        function = vars(self).get("_function")
        if function is None:
            raise GraderFailed(
                f"the metric {self.name!r} was given in Python, and no file holds it: give it again, "
                f"proximo.train(config, run, metrics=[{self.name}])"
            )
        try:
            return adapted(function)
        except ValueError as error:
            raise GraderFailed(f"the metric {self.name!r} cannot be called: {error}") from None


Metric = PythonMetric | GivenMetric
Given = Metric | str | Callable[..., Any]
"""A metric as Python takes it: also a function, or the name of one, FILE.py:NAME."""


def metric_of(given: Given) -> Metric:
    """The metric of a function, or of the name of one: in a process of its own, where another can import it.

    Example: metric_of("mine.py:lengths") == PythonMetric("mine.py:lengths")
    """
    if isinstance(given, str):
        return PythonMetric(given)
    if not callable(given):
        return given
    path = callable_elsewhere(given)
    return GivenMetric.of(given) if path is None else PythonMetric(path)


def with_metrics(given: Given | Sequence[Given], held: Sequence[Metric] | None) -> tuple[Metric, ...]:
    """Metrics that a config has, and those of these functions, which take the place of others of their names."""
    several = [given] if isinstance(given, str) or not isinstance(given, Sequence) else given
    metrics = {each.label: each for each in held or ()}
    added = [metric_of(each) for each in several]
    check_metrics(added)
    return tuple((metrics | {each.label: each for each in added}).values())


def check_metrics(metrics: Sequence[Metric] | None) -> None:
    """Refuse what is no metric, and two that would be logged under one name."""
    for each in metrics or ():
        if type(each) not in classes(Metric):
            raise ValueError(f"metrics has {each!r}: give a function f(prompts, completions, **columns)")
    labels = [each.label for each in metrics or ()]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"metrics has {twice[0]!r} twice: give each function a name of its own")


class StepMeasures:
    """Measures each step with a run's metrics, and says once what each kind of failure is."""

    def __init__(self, metrics: Sequence[Metric], grading: Grading) -> None:
        self._metrics, self._grading = metrics, grading
        self._reported: set[tuple[str, str]] = set()
        self._notices: list[str] = []

    def check(self) -> None:
        """Raise ValueError for a function that cannot be called, before a run begins."""
        for metric in self._metrics:
            metric.check(self._grading)

    def begin(self, groups: Sequence[Group]) -> Waiting[dict[str, float]]:
        """Begin to measure all that a step has sampled; other work may go on until the result is asked for. What reward
        functions logged while they graded it is there already."""
        logged = logged_means(groups)
        if not self._metrics:
            return lambda: logged
        columns = step_columns(groups)
        begun = [(metric.label, metric.begin(columns, self._grading)) for metric in self._metrics]

        def finish() -> dict[str, float]:
            return logged | {
                name: value for label, waiting in begun for name, value in self._read(label, waiting()).items()
            }

        return finish

    def take_notices(self) -> list[str]:
        """Lines on failures since the last call, one of each kind."""
        taken, self._notices = self._notices, []
        return taken

    def _read(self, label: str, result: Measured | Failure) -> dict[str, float]:
        if isinstance(result, Failure):
            if (label, result.kind) not in self._reported:
                self._reported.add((label, result.kind))
                self._notices.append(
                    f"metric {label} failed: {result.message}; it is logged as NaN, and training goes on"
                )
            return {f"{PREFIX}{label}": math.nan}
        return {f"{PREFIX}{name or label}": mean(numbers) for name, numbers in result.items()}


def step_columns(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """The keyword arguments of a metric: those of a reward function, `rewards` and `outcomes`, the task's scores."""
    rows = [(group.problem, rollout) for group in groups for rollout in group.rollouts]
    columns = columns_of([problem for problem, _ in rows], [rollout.completion for _, rollout in rows])
    grades = [rollout.grade for _, rollout in rows]
    scores = {"rewards": [each.reward for each in grades], "outcomes": [each.verdict for each in grades]}
    return columns | {name: [None if math.isnan(score) else score for score in each] for name, each in scores.items()}


def logged_means(groups: Sequence[Group]) -> dict[str, float]:
    """Means of what reward functions gave to TRL's `log_metric`, over the samples of which they logged something."""
    graded = [rollout.grade.logged for group in groups for rollout in group.samples]
    names = dict.fromkeys(name for logged in graded for name in logged)
    return {f"{PREFIX}{name}": mean([logged[name] for logged in graded if name in logged]) for name in names}


def mean(numbers: Sequence[float]) -> float:
    """Mean of what is known; NaN where nothing is. Numbers so large that their sum is none are divided first."""
    try:
        return math.fsum(numbers) / len(numbers) if numbers else math.nan
    except OverflowError:
        return math.fsum(number / len(numbers) for number in numbers)
