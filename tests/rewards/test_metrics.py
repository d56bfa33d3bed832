"""Metrics of a user's own: numbers by hand, functions that fail, and what a run makes of them."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proximo.api.progress import ObservedProgress, Silent
from proximo.config import toml
from proximo.config.trust.naming import named_code
from proximo.processes.failures import GraderFailed
from proximo.rewards import GivenFunction, PythonFunction
from proximo.rewards.calling import adapted
from proximo.rewards.grading import Grading
from proximo.rewards.metrics import GivenMetric, PythonMetric, StepMeasures, mean, metric_of, step_columns, with_metrics
from proximo.rewards.workers import Scored, _read
from proximo.rl.async_sampling.one_step_ahead import OneStepAhead
from proximo.rl.config import AheadOptions, RunConfig, load_run, loads_run
from proximo.rl.grading import graded
from proximo.rl.reward_config import RewardMix, WeightedRule
from proximo.runs.config_changes import differences
from proximo.runs.metric_docs import meaning
from proximo.runs.rollout_json import plain_group, read_group
from proximo.system.lines import JsonLines as Rows
from proximo.tasks import File
from proximo.types import Completion, Grade, Group, Problem, Rollout
from tests.rewards import measuring, others_rewards
from tests.rl.async_sampling.test_running_ahead import assert_resumed, config, left_after, trained, waiting_for_all

HERE = "tests.rewards.measuring"


@pytest.fixture
def grading() -> Iterator[Grading]:
    grading = Grading()
    yield grading
    grading.close()


def group(answer: str, *texts: str) -> Group:
    """Completions, of which a right one earns 1 and an empty one is unscored."""
    grades = [Grade(math.nan if not text else float(text == answer)) for text in texts]
    completions = [Completion(tuple(map(ord, text)), (0.0,) * len(text), text, "stop") for text in texts]
    rollouts = tuple(map(Rollout, completions, grades))
    return Group(Problem(answer, f"{answer}?", answer, {"level": 3}), (1,), rollouts)


GROUPS = [group("ab", "ab", "abc"), group("x", "x", "")]


def measured(names: list[str], grading: Grading, **fields) -> tuple[dict[str, float], list[str]]:
    measures = StepMeasures([PythonMetric(f"{HERE}:{name}", memory_mb=512, **fields) for name in names], grading)
    measures.check()
    return measures.begin(GROUPS)(), measures.take_notices()


def test_columns_are_those_of_a_reward_function_and_its_scores():
    columns = step_columns(GROUPS)
    assert columns["completions"] == ["ab", "abc", "x", ""]
    assert columns["prompts"] == ["ab?", "ab?", "x?", "x?"]
    assert columns["level"] == [3, 3, 3, 3]
    assert columns["rewards"] == columns["outcomes"] == [1.0, 0.0, 1.0, None]


@pytest.mark.slow("starts processes")
def test_values_by_hand_in_processes_of_their_own(grading: Grading):
    values, notices = measured(["lengths", "of_step", "per_answer"], grading)
    assert values == {
        "user/lengths": 2.0,  # of 2, 3 and 1: the empty one is left out
        "user/distinct": 1.0,
        "user/right": 0.5,
        "user/per_answer": 0.5,
    }
    assert notices == []


def test_values_by_hand_in_this_process(grading: Grading):
    metrics = [GivenMetric.of(each) for each in (measuring.lengths, measuring.of_step, measuring.unknown)]
    values = StepMeasures(metrics, grading).begin(GROUPS)()
    assert math.isnan(values.pop("user/nan"))
    assert math.isnan(values.pop("user/none"))
    assert values == {"user/lengths": 2.0, "user/distinct": 1.0, "user/right": 0.5, "user/one": 3.0}


FAILURES = {
    "failing": "KeyError: 'a column'",
    "short": "returned 1 scores for 4 completions",
    "text": "it returned str 'good' for grade",
    "odd_name": "it named a metric 'a/b c': use letters",
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failing_function_is_said_once_and_logged_as_nan(grading: Grading, name: str):
    measures = StepMeasures([GivenMetric.of(vars(measuring)[name])], grading)
    for lines in (1, 0):
        values, notices = measures.begin(GROUPS)(), measures.take_notices()
        assert list(values) == [f"user/{name}"]
        assert math.isnan(values[f"user/{name}"])
        assert len(notices) == lines
        assert all(FAILURES[name] in line and "training goes on" in line for line in notices)


@pytest.mark.slow("starts processes, and waits for one")
def test_processes_that_fail_hang_or_leave_stop_nothing(grading: Grading):
    names = ["failing", "text", "leaving"]
    values, notices = measured(names, grading)
    assert list(values) == [f"user/{name}" for name in names]
    assert all(map(math.isnan, values.values()))
    assert [re.findall("metric (.*?) failed", line) for line in notices] == [[name] for name in names]
    values, [line] = measured(["slow"], grading, seconds=0.2)
    assert math.isnan(values["user/slow"])
    assert "slow" in line


def test_a_hundred_names_are_enough():
    named = adapted(measuring.endless).measured({"completions": ["a"], "prompts": [""]}, 1)
    assert len(named) == 100


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.randoms())
def test_a_mean_is_the_same_in_any_order(numbers: list[float], random):
    shuffled = random.sample(numbers, len(numbers))
    assert mean(numbers) == mean(shuffled)
    assert min(numbers) - 1e-9 <= mean(numbers) <= max(numbers) + 1e-9


def test_what_trl_logs_is_answered_with_metrics():
    assert adapted(others_rewards.slow_trl).described.endswith(
        "log_extra is not logged, what it gives to log_metric is"
    )
    for served in (measuring.logging, measuring.lengths):
        assert "logged" not in adapted(served).described


# What reward functions give to TRL's log_metric


ASKED = [Problem("ab", "ab?", "ab"), Problem("x", "x?", "x")]
"""Two prompts, asked once and twice."""
ANSWERS = [Completion((1,), (0.0,), text, "stop") for text in ("four", "x", "xyz")]
LOGGED = {"user/length": 8 / 3, "user/odd_name_": 5 / 3, "user/step": 2.0}  # of 4, 2 and 2; of 1, 2 and 2


def graded_by(reward: GivenFunction | PythonFunction) -> list[Group]:
    problems = [ASKED[0], ASKED[1]]
    task: Any = Asking(File("none.jsonl", reward=reward))
    rollouts = graded(task, problems, iter([(0, tuple(ANSWERS[:1])), (1, tuple(ANSWERS[1:]))])).rollouts
    return [Group(problem, (1,), each) for problem, each in zip(problems, rollouts, strict=True)]


class Asking:
    """A file's task whose file is not read."""

    while_sampling = True

    def __init__(self, task: File) -> None:
        self.grade, self.begin = task.grade, task.begin


