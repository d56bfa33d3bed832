"""Tasks: problems that repeat, splits that never meet, graders on replies written out by hand."""

import json
import math
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from proximo.config import toml
from proximo.processes.sandbox.isolation import landlock_version
from proximo.rewards import ExactMatch, FormatReward, MathVerify
from proximo.tasks import Arithmetic, Chain, Countdown, Echo, File, Gym, Sorting, Task, gym
from proximo.tasks.expressions import NotAnExpression, evaluate
from proximo.types import Completion, Problem
from tests.rows import write_rows

SUMS = Arithmetic(held_out=300)
MIXED = Arithmetic(operations=("+", "-", "*"), digits=1, terms=3, held_out=200)
ASKED = Arithmetic(operations=("+", "-"), digits=1, held_out=12, chat=True)
COUNTDOWN = Countdown(held_out=100)
ECHO = Echo()
SORTING = Sorting()
ENDLESS = [SUMS, MIXED, ASKED, COUNTDOWN, ECHO, SORTING, Chain(held_out=100)]


def said(text: str) -> Completion:
    return Completion(tokens=(1,), logprobs=(-0.1,), text=text, finish="stop")


def outcome(task: Task, problem: Problem, text: str) -> float:
    [grade] = task.grade([problem], [said(text)])
    return grade.outcome


# What every endless task promises.


@pytest.mark.parametrize("task", ENDLESS)
def test_a_problem_is_a_function_of_index_split_and_seed(task: Task):
    first = [task.problem(index, "train", 3) for index in range(20)]
    assert [task.problem(index, "train", 3) for index in reversed(range(20))] == first[::-1]
    assert [task.problem(index, "train", 4) for index in range(20)] != first
    assert isinstance(task, Task)
    assert task.size("train") is None


@pytest.mark.parametrize("task", ENDLESS)
def test_the_held_out_set_is_the_same_for_every_seed_without_repeats(task: Task):
    size = task.size("held_out")
    assert size is not None
    problems = [task.problem(index, "held_out", 0) for index in range(size)]
    assert len({problem.id for problem in problems}) == size
    assert problems == [task.problem(index, "held_out", 1) for index in range(size)]
    assert task.problem(size + 5, "held_out", 0) == problems[5]


@pytest.mark.parametrize("task", ENDLESS)
def test_training_never_meets_the_held_out_set(task: Task):
    size = task.size("held_out")
    assert size is not None

    held_out = {task.problem(index, "held_out", 0).id for index in range(size)}
    trained = {task.problem(index, "train", 0).id for index in range(1500)}
    assert not held_out & trained


def test_a_held_out_sum_is_not_trained_turned_around():
    held_out = {SUMS.problem(index, "held_out", 0).prompt for index in range(300)}
    trained = {str(SUMS.problem(index, "train", 0).prompt) for index in range(3000)}
    assert not held_out & {"+".join(reversed(prompt.removesuffix("=").split("+"))) + "=" for prompt in trained}


@pytest.mark.parametrize("task", ENDLESS)
def test_references_score_one(task: Task):
    for index in range(100):
        problem = task.problem(index, "train", 0)
        reference = task.reference(problem)
        assert reference is not None
        assert outcome(task, problem, reference) == 1.0
        assert outcome(task, problem, reference + "1") == 0.0


