"""Reward functions given as Python values: by name where a module or file holds them, else in this process."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import proximo
from proximo.api.evaluating import EvalConfig
from proximo.api.rewards import to_reward, with_rewards
from proximo.config import toml
from proximo.losses import KeepCorrect
from proximo.models import tiny_tokenizer
from proximo.rewards import ExactMatch, GivenFunction, PythonFunction
from proximo.rewards.grading import grading
from proximo.rewards.notebook_function import fingerprint
from proximo.rl import build
from proximo.rl.config import RunConfig
from proximo.rl.mixed_reward import with_reward_models
from proximo.rl.reward_config import RewardMix, WeightedRule
from proximo.rl.rollouts import is_dropped
from proximo.tasks import File
from proximo.types import Completion, Group, Problem, Rollout
from tests.api.settings import small
from tests.rewards.task_rewards import sums, words

PROBLEM = Problem("p", "1+1=", "2", {"kind": "sum", "nested": {"tags": ["a"]}})


def said(*texts: str) -> list[Completion]:
    return [Completion((), (), text, "stop") for text in texts]


def scores(function, *texts: str) -> list[float | None]:
    return GivenFunction.of(function)([PROBLEM] * len(texts), said(*texts))


# What a function is called with, and what it may return


def test_a_function_is_called_as_trl_calls_it():
    def trl(prompts, completions, completion_ids, answer, kind, **columns):
        assert columns == {"nested": [{"tags": ["a"]}] * 2}
        assert completion_ids == [[], []]
        rows = zip(prompts, completions, answer, kind, strict=True)
        return [len(prompt) + len(text) + float(text == right) if each else None for prompt, text, right, each in rows]

    assert scores(trl, "2", "17") == [4 + 1 + 1.0, 4 + 2 + 0.0]


def test_a_function_may_name_the_columns_that_it_wants(tmp_path: Path):
    def right(completions, answer):
        return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

    assert scores(right, "2", "3") == [1, 0]
    file = tmp_path / "plain.py"
    file.write_text(
        "def right(completions, answer):\n    return [float(a == b) for a, b in zip(completions, answer)]\n"
    )
    assert PythonFunction(f"{file}:right")([PROBLEM] * 2, said("2", "3")) == [1, 0]


def test_what_is_no_score_is_unscored_and_told(grading):
    def odd(completions, **columns):
        return [None, math.inf, 1e9, "x", 0.5][: len(completions)]

    found = scores(odd, *"abcde")
    assert found[0] is None
    assert [math.isnan(each) for each in found[1:4] if each is not None] == [True] * 3
    assert found[4] == 0.5
    assert [(each.grader, each.kind) for each in grading.failures.take()] == [
        ("odd", "not a number"),
        ("odd", "too large"),
    ]


def test_an_error_costs_the_guilty_completion_alone(grading):
    def fragile(completions, **columns):
        return [1.0 / int(text) for text in completions]

    found = scores(fragile, "4", "0", "2")
    assert (found[0], found[2]) == (0.25, 0.5)
    assert math.isnan(found[1] or 0)
    (told,) = grading.failures.take()
    assert "division by zero" in told.example
    assert told.unscored == 1


def test_functions_that_compare_siblings_lose_the_group(grading):
    def fragile(completions, **columns):
        return [1.0 / int(text) for text in completions]

    found = GivenFunction.of(fragile, siblings=True)([PROBLEM] * 2, said("4", "0"))
    assert all(math.isnan(each) for each in found if each is not None)
    assert [each.unscored for each in grading.failures.take()] == [2]


def test_arguments_are_copies():
    def careless(completions, nested, **columns):
        nested[0]["tags"].clear()
        return [0.0] * len(completions)

    scores(careless, "a")
    assert PROBLEM.data["nested"] == {"tags": ["a"]}


def test_leaving_the_program_is_not_caught():
    def leave(completions, **columns):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        scores(leave, "a")


# Where a function goes in a config


def test_a_function_of_a_module_is_named_and_others_are_held():
    assert to_reward(sums) == PythonFunction("tests.rewards.task_rewards:sums")
    assert to_reward(ExactMatch()) == ExactMatch()
    held = to_reward(partial(sums, kind=["sum"]))
    assert isinstance(held, GivenFunction)
    assert held.name == "sums"


def test_a_function_of_the_script_is_not_imported_again(monkeypatch):
    """Another process would run the script, which trains."""
    monkeypatch.setattr(sums, "__module__", "__main__")
    assert isinstance(to_reward(sums), GivenFunction)


def test_functions_take_the_place_of_the_verdict():
    config = with_rewards(small(), [sums, (words, -0.5)])
    assert config.rewards.task == 0
    assert [rule.weight for rule in config.rewards.rules] == [1.0, -0.5]
    assert config.rewards.names == ["sums", "words"]


def test_one_function_for_a_file_is_its_verdict(tmp_path: Path):
    """So that dynamic sampling and the outcome in the metrics go by it."""
    config = small(algorithm=proximo.DAPO, task=File(rows(tmp_path)))
    task = with_rewards(config, [sums]).task
    assert isinstance(task, File)
    assert task.reward == PythonFunction("tests.rewards.task_rewards:sums")
    several = with_rewards(small(task=File(rows(tmp_path))), [sums, words])
    assert several.task == File(rows(tmp_path), reward=None)
    assert len(several.rewards.rules) == 2


def test_dapo_with_several_functions_keeps_groups_whose_total_differs(tmp_path: Path):
    """Halves and wholes cancel out in one group, and in another they do not."""

    def first(completions, **columns):
        return [float(len(text) % 2) for text in completions]

    def second(completions, **columns):
        return [-2.0 * (len(text) % 2) for text in completions]

    config = small(algorithm=proximo.DAPO, task=File(rows(tmp_path)), steps=1)
    problem = config.task.problem(0, "train", 0)
    completions = said("a", "bc", "def")
    with grading():
        for weight, kept in ((0.5, False), (0.25, True)):
            mixed = with_rewards(config, [first, (second, weight)])
            task = with_reward_models(mixed.task, mixed.rewards, tiny_tokenizer())
            grades = task.grade([problem] * 3, completions)
            assert [grade.outcome for grade in grades] == [1 - 2 * weight, 0.0, 1 - 2 * weight]
            group = Group(problem, (1,), tuple(map(Rollout, completions, grades)))
            assert is_dropped(mixed.algorithm.keep, group) is not kept


def test_dapo_goes_by_no_verdict_that_is_not_rewarded(tmp_path: Path):
    line = "reward the verdict too, `rewards.task=1.0`, keep all groups, `algorithm.keep.type=KeepAll`"
    with pytest.raises(ValueError, match=line):
        with_rewards(small(algorithm=proximo.DAPO), [sums, words])
    correct = replace(proximo.GRPO, keep=KeepCorrect())
    with pytest.raises(ValueError, match="KeepCorrect, which goes by the task's verdict"):  # a sum is no verdict
        with_rewards(small(algorithm=correct, task=File(rows(tmp_path))), [sums, words])


REFUSED = [
    ([], "rewards is empty"),
    ([3], "rewards has 3, which is no function"),
    ([(sums, 0.0)], "weight is 0.0"),
]


@pytest.mark.parametrize(("rewards", "message"), REFUSED)
def test_what_is_no_reward_is_refused(rewards, message: str):
    with pytest.raises(ValueError, match=message):
        with_rewards(small(), rewards)


def test_two_answers_to_one_question_are_refused():
    config = small(rewards=RewardMix(rules=(WeightedRule(ExactMatch()),)))
    with pytest.raises(ValueError, match="config.rewards says what is rewarded too"):
        with_rewards(config, [sums])


def test_a_config_that_is_read_again_gets_its_functions_back(tmp_path: Path):
    def first(completions):
        return [1.0] * len(completions)

    def second(completions):
        return [2.0] * len(completions)

    for config in (small(), small(task=File(rows(tmp_path))), EvalConfig()):
        given = [first, second]
        made = with_rewards(config, given)
        read = toml.loads(toml.dumps(made), type(made))
        assert read == made
        with pytest.raises(ValueError, match="no file holds it: give it again"):
            read.rewards.rules[0].reward([PROBLEM], said("x"))
        again = with_rewards(read, given)
        assert again == made
        assert [rule.reward([PROBLEM], said("x")) for rule in again.rewards.rules] == [[1.0], [2.0]]
        with pytest.raises(ValueError, match="the config's own are first, second"):
            with_rewards(read, [second, first])


# Fingerprints


def test_a_fingerprint_is_of_what_a_function_does():
    def make(number):
        return lambda completions: [number] * len(completions)

    text = "def f(completions, **columns):\n    return [float(len(each)) for each in completions]\n"
    spaces: list[dict] = [{}, {}, {}]
    for space, source in zip(spaces, (text, "\n\n" + text, text.replace("len", "int")), strict=True):
        exec(source, space)
    one, moved, other = (fingerprint(space["f"]) for space in spaces)
    assert one == moved
    assert one != other
    assert fingerprint(make(1.0)) == fingerprint(make(1.0)) != fingerprint(make(2.0))
    assert fingerprint(partial(sums, kind=1)) != fingerprint(partial(sums, kind=2))
    assert fingerprint(Judge().method) != fingerprint(Judge())
    assert fingerprint(Judge()) == fingerprint(Judge())
    assert len(fingerprint(len)) == 16


class Judge:
    def __call__(self, completions, **columns):
        return [1.0] * len(completions)

    def method(self, completions, **columns):
        return [2.0] * len(completions)


# Whole runs


def rows(folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n), "kind": "sum"}) + "\n" for n in range(40))
    )
    return str(path)


@pytest.mark.slow("trains and resumes a run")
def test_a_run_with_a_lambda_needs_it_again_to_resume(tmp_path: Path, monkeypatch):
    def longer(completions, **columns):
        return [float(len(text)) for text in completions]

    def other(completions, **columns):
        return [-float(len(text)) for text in completions]

    other.__name__ = "longer"
    config = small(checkpoints=proximo.CheckpointOptions(every=1))
    whole, folder = tmp_path / "whole", tmp_path / "run"
    proximo.train(config, whole, rewards=[longer], quiet=True)
    rewards = proximo.open_run(whole).rollouts(1).select(["text", "reward"]).to_pylist()
    assert all(row["reward"] == len(row["text"]) for row in rewards)

    def stop(step, _):
        if step == 2:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        proximo.train(config, folder, rewards=[longer], on_step=stop, quiet=True)
    read = proximo.open_run(folder).config
    assert isinstance(read, RunConfig)
    with monkeypatch.context() as patch:
        patch.setattr(build, "load_model", None)  # refused before
        with pytest.raises(ValueError, match="'longer' was given in Python, and no file holds it"):
            proximo.train(read, folder, quiet=True)
        with pytest.raises(ValueError, match=r"rewards.rules\[0\].reward.code was"):
            proximo.train(config, folder, rewards=[other], quiet=True)
    proximo.train(read, folder, rewards=[longer], quiet=True)
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (
        proximo.evaluate(folder, rewards=[longer], problems=4, quiet=True).reward
        == proximo.evaluate(whole, rewards=[longer], problems=4, quiet=True).reward
    )


@pytest.mark.slow("trains and resumes a run")
def test_a_run_with_a_function_of_a_module_resumes_without_it(tmp_path: Path):
    """DAPO with one function as a file's verdict."""
    config = small(algorithm=proximo.DAPO, task=File(rows(tmp_path), held_out=0.2), steps=1)
    result = proximo.train(config, tmp_path / "run", rewards=[sums], quiet=True)
    read = proximo.open_run(tmp_path / "run").config
    assert isinstance(read, RunConfig)
    assert proximo.train(read, tmp_path / "run", quiet=True).after == result.after


def test_a_comparison_has_no_way_to_call_it():
    config = with_rewards(small(), [lambda completions: [0.0] * len(completions)])
    with pytest.raises(ValueError, match="each run of a comparison has a process of its own"):
        proximo.compare({"a": config, "b": config})