def test_what_a_reward_function_logs_is_the_mean_over_the_steps_rows(grading: Grading):
    with grading.active():
        groups = graded_by(GivenFunction.of(measuring.logging))
    assert groups[0].rollouts[0].grade == Grade(0.0, logged={"length": 4.0, "odd_name_": 1.0, "step": 2.0})
    assert StepMeasures((), grading).begin(groups)() == pytest.approx(LOGGED)
    of_its_own = StepMeasures([GivenMetric.of(measuring.unknown)], grading).begin(groups)()
    assert of_its_own["user/length"] == pytest.approx(8 / 3)
    assert of_its_own["user/one"] == 3.0
    lookup: Any = mock.Mock(return_value=ASKED[1])
    assert read_group(plain_group(groups[1], {}), lookup, {}) == groups[1]
    assert "logged" not in plain_group(GROUPS[0], {})["rollouts"][0]


@pytest.mark.slow("starts a process")
def test_it_is_logged_from_a_process_of_its_own_and_of_completions_that_are_tried_alone(grading: Grading):
    with grading.active():
        assert StepMeasures((), grading).begin(graded_by(PythonFunction(f"{HERE}:logging")))() == pytest.approx(LOGGED)
        one, *rest = graded_by(PythonFunction(f"{HERE}:logging_alone"))
    assert one.rollouts[0].grade.logged == {"alone": 4.0}
    assert [each.grade.logged for each in rest[0].rollouts] == [{"alone": 1.0}, {"alone": 3.0}]


@pytest.mark.parametrize(
    "named", [None, [], {"a": "1"}, {"a b": 1.0}, {"a": math.inf}, {str(n): 1.0 for n in range(101)}]
)
def test_what_a_process_says_was_logged_is_not_taken_on_trust(named):
    assert _read({"scores": [1.0], "logged": named}, 1) == Scored([1.0])