def test_the_first_problems_stay_what_they_are():
    # A change here changes every run's data: it needs a reason in the commit.
    assert [SUMS.problem(index, "train", 0).prompt for index in range(3)] == ["55+66=", "81+66=", "74+1="]
    assert SUMS.problem(0, "held_out", 0) == Problem(id="arithmetic-24+4", prompt="24+4=", answer="28")
    assert ECHO.problem(0, "train", 0) == Problem(id="echo-gfc", prompt="echo:gfc=", answer="gfc")
    assert COUNTDOWN.problem(0, "train", 0).prompt == "Numbers 14 11 17, target 33, expression:"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Arithmetic(digits=1),
        lambda: Echo(length=1, alphabet="ab", held_out=2),
        lambda: Sorting(length=2, alphabet="abc"),
        lambda: Countdown(numbers=2, largest=4, highest_target=10, held_out=100),
    ],
)
def test_a_space_too_small_for_the_held_out_set_is_refused(make: Any):
    with pytest.raises(ValueError, match=r"task.held_out is \d+, but only about \d+ problems"):
        make()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Arithmetic(operations=("+", "/")), "task.operations"),
        (lambda: Arithmetic(operations=()), "task.operations"),
        (lambda: Arithmetic(terms=1), "task.terms 1"),
        (lambda: Arithmetic(held_out=0), "task.held_out is 0"),
        (lambda: Echo(length=0), "task.length is 0"),
        (lambda: Echo(alphabet="a b"), "task.alphabet"),
        (lambda: Countdown(numbers=1), "task.numbers is 1"),
        (lambda: Countdown(largest=0), "task.largest is 0"),
        (lambda: Countdown(numbers=8, largest=100, highest_target=10), "task.highest_target is 10"),
        (lambda: Sorting(length=1), "task.length is 1"),
        (lambda: Sorting(length=4, alphabet="abc"), "task.length is 4"),
        (lambda: Sorting(alphabet="abcdea"), "task.alphabet"),
        (lambda: Gym("chain_sum", held_out=0), "task.held_out is 0"),
        (lambda: Gym("chain_sum", {"seed": 3}), "task.config has ['seed']"),
        (lambda: File("a.jsonl", held_out=1.5), "task.held_out is 1.5"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Any, why: str):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared as text)
        make()
    assert why in str(caught.value)


@pytest.mark.parametrize("task", [*ENDLESS, Gym("chain_sum", {"min_terms": 2}), File("a.jsonl", reward=MathVerify())])
def test_a_task_loads_back_from_toml(task: Any):
    assert toml.loads(toml.dumps(task), type(task)) == task


# Arithmetic.


def test_arithmetic_by_hand():
    problem = Problem(id="arithmetic-37+48", prompt="37+48=", answer="85")
    right = ["85", " 85 ", "85\n12+12=24", "\n85"]
    wrong = ["84", "850", "85.", "085", "8 5", "", "\n", "x\n85"]
    assert [outcome(SUMS, problem, text) for text in right] == [1.0] * 4
    assert [outcome(SUMS, problem, text) for text in wrong] == [0.0] * 8


def test_arithmetic_in_a_conversation_by_hand():
    question = ({"role": "user", "content": "What is 3+5? Answer with the number only."},)
    problem = next(p for p in (ASKED.problem(i, "train", 0) for i in range(1000)) if p.id == "arithmetic-3+5")
    assert problem == Problem(id="arithmetic-3+5", prompt=question, answer="8")
    right = ["8", "8.", "3 + 5 = 8", "The answer is 8.", "**8**", "3+5=7? No:\n\n8", "08"]
    wrong = ["7", "8 is 3+5", "88", "-8", "8.5", "eight", "", "The sum of 3 and 5 is"]
    assert [outcome(ASKED, problem, text) for text in right] == [1.0] * 7
    assert [outcome(ASKED, problem, text) for text in wrong] == [0.0] * 8
    below_zero = Problem(id="arithmetic-3-5", prompt=question, answer="-2")
    assert [outcome(ASKED, below_zero, text) for text in ("3-5 = -2", "-2.", "2", "3-2")] == [1.0, 1.0, 0.0, 0.0]


def test_a_conversation_asks_the_same_problems():
    plain = replace(ASKED, chat=False)
    for index in range(20):
        assert ASKED.problem(index, "train", 0).id == plain.problem(index, "train", 0).id
        assert ASKED.problem(index, "held_out", 0).id == plain.problem(index, "held_out", 0).id


def test_work_before_the_answer_is_not_graded():
    problem, worked = SUMS.problem(0, "train", 0), replace(SUMS, working=True)
    answer = str(problem.answer)
    assert [outcome(SUMS, problem, text) for text in (answer, f"so well {answer}")] == [1.0, 0.0]
    assert [outcome(worked, problem, text) for text in (answer, f"so 3 {answer}", f"{answer} 3", "so")] == [1, 1, 0, 0]
    assert worked.final_answer(said(f"so 3 {answer}")) == answer
    assert worked.problem(0, "train", 0) == problem


