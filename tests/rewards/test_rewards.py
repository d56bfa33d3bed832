"""Rewards on replies written out by hand: right, wrong and malformed."""

import math
import os
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from proximo.rewards import ExactMatch, FormatReward, MathVerify, PythonFunction, Reward, equality
from proximo.rewards.mathematics import marked
from proximo.types import Completion, Problem


def said(text: str) -> Completion:
    return Completion(tokens=(1, 2), logprobs=(-0.1, -0.2), text=text, finish="stop")


def asked(answer: Any, **data: Any) -> Problem:
    return Problem(id="p", prompt="question", answer=answer, data=data)


def score(reward: Reward, answer: Any, text: str) -> float:
    [value] = reward([asked(answer)], [said(text)])
    assert value is not None
    return value


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("85", "85", 1.0),
        (" 85\n", "\t85 ", 1.0),
        (85, "85", 1.0),
        ("85", "85.", 0.0),
        ("85", "The answer is 85", 0.0),
        ("Yes", "yes", 0.0),
        ("85", "", 0.0),
        ("", "", 1.0),
    ],
)
def test_exact_match(answer: Any, text: str, expected: float):
    assert score(ExactMatch(), answer, text) == expected


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("72", "so 48 + 24 = 72.", 1.0),
        ("She sold 48/2 = 24, so 48+24 = 72.\n#### 72", "72", 1.0),
        ("1000", "that is $1,000", 1.0),
        ("1000", "1000.00", 1.0),
        ("1e5", "100,000", 1.0),
        ("100000", "about 1.0e5.", 1.0),
        ("5", "1e5", 0.0),
        ("0.02", "2E-2", 1.0),
        ("3", "1e3x", 1.0),
        ("-$5", "-5", 1.0),
        ("-5", "a loss of -€5", 1.0),
        ("$5", "-$5", 0.0),
        ("5", "10-$5", 1.0),
        ("50", "50%", 1.0),
        (0.5, "0.50", 1.0),
        ("-3", "x = -3", 1.0),
        ("3", "5-3", 1.0),
        ("3", "it is (1)-3", 1.0),
        ("2345", "1,2345", 1.0),
        ("72", "72 or 73", 0.0),
        ("3", "-3", 0.0),
        ("5", "0.5", 0.0),
        ("1234", "1,2,3,4", 0.0),
        ("72", "seventy-two", 0.0),
        ("72", "", 0.0),
        ("12", "١٢", 0.0),
    ],
)
def test_last_number(answer: Any, text: str, expected: float):
    assert score(ExactMatch(last_number=True), answer, text) == expected


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        ("12%", ["it is 12%", r"\boxed{0.12}", "12"]),
        ("-3/4", ["so -3/4.", r"\boxed{-\frac{6}{8}}", "-0.75"]),
        ("1e5", ["100,000", r"\boxed{10^5}", "1.0E5"]),
        ("$1,000", ["1000", "a total of $1000.00"]),
    ],
)
def test_numbers_as_people_write_them(answer: str, texts: list[str]):
    assert equality.equal([marked(answer)] * len(texts), texts) == [1.0] * len(texts)
    assert equality.equal([marked(answer)] * 2, ["4", "5"]) == [0.0, 0.0]


def test_no_answer_is_unscored_and_not_wrong():
    assert math.isnan(score(ExactMatch(), None, "85"))
    assert math.isnan(score(ExactMatch(last_number=True), "no number", "85"))
    assert math.isnan(score(MathVerify(), None, "85"))


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("<think>.*</think>", "<think>so</think>", 1.0),
        ("<think>.*</think>", "<think>so</think> and", 0.0),
        ("<think>.*</think>", "<think>so\nand</think>", 0.0),
        ("(?s)<think>.*</think>", "<think>so\nand</think>", 1.0),
        (r"\d+", "", 0.0),
    ],
)
def test_format(pattern: str, text: str, expected: float):
    assert score(FormatReward(pattern), None, text) == expected


def test_a_bad_pattern_fails_when_made():
    with pytest.raises(ValueError, match=re.escape("reward.pattern is '(': not a regular expression")):
        FormatReward("(")


@pytest.mark.slow("starts math-verify")
@pytest.mark.usefixtures("kept_grading")
@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("1/2", "so it is $\\frac{1}{2}$", 1.0),
        ("\\frac{1}{2}", "\\boxed{0.5}", 1.0),
        ("The sum is $\\boxed{\\frac12}$.", "1/2", 1.0),
        ("48/2 = <<48/2=24>>24\n#### 1,000", "\\boxed{1000}", 1.0),
        ("(x+1)^2", "$x^2+2x+1$", 1.0),
        ("3x+5", "$5+3x$", 1.0),
        (7, "7", 1.0),
        ("3x+5", "5", 0.0),
        ("2\\sqrt{3}", "3", 0.0),
        ("1/2", "$\\frac{1}{3}$", 0.0),
        ("1/2", "banana", 0.0),
        ("1/2", "", 0.0),
        ("1/2", "$\\frac{1}{$", 0.0),
        ("", "5", math.nan),
        ("1", "9" * 5000, math.nan),
    ],
)
def test_math_verify(answer: Any, text: str, expected: float):
    assert score(MathVerify(), answer, text) == pytest.approx(expected, nan_ok=True)


