"""Rewards on replies written out by hand: right, wrong and malformed."""

import math
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from math_verify.errors import TimeoutException

from proximo.rewards import ExactMatch, FormatReward, MathVerify, PythonFunction, Reward, RewardFailed
from proximo.types import Completion, Problem


def said(text: str) -> Completion:
    return Completion(tokens=(1, 2), logprobs=(-0.1, -0.2), text=text, finish="stop")


def asked(answer: Any, **data: Any) -> Problem:
    return Problem(id="p", prompt="question", answer=answer, data=data)


def score(reward: Reward, answer: Any, text: str) -> float:
    [value] = reward([asked(answer)], [said(text)])
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


def test_math_verify_works_off_the_main_thread():
    scores: list[float] = []
    thread = threading.Thread(
        target=lambda: scores.extend(MathVerify()([asked("1/2")] * 2, [said("$0.5$"), said("$0.6$")]))
    )
    thread.start()
    thread.join()
    assert scores == [1.0, 0.0]


def test_math_verify_out_of_time_is_unscored_and_does_not_end_the_run(monkeypatch):
    def endless(*_, **options):
        assert options["parsing_timeout"] == 5
        raise TimeoutException("Timeout during parsing")

    monkeypatch.setattr("math_verify.parse", endless)
    assert math.isnan(score(MathVerify(), "1/2", "$9^{9^{9}}$"))


@pytest.mark.parametrize("answer", ["1/2", "3x+5", "so $7$", "text\n#### 12", 7])
@pytest.mark.parametrize("reward", [ExactMatch(), MathVerify()])
def test_a_reference_scores_one(reward: ExactMatch | MathVerify, answer: Any):
    reference = reward.reference(asked(answer))
    assert reference is not None
    assert score(reward, answer, reference) == 1.0


# Functions.


def length_reward(prompts: list[str], completions: list[str], answer: list[Any], level: list[Any], **_: Any):
    assert prompts == ["question", "question"]
    return [len(text) * level if level else None for text, level in zip(completions, level, strict=True)]


def conversation_reward(completions: Any, completion_ids: list[list[int]], **_: Any):
    assert completions == [[{"role": "assistant", "content": "hello"}]]
    return [float(len(ids)) for ids in completion_ids]


def short_reward(completions: Any, **_: Any):
    return [1.0]


def broken_reward(completions: Any, **_: Any):
    raise RuntimeError("no network")


def wordy_reward(completions: Any, **_: Any):
    return ["good"] * len(completions)


def function(name: str) -> PythonFunction:
    return PythonFunction(f"{__name__}:{name}")


def test_a_function_sees_columns_and_none_is_unscored():
    problems = [asked("a", level=2), asked("b", level=0)]
    first, second = function("length_reward")(problems, [said("hello"), said("bye")])
    assert first == 10.0
    assert math.isnan(second)


def test_a_conversation_is_answered_with_messages():
    problem = Problem(id="p", prompt=({"role": "user", "content": "hi"},), answer=None)
    assert function("conversation_reward")([problem], [said("hello")]) == [2.0]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("short_reward", "it returned 1 scores for 2 completions"),
        ("broken_reward", "RuntimeError: no network"),
        ("wordy_reward", "could not convert string to float: 'good'"),
    ],
)
def test_a_broken_function_leaves_its_batch_unscored_and_says_so(name: str, why: str):
    with pytest.warns(RewardFailed, match=f"{name}: .*{why}.*2 completions are unscored"):
        scores = function(name)([asked("a")] * 2, [said("x")] * 2)
    assert len(scores) == 2
    assert all(math.isnan(value) for value in scores)


def test_a_function_from_a_file(tmp_path: Path):
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "def f(completions, answer, **_):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    reward = PythonFunction(f"{path}:f")
    assert reward([asked("a"), asked("b")], [said("a"), said("a")]) == [1.0, 0.0]


def test_a_path_that_leads_nowhere_is_the_users_error(tmp_path: Path):
    with pytest.raises(ValueError, match="give package.module:function or file.py:function"):
        PythonFunction("json")
    for path, why in [
        ("no_such_module:f", "no_such_module cannot be imported"),
        (f"{tmp_path}/missing.py:f", "missing.py cannot be imported"),
        ("json:dumpz", "json has no function dumpz"),
    ]:
        with pytest.raises(ValueError, match=why):
            PythonFunction(path)([asked("a")], [said("a")])