def test_arithmetic_follows_precedence():
    seen = set()
    for index in range(300):
        problem = MIXED.problem(index, "train", 0)
        assert isinstance(problem.prompt, str)
        value, numbers = evaluate(problem.prompt.removesuffix("="))
        assert str(value) == problem.answer
        assert all(0 <= number <= 9 for number in numbers)
        seen |= set(problem.prompt) - set("0123456789=")
    assert seen == {"+", "-", "*"}


def test_arithmetic_draws_numbers_of_every_length():
    lengths = {len(SUMS.problem(index, "train", 0).prompt) for index in range(300)}
    assert lengths == {4, 5, 6}


# Expressions and Countdown.


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("1+2*3", 7, [1, 2, 3]),
        ("(1+2)*3", 9, [1, 2, 3]),
        ("8/3", Fraction(8, 3), [8, 3]),
        (" -(4 - 6) ", 2, [4, 6]),
        ("6/(1-3/4)", 24, [6, 1, 3, 4]),
    ],
)
def test_expressions_by_hand(text: str, value: Fraction | int, numbers: list[int]):
    assert evaluate(text) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "1+",
        "(1",
        "1)",
        "1/0",
        "2**3",
        "7//2",
        "3(4)",
        "1 2",
        "007",
        "1.5",
        "1_0",
        "0x10",
        "1e3",
        "a+1",
        "__import__('os')",
        "1,2",
        "()",
        "1<2",
        "+1",
        "1\n+2",
        "١+1",
        "(" * 99 + "1",
        "-" * 150 + "+",
        "1+" * 5000 + "1",
        "9" * 5000,
        "\x00",
    ],
)
def test_what_is_not_an_expression_is_refused(text: str):
    with pytest.raises(NotAnExpression):
        evaluate(text)


@given(st.text(alphabet="0123456789+-*/() =ab\n", max_size=40))
def test_any_text_is_an_expression_or_refused(text: str):
    try:
        value, _ = evaluate(text)
    except NotAnExpression:
        return
    # Only digits and signs are left: Python's own arithmetic may be asked.
    assert value == pytest.approx(eval(text.strip()))


def test_countdown_by_hand():
    problem = Problem(
        id="countdown-3 7 10-31",
        prompt="Numbers 3 7 10, target 31, expression:",
        answer=31,
        data={"numbers": (3, 7, 10)},
    )
    right = ["3*7+10", " 10 + (7*3) ", "3*7+10=31", "3*7+10\nsure", "(10+3*7)"]
    wrong = ["3*7", "31", "3*7+10+0", "10*3+7/7", "7+7+7+10", "3*7+10 is it", "=31", "", "banana", "31.0", "3*7+10)"]
    assert [outcome(COUNTDOWN, problem, text) for text in right] == [1.0] * 5
    assert [outcome(COUNTDOWN, problem, text) for text in wrong] == [0.0] * 11


def test_countdown_counts_repeated_numbers():
    problem = Problem(id="c", prompt="", answer=14, data={"numbers": (7, 7, 2)})
    assert [outcome(COUNTDOWN, problem, text) for text in ("7+7", "7*2", "2*7*7/7")] == [1.0, 1.0, 0.0]


def test_countdown_is_never_solved_by_a_number_alone():
    for index in range(200):
        problem = COUNTDOWN.problem(index, "train", 0)
        assert problem.answer not in problem.data["numbers"]
        assert 1 <= problem.answer <= 100


# Echo.


def test_echo_by_hand():
    problem = Problem(id="echo-abc", prompt="echo:abc=", answer="abc")
    assert [outcome(ECHO, problem, text) for text in ("abc", " abc\n")] == [1.0, 1.0]
    assert [outcome(ECHO, problem, text) for text in ("ab", "abcd", "ABC", "", "abc abc")] == [0.0] * 5


# Gym.