@pytest.mark.usefixtures("kept_grading")
@pytest.mark.parametrize("answer", ["1/2", "3x+5", "so $7$", "text\n#### 12", 7])
@pytest.mark.parametrize("reward", [ExactMatch(), MathVerify()])
def test_a_reference_scores_one(reward: ExactMatch | MathVerify, answer: Any):
    reference = reward.reference(asked(answer))
    assert reference is not None
    assert score(reward, answer, reference) == 1.0


# Functions; how they fail is in test_workers.py.


FUNCTIONS = """
def length_reward(prompts, completions, answer, level, **_):
    assert prompts == ["question"] * len(completions)
    return [len(text) * each if each else None for text, each in zip(completions, level, strict=True)]

def conversation_reward(prompts, completions, completion_ids, **_):
    assert prompts == [[{"role": "user", "content": "hi"}]]
    assert completions == [[{"role": "assistant", "content": "hello"}]]
    return [float(len(ids)) for ids in completion_ids]

def type_reward(completions, made, share, odd, **_):
    assert share == [None] or share == [float("inf")]
    assert odd == ["half a pair: \\udc80"]
    return [float(made[0] == "2024-05-06")]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return path


def test_a_function_sees_columns_and_none_is_its_own_word(file: Path, grading):
    problems = [asked("a", level=2), asked("b", level=0)]
    first, second = PythonFunction(f"{file}:length_reward")(problems, [said("hello"), said("bye")])
    assert (first, second) == (10.0, None)
    assert grading.failures.take() == []


def test_a_conversation_is_answered_with_messages(file: Path):
    problem = Problem(id="p", prompt=({"role": "user", "content": "hi"},), answer=None)
    assert PythonFunction(f"{file}:conversation_reward")([problem], [said("hello")]) == [2.0]


def test_what_json_has_no_word_for_arrives_as_text(file: Path):
    odd = "half a pair: \udc80"
    for share in (None, math.inf):
        problem = asked("a", made=date(2024, 5, 6), share=share, odd=odd)
        assert PythonFunction(f"{file}:type_reward")([problem], [said(odd)]) == [1.0]


def test_a_column_that_cannot_be_sent_is_the_users_error(file: Path):
    with pytest.raises(ValueError, match="a column of the data cannot be given to a reward function"):
        PythonFunction(f"{file}:type_reward")([asked("a", made={(1, 2): 3})], [said("x")])


def test_a_function_of_a_module():
    assert PythonFunction("tests.rewards.hostile_rewards:drops")([asked("a")], [said("x")]) == [1.0]


def test_a_file_may_be_below_the_home_folder_and_import_what_is_next_to_it(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "next_to_it.py").write_text("SCORE = 3.0")
    (tmp_path / "mine.py").write_text("import next_to_it\ndef f(**_): return [next_to_it.SCORE]")
    assert PythonFunction("~/mine.py:f")([asked("a")], [said("x")]) == [3.0]


def test_a_path_that_leads_nowhere_is_the_users_error(tmp_path: Path):
    for path in ("json", None, 3):
        line = f"reward.path is {path!r}: give a function, package.module:function or file.py:function"
        with pytest.raises(ValueError, match=line):
            PythonFunction(path)
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name")
    empty = tmp_path / "empty.py"
    empty.write_text("from json import loads\n")
    os.mkfifo(tmp_path / "pipe.py")
    for path, why in [
        ("no_such_module:f", "no_such_module cannot be imported, ModuleNotFoundError"),
        (f"{tmp_path}/missing.py:f", "missing.py cannot be imported, FileNotFoundError"),
        (f"{tmp_path}/pipe.py:f", "pipe.py is not a file"),
        (f"{broken}:f", "broken.py cannot be imported, ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("json:dumpz", "json has no function dumpz; it has dump, dumps, "),
        (f"{empty}:f", "empty.py has no function f; it has none$"),
    ]:
        with pytest.raises(ValueError, match=why):
            PythonFunction(path)([asked("a")], [said("a")])


def test_limits_that_make_no_sense_are_the_users_error():
    for make in (lambda: PythonFunction("a:b", seconds=0.0), lambda: MathVerify(seconds=math.inf)):
        with pytest.raises(ValueError, match=r"reward.seconds is .*: give a positive number"):
            make()
    with pytest.raises(ValueError, match="reward.seconds is -1"):
        FormatReward("a", seconds=-1.0)
    with pytest.raises(ValueError, match="reward.memory_mb is 1: Python itself needs 64"):
        PythonFunction("a:b", memory_mb=1)