@pytest.mark.slow("trains a run and resumes it")
@pytest.mark.usefixtures("small_shipped_model", "ordinary_precision")
def test_a_resumed_run_logs_what_was_logged_of_completions_that_wait(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(OneStepAhead, "graded", waiting_for_all)
    mix = RewardMix(rules=(WeightedRule(PythonFunction(f"{HERE}:logging")),))
    settings = config(steps=4, rewards=mix, ahead=AheadOptions(2))
    trained(settings, tmp_path / "whole")
    folder = left_after(2, tmp_path / "whole", tmp_path / "run")
    trained(settings, folder)
    assert_resumed(folder, tmp_path / "whole")
    rows = [row for row in Rows(folder / "metrics.jsonl") if "reward" in row]
    assert len(rows) == 4
    assert all(row["user/length"] > 0 for row in rows)


# As they are given


def test_functions_and_names():
    assert metric_of("mine.py:f") == PythonMetric("mine.py:f")
    assert metric_of(measuring.lengths) == PythonMetric(f"{HERE}:lengths")
    assert metric_of(lambda completions, **_: []).label == "lambda"
    held = (PythonMetric("a.py:f"), PythonMetric("a.py:g"))
    assert [each.path for each in with_metrics("b.py:g", held)] == ["a.py:f", "b.py:g"]  # pyright: ignore


def test_a_file_names_them_and_a_config_without_has_no_line_of_them(tmp_path: Path):
    (tmp_path / "run.toml").write_text('metrics = ["mine.py:f", "pack.age:g"]\n')
    run = load_run(str(tmp_path / "run.toml"))
    assert run.metrics == (PythonMetric(f"{tmp_path}/mine.py:f"), PythonMetric("pack.age:g"))
    assert loads_run(toml.dumps(run)) == run
    (tmp_path / "run.toml").write_text('metrics = "mine.py:f"\n')
    assert load_run(str(tmp_path / "run.toml")).metrics == (PythonMetric(f"{tmp_path}/mine.py:f"),)
    assert "metrics" not in toml.dumps(RunConfig())
    assert [each.value for each in named_code(toml.plain(run))] == [f"{tmp_path}/mine.py:f", "pack.age:g"]
    assert differences(toml.dumps(RunConfig()), toml.dumps(run)) == {}  # a resume may measure more, or less


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ((len,), "metrics has <built-in function len>: give a function"),
        ((PythonMetric("a.py:f"), PythonMetric("b.py:f")), "metrics has 'f' twice"),
    ],
)
def test_what_is_no_metric_is_refused(metrics, line: str):
    with pytest.raises(ValueError, match=re.escape(line)):
        RunConfig(metrics=metrics)


def test_a_function_that_cannot_be_called_is_refused_before_a_run(grading: Grading):
    read = GivenMetric("note", "0123")
    with pytest.raises(GraderFailed, match=r"'note' was given in Python, .* metrics=\[note\]"):
        StepMeasures([read], grading).check()
    with pytest.raises(GraderFailed, match=r"cannot be called: its signature \(a, b\) is not recognised"):
        StepMeasures([GivenMetric.of(lambda a, b: [])], grading).check()


@pytest.mark.slow("starts a process")
def test_a_file_without_the_function_is_refused_before_a_run(grading: Grading):
    with pytest.raises(GraderFailed, match=f"metrics is '{HERE}:nowhere': .* has no function nowhere"):
        measured(["nowhere"], grading)


@pytest.mark.slow("trains two runs")
@pytest.mark.usefixtures("small_shipped_model", "ordinary_precision")
def test_a_resumed_run_has_the_bytes_of_one_left_alone_and_training_is_as_without(tmp_path: Path):
    plain = config(steps=3)
    settings = replace(plain, metrics=tuple(PythonMetric(f"{HERE}:{name}") for name in ("lengths", "of_step")))
    trained(settings, tmp_path / "whole")
    folder = left_after(2, tmp_path / "whole", tmp_path / "run")
    trained(settings, folder)
    assert_resumed(folder, tmp_path / "whole")
    trained(plain, tmp_path / "plain")
    rows, others = ([*Rows(tmp_path / name / "metrics.jsonl")] for name in ("whole", "plain"))
    ours = {"user/lengths", "user/distinct", "user/right"}
    assert [{name: value for name, value in row.items() if name not in ours} for row in rows] == others
    assert all(ours <= row.keys() for row in rows if "reward" in row)
    assert all(meaning(name) for name in ours)


def test_the_mean_of_numbers_whose_sum_is_none():
    assert mean([1.5e308, 1.5e308, -1e308]) == pytest.approx(6.6666666e307)
    assert math.isnan(mean([]))


class Noting(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def warned(self, step: int, message: str) -> None:
        self.lines.append(message)


@pytest.mark.parametrize(
    ("on_step", "name"),
    [(lambda step, metrics: {"mine": 1.0}, "mine"), (lambda step, metrics: metrics.update(added=2.0), "added")],
)
def test_numbers_that_on_step_gives_back_are_not_dropped_silently(on_step, name: str):
    inner = Noting()
    progress = ObservedProgress(inner, on_step)
    for step in (1, 2):
        progress.stepped(step, {"reward": 1.0}, {}, None)  # pyright: ignore[reportArgumentType]
    assert inner.lines == [f"on_step gave {name}, which is logged nowhere: metrics=f logs what f gives for a step"]