@pytest.mark.slow("starts reasoning-gym")
@pytest.mark.usefixtures("kept_grading")
def test_gym_uses_reasoning_gyms_own_scorer():
    pytest.importorskip("reasoning_gym")
    task = Gym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, held_out=30)
    held_out = [task.problem(index, "held_out", 0) for index in range(30)]
    trained = [task.problem(index, "train", 0) for index in range(200)]
    assert len({problem.prompt for problem in held_out}) == 30
    assert not {problem.prompt for problem in held_out} & {problem.prompt for problem in trained}
    assert trained[150] == Gym(task.name, task.config, 30).problem(150, "train", 0)
    assert task.problem(0, "train", 0) != task.problem(0, "train", 1)

    problem = trained[0]
    reference = task.reference(problem)
    assert reference is not None
    replies = [reference, f"<think>1</think><answer> {reference} </answer>", "banana", ""]
    assert [outcome(task, problem, text) for text in replies] == [1.0, 1.0, 0.0, 0.0]
    # This scorer looks into the metadata and breaks without it: no verdict, and the run goes on.
    assert math.isnan(outcome(Gym("sudoku"), Problem(id="broken", prompt="", answer=None), "1"))

    with pytest.raises(ValueError, match="task.name is 'chain_summ': .* the nearest are chain_sum"):
        Gym("chain_summ").problem(0, "train", 0)
    with pytest.raises(ValueError, match="task.config is .*: chain_sum refuses it, .*'terms'"):
        Gym("chain_sum", {"terms": 2}).problem(0, "train", 0)
    with pytest.raises(ValueError, match="chain_sum has only about .* problems, give less"):
        Gym(task.name, task.config, held_out=300).problem(0, "train", 0)


@pytest.mark.slow("starts reasoning-gym")
@pytest.mark.usefixtures("kept_grading")
@pytest.mark.parametrize("name", ["knights_knaves", "rearc", "graph_color", "sudoku", "codeio"])
def test_gyms_entries_arrive_as_they_were(name: str):
    """Among them tuples, numbers as keys, and objects that no text can hold."""
    pytest.importorskip("reasoning_gym")
    task = Gym(name, held_out=3)
    for problem in (task.problem(index, "held_out", 0) for index in range(3)):
        entry = {"question": problem.prompt, "answer": problem.answer, **problem.data}
        for text in (task.reference(problem) or "", "1 2 3", '{"0": 1}'):
            assert outcome(task, problem, text) == task._dataset(0).score_answer(text, entry)


@pytest.mark.slow("starts reasoning-gym")
@pytest.mark.usefixtures("kept_grading")
def test_gyms_scorers_evaluate_where_they_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """This one evaluates the answer."""
    pytest.importorskip("reasoning_gym")
    task, canary = Gym("n_queens", held_out=1), tmp_path / "canary"
    problem = task.problem(0, "held_out", 0)
    attacks = [
        f"__import__('pathlib').Path({str(canary)!r}).touch()",
        f"__import__('os').system('touch {canary}')",
        f"__import__('subprocess').run(['touch', {str(canary)!r}])",
    ]
    for attack in attacks:
        task._dataset(0).score_answer(attack, {"metadata": problem.data["metadata"]})
        assert canary.exists()  # in the trainer it would run
        canary.unlink()
    assert [outcome(task, problem, attack) for attack in attacks] == [0.0] * 3
    with monkeypatch.context() as shorter:
        shorter.setattr(gym, "_SECONDS", 2.0)
        assert math.isnan(outcome(task, problem, "[0 for _ in iter(int, 1)]"))  # which never ends
    assert outcome(task, problem, str(task.reference(problem))) == 1.0
    if landlock_version():
        assert not canary.exists()


@pytest.mark.slow("starts reasoning-gym")
def test_gym_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r'pip install "proximo\[gym\]"'):
        Gym("sudoku").problem(0, "train", 0)


# File.


ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i % 3} for i in range(200)]


def test_a_jsonl_file(tmp_path: Path):
    task = File(write_rows(tmp_path / "sums.jsonl", ROWS), held_out=0.2)
    sizes = task.size("train"), task.size("held_out")
    assert sum(sizes) == 200
    assert 20 <= sizes[1] <= 60
    trained = [task.problem(index, "train", 0) for index in range(sizes[0])]
    held_out = [task.problem(index, "held_out", 0) for index in range(sizes[1])]
    assert {problem.prompt for problem in trained + held_out} == {row["prompt"] for row in ROWS}
    assert [task.problem(index, "held_out", 9) for index in range(sizes[1])] == held_out
    problem = next(problem for problem in trained + held_out if problem.prompt == "41+1=")
    assert (problem.answer, problem.data) == ("42", {"answer": "42", "level": 2})
    assert [outcome(task, problem, text) for text in ("42", "43")] == [1.0, 0.0]
    assert task.reference(problem) == "42"


