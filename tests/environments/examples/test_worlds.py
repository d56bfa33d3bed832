"""The environments and tools that come with the package, played by hand."""

import pytest

from proximo import Done, Observation
from proximo.environments.examples import NumberGuessing, WordGuessing, calculate, run_python
from proximo.processes.sandbox import NoSandbox
from proximo.tasks import Guessing


def test_a_number_is_told_from_below_and_above():
    game = NumberGuessing()
    game.reset({"answer": "7"})
    assert [game.step("5"), game.step("it is 8"), game.step("7")] == [
        Observation("higher"),
        Observation("lower"),
        Done(1.0),
    ]
    other = NumberGuessing(tries=2)
    other.reset({"answer": "7"})
    assert [other.step("what?"), other.step("1")] == [Observation("Give a number."), Done(0.0)]
    silent = NumberGuessing(hints=False)
    silent.reset({"answer": "7"})
    assert [silent.step("5"), silent.step("8")] == [Observation("no"), Observation("no")]


def test_a_word_is_told_letter_by_letter():
    game = WordGuessing()
    game.reset({"answer": "abc"})
    assert [game.step("acb"), game.step("a"), game.step("abc")] == [Observation("+--"), Observation("+--"), Done(1.0)]
    silent = WordGuessing(hints=False)
    silent.reset({"answer": "abc"})
    assert silent.step("acb") == Observation("no")


def test_secrets_are_drawn_by_place_and_seed():
    task = Guessing("word", held_out=3)
    draws = [task.problem(index, "train", 1).answer for index in range(20)]
    assert draws == [task.problem(index, "train", 1).answer for index in range(20)]
    assert draws != [task.problem(index, "train", 2).answer for index in range(20)]
    assert all(len(each) == 3 and set(each) <= set("abc") for each in draws)
    held = [task.problem(index, "held_out", 1) for index in range(4)]
    assert held[3] == held[0] == Guessing("word", held_out=3).problem(0, "held_out", 2)
    assert {Guessing().problem(index, "train", 0).answer for index in range(200)} == set("123456789")
    with pytest.raises(ValueError, match="task.held_out is 0"):
        Guessing(held_out=0)


def test_a_calculator_calculates_and_nothing_else():
    assert (calculate("12*(3+4)"), calculate("7/2"), calculate("-3*3")) == ("84", "7/2", "-9")
    for text in ("1/0", "__import__('os')", "9**9", "1" * 500):
        with pytest.raises(ValueError, match="give whole numbers"):
            calculate(text)


def test_programs_run_in_the_sandbox():
    try:
        assert run_python("print(6 * 7)") == "42\n"
    except NoSandbox as error:
        pytest.skip(str(error))
    assert run_python("6 * 7") == "The program printed nothing."
    assert "ZeroDivisionError" in run_python("1 / 0")
    assert "PermissionError" in run_python("open('/etc/passwd', 'w')") or "Error" in run_python(
        "open('/etc/passwd', 'w')"
    )
    assert len(run_python("print('x' * 100_000)")) < 5000
