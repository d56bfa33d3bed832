"""A grader that cannot tell right from wrong is found before anything trains; one that fails later is told of."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from proximo.models import tiny_tokenizer
from proximo.processes.failures import Failure, Tally
from proximo.rewards import ExactMatch, FormatReward, GraderFailed, MathVerify, PythonFunction, Reward, reward_named
from proximo.rl.mixed_reward import with_reward_models
from proximo.rl.monitor import BAD_STEPS, GraderFailureLimit
from proximo.rl.preflight.calibration import SAMPLE, calibrate
from proximo.rl.reward_config import RewardMix, WeightedRule
from proximo.runs.checkpointer import StatefulParts
from proximo.runs.records import Pending
from proximo.tasks import Arithmetic, Countdown, Echo, File, Gym, Sorting, Split, Task
from proximo.types import Completion, Grade, Group, Problem, Rollout
from tests import ROOT
from tests.rewards.task_rewards import broken

HOSTILE = ROOT / "tests/rewards/hostile_rewards.py"


@dataclass
class Sums:
    """The answers are 11, 22, 33, ...; how it is graded is each test's own."""

    score: Callable[[int, str], float]
    knows: bool = True
    asked: list[str] = field(default_factory=list)
    while_sampling: bool = True

    def size(self, split: Split) -> int | None:
        return None

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return Problem(f"sum-{index}", "?", str(11 * (index + 1)))

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        self.asked += [completion.text for completion in completions]
        pairs = zip(problems, completions, strict=True)
        return [Grade(self.score(int(problem.answer), said.text)) for problem, said in pairs]

    def reference(self, problem: Problem) -> str | None:
        return str(problem.answer) if self.knows else None


def right(answer: int, text: str) -> float:
    return float(text == str(answer))


def test_a_grader_that_works_has_no_remarks_and_is_asked_little():
    task = Sums(right)
    assert isinstance(task, Task)
    assert calibrate(task, 0) == []
    answers = ["11", "22", "33", "44", "55", "66", "77", "88"]
    assert task.asked[:SAMPLE] == answers
    assert task.asked[SAMPLE : 2 * SAMPLE] == [*answers[1:], "11"]
    assert task.asked[2 * SAMPLE : 3 * SAMPLE] == [""] * SAMPLE
    # The first digit of the last number is another, or the last digit.
    assert task.asked[3 * SAMPLE :][:4] == ["21", "12", "32", "23"]
    assert task.asked[3 * SAMPLE :][-2:] == ["98", "89"]


@pytest.mark.parametrize(
    ("score", "why"),
    [
        (lambda answer, text: 0.0, "gives less than 1 to the task's own answers, 8 of 8: sum-0: '11' scores 0; sum-1"),
        (lambda answer, text: math.nan, "gives no score to the task's own answers, 8 of 8: sum-0: '11' is unscored; s"),
        (
            lambda answer, text: math.nan if answer < 60 else 0.0,
            "gives no score or less than 1 to the task's own answers, 8 of 8: sum-0: '11' is unscored; sum-1",
        ),
        (lambda answer, text: 1.0, "gives as much to another problem's answer, 8 of 8: sum-0: '22' scores 1"),
        (lambda answer, text: float(text in ("", str(answer))), "gives as much to an empty text, 8 of 8"),
        (lambda answer, text: float(answer < 60 or text == str(answer)), "another problem's answer, 5 of 8"),
        (lambda answer, text: float(str(answer)[0] in text), "with a changed character, 8 of 8: sum-0: '21' scores 1"),
    ],
)
def test_a_grader_that_cannot_tell_is_refused_with_examples(score: Callable[[int, str], float], why: str):
    with pytest.raises(GraderFailed) as error:
        calibrate(Sums(score), 0)
    assert why in str(error.value)
    assert "nothing was trained" in str(error.value)