def test_every_epoch_visits_all_rows_in_a_new_order(tmp_path: Path):
    task = File(write_rows(tmp_path / "sums.jsonl", ROWS[:20]), held_out=0.0)
    epochs = [[task.problem(20 * epoch + i, "train", 0).prompt for i in range(20)] for epoch in range(3)]
    assert all(set(epoch) == {row["prompt"] for row in ROWS[:20]} for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [task.problem(i, "train", 1).prompt for i in range(20)] != epochs[0]
    assert task.size("held_out") == 0


def test_rows_added_later_move_nothing_between_splits(tmp_path: Path):
    few = File(write_rows(tmp_path / "few.jsonl", ROWS[:100]))
    many = File(write_rows(tmp_path / "many.jsonl", ROWS))

    def prompts(task: File) -> set[Any]:
        return {task.problem(index, "held_out", 0).prompt for index in range(task.size("held_out"))}

    assert prompts(few) < prompts(many)


def test_a_parquet_file_of_conversations(tmp_path: Path):
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    rows = [{"messages": messages, "solution": "2"}, {"messages": messages[1:], "solution": "2"}]
    path = tmp_path / "chats.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    task = File(str(path), prompt_column="messages", held_out=0.0)
    prompts = {json.dumps(task.problem(index, "train", 0).prompt) for index in range(2)}
    assert prompts == {json.dumps(messages), json.dumps(messages[1:])}
    assert task.problem(0, "train", 0).answer == "2"


def test_an_empty_answer_column_is_passed_over(tmp_path: Path):
    row = {"prompt": "1+1=", "label": "no", "solution": "2", "answer": None}
    task = File(write_rows(tmp_path / "row.jsonl", [row]), held_out=0.0)
    assert task.problem(0, "train", 0).answer == "2"


def test_bad_rows_are_reported_all_at_once(tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    good = json.dumps({"prompt": "1+1=", "answer": "2"})
    bad = [
        "{not json",
        "[1]",
        json.dumps({"question": "1+1="}),
        json.dumps({"prompt": 3, "answer": "2"}),
        json.dumps({"prompt": [{"role": "user"}], "answer": "2"}),
        json.dumps({"prompt": "1+1=", "answer": None}),
    ]
    path.write_text("\n".join([good, "", *bad]) + "\n")
    with pytest.raises(ValueError, match="with bad rows .`task.skip_bad=True` leaves them") as caught:
        File(str(path)).size("train")
    assert [line.removeprefix(f"{path}:")[:60] for line in str(caught.value).splitlines()[1:]] == [
        "3: not JSON, Expecting property name enclosed in double quot",
        "4: [1] is not an object with columns: write one object to a ",
        "5: no column 'prompt', only question: set task.prompt_column",
        "6: the prompt is 3: give a text, or a list of messages with ",
        "7: prompt[0] has null as its content: give a text",
        "8: no answer in answer, solution, ground_truth, label, and E",
    ]


def test_a_share_too_small_to_hold_out_a_row_is_refused_without_offering_none(tmp_path: Path):
    """A run evaluates on its task, so that 0 would be refused next."""
    task = File(write_rows(tmp_path / "one.jsonl", [{"prompt": "1+1=", "answer": "2"}]), held_out=1e-9)
    with pytest.raises(ValueError, match="no row is left for held_out, give a larger share or a file$"):
        task.size("train")


def test_only_the_first_bad_rows_are_spelled_out(tmp_path: Path):
    """Rows of one mistake are one line; of other mistakes there are 20 lines at most."""
    good = {"prompt": "1+1=", "answer": "2"}
    task = File(write_rows(tmp_path / "bad.jsonl", [good] + [{"question": "q"}] * 25))
    with pytest.raises(ValueError, match=r":2: no column 'prompt', only question: .* \(and 24 more rows like it\)$"):
        task.size("train")
    columns = ["".join(pair) for pair in product("abcde", repeat=2)]
    task = File(write_rows(tmp_path / "worse.jsonl", [{name: "q"} for name in columns]))
    with pytest.raises(ValueError, match="only in aa, .*, 5 more: choose"):
        task.size("train")
    task = File(write_rows(tmp_path / "worst.jsonl", [good] + [{name: "q"} for name in columns]))
    with pytest.raises(ValueError, match="and 5 more$"):
        task.size("train")


def test_a_reward_without_need_for_an_answer_takes_rows_without_one(tmp_path: Path):
    task = File(write_rows(tmp_path / "free.jsonl", [{"prompt": "say a"}]), reward=FormatReward("a+"), held_out=0.0)
    problem = task.problem(0, "train", 0)
    assert [outcome(task, problem, text) for text in ("aaa", "b")] == [1.0, 0.0]
    assert task.reference(problem) is None


def test_prompts_that_occur_more_than_once_are_one_line(tmp_path: Path):
    chat = [{"role": "user", "content": "1+1="}]
    rows = [*ROWS[:3], ROWS[1], {"prompt": chat, "answer": "2"}, ROWS[1], {"prompt": chat, "answer": "3"}]
    path = write_rows(tmp_path / "twice.jsonl", rows)
    for share in (0.0, 1.0):  # whichever split they are in
        assert File(path, held_out=share).remarks == [
            f'{path}: 2 of 4 prompts occur more than once, 3 rows more than prompts, such as "1+1=" in {path}:2 and '
            f"{path}:4; 1 of them with different answers"
        ]
    assert File(write_rows(tmp_path / "once.jsonl", ROWS)).remarks == []


def test_a_held_out_file_of_its_own_must_not_meet_training(tmp_path: Path):
    train, other = write_rows(tmp_path / "train.jsonl", ROWS[:5]), write_rows(tmp_path / "other.jsonl", ROWS[5:8])
    task = File(train, held_out=other, reward=ExactMatch(last_number=True))
    assert (task.size("train"), task.size("held_out")) == (5, 3)
    assert [task.problem(index, "held_out", 0).prompt for index in range(3)] == ["5+1=", "6+1=", "7+1="]
    overlapping = write_rows(tmp_path / "overlapping.jsonl", ROWS[4:8])
    with pytest.raises(ValueError, match=r"train.jsonl:5: this prompt is also in .*overlapping.jsonl"):
        File(train, held_out=overlapping).size("train")


def test_files_that_cannot_be_read(tmp_path: Path):
    for path, why in [("missing.jsonl", "there is no such file"), ("data.txt", ".txt is not a known format")]:
        (tmp_path / "data.txt").touch()
        with pytest.raises(ValueError, match=why):
            File(str(tmp_path / path)).size("train")
    with pytest.raises(ValueError, match="no row is left for train"):
        File(write_rows(tmp_path / "empty.jsonl", []), held_out=0.0).size("train")


# Answers inside other columns


VERL = [
    {"prompt": [{"role": "user", "content": f"{n}+1="}], "reward_model": {"style": "rule", "ground_truth": str(n + 1)}}
    for n in range(20)
]


def test_an_answer_with_fields_is_refused_and_its_fields_are_named(tmp_path: Path):
    path = str(tmp_path / "x.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(VERL), path)
    task = File(path, answer_columns=("reward_model",))
    with pytest.raises(ValueError, match=r"to one of reward_model\.style, reward_model\.ground_truth"):
        task.size("train")
    inside = File(path, answer_columns=("reward_model.ground_truth",))
    problem = inside.problem(0, "train", 0)
    assert isinstance(problem.prompt, tuple)
    assert problem.prompt[0]["content"] == f"{int(problem.answer) - 1}+1="
    assert [grade.outcome for grade in inside.grade([problem], [said(problem.answer)])] == [1.0]


def test_a_list_is_no_answer_except_to_a_function(tmp_path: Path):
    path = write_rows(tmp_path / "x.jsonl", [{"prompt": f"a{n}", "answer": ["b", "c"]} for n in range(9)])
    with pytest.raises(ValueError, match="answer is a list, which no completion equals"):
        File(path).size("train")
    assert File(path, reward=FormatReward("b"), held_out=0.0).problem(0, "train", 0).answer == ["b", "c"]


def test_a_column_whose_name_has_a_dot_comes_first(tmp_path: Path):
    path = write_rows(tmp_path / "x.jsonl", [{"prompt": "a", "x.y": "1", "x": {"y": "2"}}])
    assert File(path, answer_columns=("x.y",), held_out=0.0).problem(0, "train", 0).answer == "1"
