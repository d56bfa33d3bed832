"""Reward functions as TRL's users write them: given as functions, and silent where it is not their task."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from proximo.models import tiny_tokenizer
from proximo.rewards import ExactMatch, FormatReward, GraderFailed, PythonFunction
from proximo.rl.grading import graded
from proximo.rl.mixed_reward import with_reward_models
from proximo.rl.preflight.calibration import calibrate
from proximo.rl.reward_config import RewardMix, WeightedRule
from proximo.tasks import File
from proximo.types import Completion, Grade, Problem
from tests.rewards.task_rewards import broken, neither, sums, words


class Scorer:
    def __call__(self, prompts, completions, **columns):
        return [1.0] * len(completions)

    def method(self, prompts, completions, **columns):
        return [1.0] * len(completions)


def said(text: str) -> Completion:
    return Completion((), (), text, "stop")


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "x.jsonl"
    kinds = ["sum", "word", "neither"] * 4
    rows = [{"prompt": f"{kind} {n}", "kind": kind, "answer": "2"} for n, kind in enumerate(kinds)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


SUM, WORD, NEITHER = (Problem(kind, kind, "2", {"kind": kind}) for kind in ("sum", "word", "neither"))
RULES = (WeightedRule(PythonFunction(sums)), WeightedRule(PythonFunction(words), weight=0.5))


# None


def test_functions_that_pass_are_left_out_of_the_sum(path: str, grading):
    task = with_reward_models(File(path, reward=None), RewardMix(task=0.0, rules=RULES), tiny_tokenizer())
    grades = task.grade([SUM, WORD, NEITHER], [said("2"), said("four"), said("x")])
    assert grades[0] == Grade(1.0, {"sums": 1.0})
    assert grades[1] == Grade(2.0, {"words": 0.5 * 4})
    assert (grades[2].parts, grades[2].applies, math.isnan(grades[2].reward)) == ({}, False, True)
    assert [grade.verdict for grade in grades[:2]] == [1.0, 2.0]
    assert grading.failures.take() == []


def test_the_tasks_own_function_may_pass_too(path: str, grading):
    mix = RewardMix(rules=RULES[1:])
    task = with_reward_models(File(path, reward=PythonFunction(sums)), mix, tiny_tokenizer())
    grades = task.grade([SUM, WORD], [said("2"), said("four")])
    # A verdict where it has one, else the reward, as of prompts without a verdict.
    assert grades == [Grade(1.0, {"task": 1.0}), Grade(2.0, {"words": 2.0})]
    # A verdict that is only watched: what it passes on is trained by the rules all the same.
    watched = with_reward_models(
        File(path, reward=PythonFunction(sums)), RewardMix(task=0.0, rules=RULES[1:]), tiny_tokenizer()
    )
    [grade] = watched.grade([WORD], [said("four")])
    assert (grade, grade.verdict) == (Grade(2.0, {"words": 2.0}), 2.0)
    # A failure is not a pass: the completion is unscored.
    failing = with_reward_models(
        File(path), RewardMix(rules=(WeightedRule(PythonFunction(broken)), *RULES)), tiny_tokenizer()
    )
    [grade] = failing.grade([SUM], [said("2")])
    assert (grade.applies, math.isnan(grade.reward)) == (True, True)
    assert [failures.kind for failures in grading.failures.take()] == ["RuntimeError"]


def test_a_completion_that_is_nobodys_task_is_unscored_and_told(path: str, grading):
    task = File(path, reward=PythonFunction(sums))
    rollouts = graded(task, [SUM, WORD], iter([(0, (said("2"),)), (1, (said("2"),))])).rollouts
    assert rollouts[0][0].grade == Grade(1.0)
    assert math.isnan(rollouts[1][0].grade.reward)
    assert [str(each) for each in grading.failures.take()] == [
        "rewards: 1 completion unscored (none): every reward function returned None for word"
    ]


def test_calibration_accepts_functions_for_different_tasks(path: str):
    mix = with_reward_models(File(path, reward=None, held_out=0.0), RewardMix(task=0.0, rules=RULES), tiny_tokenizer())
    assert calibrate(mix, seed=0) == []
    nobody = File(path, reward=PythonFunction(neither), held_out=0.0)
    assert calibrate(nobody, seed=0) == ["calibration: every reward function returned None for the first 8 problems"]
    with pytest.raises(GraderFailed, match="no text could be scored, of 3 problems"):
        calibrate(File(path, reward=PythonFunction(broken), held_out=0.0), seed=0)


# Rewards of a user's own class


@dataclass(frozen=True)
class Fragile:
    """A reward that does something else than it should with some completions."""

    needs_answer = False

    def __call__(self, problems, completions):
        if len(completions) > 1 and any(each.text == "few" for each in completions):
            return [1.0]
        odd = {"text": "1", "huge": 1e9, "unscored": math.nan, "pass": None}
        return [odd[each.text] if each.text in odd else 1 / len(each.text) for each in completions]

    def reference(self, problem):
        return None


@pytest.mark.parametrize("as_rule", [True, False])
def test_a_reward_class_that_raises_leaves_its_completions_unscored(path: str, grading, as_rule: bool):
    mix = RewardMix(task=0.0, rules=(WeightedRule(Fragile()),)) if as_rule else RewardMix()
    task = with_reward_models(File(path, reward=None if as_rule else Fragile()), mix, tiny_tokenizer())
    grades = task.grade([SUM] * 3, [said("four"), said(""), said("unscored")])
    assert grades[0].reward == 0.25
    assert [math.isnan(grade.reward) for grade in grades[1:]] == [True, True]
    [failures] = grading.failures.take()
    assert str(failures).startswith(
        "Fragile: 1 completion unscored (ZeroDivisionError): ZeroDivisionError: division by zero (test_function_reward"
    )
    grades = task.grade([SUM] * 3, [said("text"), said("huge"), said("pass")])
    assert all(math.isnan(grade.reward) for grade in grades)
    assert [each.kind for each in grading.failures.take()] == ["not a number", "too large"]
    assert [grade.reward for grade in task.grade([SUM] * 2, [said("few"), said("f")])] == [1 / 3, 1.0]
    [failures] = grading.failures.take()
    assert (failures.kind, failures.unscored) == ("junk", 0)


def test_a_reward_that_cannot_be_loaded_still_ends_the_run(path: str, grading):
    missing = PythonFunction("no/such/file.py:f")
    task = with_reward_models(File(path), RewardMix(rules=(WeightedRule(missing),)), tiny_tokenizer())
    with pytest.raises(GraderFailed, match="reward.path is 'no/such/file.py:f'"):
        task.grade([SUM], [said("2")])


# Functions


def test_a_function_is_known_by_its_place():
    assert PythonFunction(sums) == PythonFunction("tests.rewards.task_rewards:sums")
    assert PythonFunction(sums)([SUM], [said("2")]) == [1.0]


def test_a_function_of_a_module_that_cannot_be_imported_by_name_is_known_by_its_file(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text("def score(completions, **columns):\n    return [7.0] * len(completions)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import mine  # pyright: ignore[reportMissingImports]

    monkeypatch.undo()
    reward = PythonFunction(mine.score)
    assert reward.path == f"{file}:score"
    assert reward([SUM], [said("2")]) == [7.0]


@pytest.mark.parametrize("function", [lambda completions, **_: [1.0], Scorer(), Scorer().method, len])
def test_a_function_that_no_other_process_can_find_is_refused(function):
    with pytest.raises(ValueError, match="reward.path is .*into a file and give 'path/"):
        PythonFunction(function)


def test_other_rewards_still_know_no_none():
    assert ExactMatch()([SUM], [said("2")]) == [1.0]
    assert FormatReward("2")([SUM], [said("2")]) == [1.0]


def test_whole_solutions_as_answers_are_remarked(tmp_path: Path):
    file = tmp_path / "gsm8k.jsonl"
    rows = [{"prompt": f"q{n}", "answer": f"{n} and 1 make {n + 1}.\n#### {n + 1}"} for n in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [remark] = calibrate(File(str(file), held_out=0.0), seed=0)
    assert "requires the whole solution text" in remark
    assert "task.reward.last_number, or put MathVerify in task.reward" in remark
    assert calibrate(File(str(file), reward=ExactMatch(last_number=True), held_out=0.0), seed=0) == []