@pytest.mark.parametrize(
    ("body", "prompt", "line"),
    [
        (
            "def f(completions, solution, **columns):\n    return [1.0 for _ in completions]\n",
            "1+1=",
            r"missing 1 required positional argument: 'solution'.*; the columns that are there are "
            r"answer, completions, hint, prompts$",
        ),
        (
            "def f(completions, **columns):\n    return [float(len(c.strip())) for c in completions]\n",
            [{"role": "user", "content": "1+1="}],
            r"'list' object has no attribute 'strip'.*each completion is a list of messages: its text is "
            r"c\[0\]\['content'\]$",
        ),
    ],
)
def test_the_cause_of_an_error_comes_first_with_what_helps(body: str, prompt: object, line: str, tmp_path: Path):
    (tmp_path / "rewards.py").write_text(body)
    rows = [json.dumps({"prompt": prompt, "answer": "2", "hint": "add"}) for _ in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    reward = PythonFunction(f"{tmp_path}/rewards.py:f")
    task = File(str(tmp_path / "rows.jsonl"), reward=reward, held_out=0.0)
    with pytest.raises(GraderFailed) as error:
        calibrate(task, 0)
    first, *others = str(error.value).splitlines()
    assert re.search(line, first), first
    assert "nothing was trained" in others[-1]


def test_a_file_of_functions_is_answered_with_its_functions(tmp_path: Path):
    file = tmp_path / "rewards.py"
    file.write_text(
        f"open({str(tmp_path / 'executed')!r}, 'w')\ndef short(): ...\ndef _own(): ...\nasync def long(): ...\n"
    )
    with pytest.raises(ValueError, match=f"give one of its functions, {file}:short, {file}:long$"):
        reward_named(str(file))
    assert not (tmp_path / "executed").exists()
    with pytest.raises(ValueError, match="no reward is called 'none.py'"):
        reward_named("none.py")


def test_a_few_wrong_answers_of_the_data_are_told_and_not_refused():
    remarks = calibrate(Sums(lambda answer, text: float(text == str(answer) and answer % 2 == 1)), 0)
    assert remarks == [
        "calibration: the grader gives less than 1 to the task's own answers, 4 of 8: sum-1: '22' scores 0; "
        "sum-3: '44' scores 0; sum-5: '66' scores 0; check these problems"
    ]


def test_one_that_rounds_is_no_mistake():
    assert calibrate(Sums(lambda answer, text: float(bool(text) and abs(int(text) - answer) < 5)), 0) == []


def test_wrong_texts_that_are_never_scored_are_told():
    remarks = calibrate(Sums(lambda answer, text: 1.0 if text == str(answer) else math.nan), 0)
    assert len(remarks) == 3
    assert "8 of 8 are unscored: the grader does not call them wrong" in remarks[0]


def test_without_references_one_score_is_enough():
    task = Sums(lambda answer, text: 0.0 if text else math.nan, knows=False)
    assert calibrate(task, 0) == []
    assert task.asked == ["1", "", "11"]
    with pytest.raises(GraderFailed, match="no text could be scored, of 3 problems; nothing was trained"):
        calibrate(Sums(lambda answer, text: math.nan, knows=False), 0)


@pytest.mark.slow("grades every task")
@pytest.mark.parametrize(
    "task",
    [Arithmetic(), Arithmetic(chat=True, operations=("*",)), Countdown(), Echo(), Sorting(), Gym("chain_sum")],
)
def test_our_own_tasks_pass(task: Task):
    if isinstance(task, Gym):
        pytest.importorskip("reasoning_gym", reason="an optional package")
    assert calibrate(task, 3) == []


def rows(tmp_path: Path, answers: Sequence[object]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{n}", "answer": each}) + "\n" for n, each in enumerate(answers)))
    return str(path)


@pytest.mark.slow("checks a whole setup")
@pytest.mark.parametrize(
    ("reward", "answers"),
    [
        (ExactMatch(), [f"word{n}" for n in range(12)]),
        (ExactMatch(last_number=True), [f"so 3 + {n} is\n#### {n + 3}" for n in range(12)]),
        (MathVerify(), [f"\\frac{{{n}}}{{7}}" for n in range(1, 13)]),
        (MathVerify(), [f"{n}.123456789" for n in range(12)]),
        (FormatReward("[a-z]+"), [str(n) for n in range(12)]),
        (PythonFunction(f"{HOSTILE}:longer_is_better"), [str(n) for n in range(12)]),
    ],
)
def test_files_pass(tmp_path: Path, reward: Reward, answers: list[str]):
    assert calibrate(File(rows(tmp_path, answers), reward=reward, held_out=0.2), 0) == []


def test_a_function_that_breaks_is_refused_with_its_own_words(tmp_path: Path):
    task = File(rows(tmp_path, ["a", "b", "c"]), reward=PythonFunction(f"{HOSTILE}:returns_none"), held_out=0.3)
    with pytest.raises(GraderFailed, match="no text could be scored, of 2 problems") as error:
        calibrate(task, 0)
    assert "hostile_rewards.py:returns_none: 6 completions unscored (malformed result): it returned NoneType" in str(
        error.value
    )


def test_a_rule_that_breaks_does_not_call_right_answers_wrong():
    """The task's verdict is 1, and the reward has none."""
    mix = RewardMix(rules=(WeightedRule(PythonFunction(broken)),))
    with pytest.raises(GraderFailed) as error:
        calibrate(with_reward_models(Arithmetic(), mix, tiny_tokenizer()), 0)
    told, said = str(error.value).splitlines()  # the cause comes first
    assert re.search(
        r"the grader gives no score to the task's own answers, 8 of 8: arithmetic-\S+: '\d+' is unscor", said
    )
    assert "scores 1" not in said
    assert "broken: 8 completions unscored (RuntimeError)" in told


# On the way


def group(*outcomes: float) -> Group:
    said = Completion((1,), (-0.1,), "x", "stop")
    return Group(Problem("p", "?", None), (1,), tuple(Rollout(said, Grade(outcome)) for outcome in outcomes))


BAD, HALF = group(math.nan, math.nan, 1.0), group(math.nan, 1.0)


def test_three_bad_steps_in_a_row_stop_the_run_with_examples():
    failures = Tally()
    watch = GraderFailureLimit(0.5, failures)
    for step in [BAD, BAD, HALF, BAD, BAD]:
        failures.add("f", Failure("time", "no answer within 1 s"), unscored=2)
        watch.update([step])
        watch.check()
    failures.add("g", Failure("KeyError", "no such column"))
    assert watch.update([BAD, group(math.nan, math.nan)]) == ["g: 1 completion unscored (KeyError): no such column"]
    with pytest.raises(GraderFailed) as error:
        watch.check()
    assert str(error.value).startswith("4 of 5 completions could not be scored, and in each of the last 3 steps")
    assert "rewards.max_unscored = 0.5" in str(error.value)
    assert "\n  f: 2 completions unscored (time): no answer within 1 s\n  g: 1 completion" in str(error.value)


def test_a_resumed_watch_stops_where_the_first_would(tmp_path):
    first, second = GraderFailureLimit(0.5, Tally()), GraderFailureLimit(0.5, Tally())
    for _ in range(BAD_STEPS - 1):
        first.update([BAD])
    stored = {"learner": {"policy": {}}, "unscored": first.state(), "sampler": {"versions": []}}
    others: Any = Mock(older_weights="none")
    state: Any = SimpleNamespace(parts=json.loads(json.dumps(stored)), tensors={}, pending=Pending())
    StatefulParts(others, others, second).restore(tmp_path, state)
    second.update([BAD])
    with pytest.raises(GraderFailed):
        second.check()


def test_a_kind_is_told_once_and_again_when_it_is_ten_times_as_much():
    failures = Tally()
    watch = GraderFailureLimit(1.0, failures)
    told = []
    for _ in range(30):
        failures.add("f", Failure("time", "late"), unscored=1)
        told += watch.update([BAD])
        watch.check()  # nothing is too much
    assert told == ["f: 1 completion unscored (time): late", "f: 10 completions unscored (time): late"]


def test_a_share_is_a_share():
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="rewards.max_unscored is"):
            RewardMix(max_unscored=share)
    assert RewardMix(max_unscored=0.2).is_verdict
    assert not RewardMix(task=2.0).is_verdict
