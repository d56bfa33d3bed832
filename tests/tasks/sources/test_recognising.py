"""Data of known shapes: what is recognised, what is said, and what is refused because it can be read in two ways."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proximo.rewards import ExactMatch, MathVerify
from proximo.tasks import File
from proximo.tasks.sources.recognising import Chosen, recognise

ASKED = [{"role": "user", "content": "What is 7+5?"}]
NUMBER, LATEX, TEXT = ExactMatch(last_number=True), MathVerify(), ExactMatch()


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


SHAPES = {
    "GSM8K's": ({"question": "q", "answer": "7+5=12\n#### 1,200"}, "question", "answer", NUMBER, "answers end in ####"),
    "TRL's": ({"prompt": ASKED, "solution": r"\frac{1}{2}"}, "prompt", "solution", LATEX, "answers are LaTeX"),
    "verl's": (
        {
            "data_source": "openai/gsm8k",
            "prompt": ASKED,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "72"},
            "extra_info": {"split": "train", "index": 0, "answer": "so 72\n#### 72", "question": "q"},
        },
        "prompt",
        "reward_model.ground_truth",
        NUMBER,
        "answers are numbers: comparing last numbers",
    ),
    "open-instruct's": (
        {"messages": ASKED, "ground_truth": "$x^2$", "dataset": "math"},
        "messages",
        "ground_truth",
        LATEX,
        "comparing with math-verify",
    ),
    "verifiers'": (
        {"question": "q", "answer": "Paris", "info": {"country": "France"}, "task": "capitals"},
        "question",
        "answer",
        TEXT,
        "answers are texts: a completion must equal its answer",
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_recognised_and_said(shape: str, tmp_path: Path):
    row, prompt, answer, reward, words = SHAPES[shape]
    path = written(tmp_path, [row] * 3)
    task, line = recognise(path, chat=True)
    asked = prompt in ("question", "problem") if isinstance(row[prompt], str) else None
    assert task == File(path, prompt_column=prompt, answer_columns=(answer,), reward=reward, chat=asked)
    assert line.startswith(f"data {path}: 3 rows, {shape} shape: prompt in {prompt}, answer in {answer}")
    assert words in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("columns", "shape"),
    [
        (
            {"data_source": "countdown", "reward_model": {"style": "rule", "ground_truth": {"target": 24}}},
            "verl's shape",
        ),
        ({"ground_truth": {"target": 24}}, "a table"),
        ({"ground_truth": [24, 25]}, "a table"),
        ({"kind": "sum"}, "TRL's shape"),
    ],
)
def test_an_answer_that_only_a_function_understands_has_its_shape_too(columns, shape: str, tmp_path: Path):
    _, line = recognise(written(tmp_path, [{"prompt": ASKED} | columns] * 3), Chosen(has_reward=True))
    assert f"3 rows, {shape}: prompt in prompt" in line


def test_numbers_are_compared_by_value(tmp_path: Path):
    plain = ["$5", "-£1,000.5", "1e5", "12", "0.5"]
    task, line = recognise(written(tmp_path, [{"prompt": text, "answer": text} for text in plain]))
    assert task.reward == NUMBER
    assert "answers are numbers: comparing last numbers" in line
    some = [*plain, "3/4", "12%", r"-7.5 \%"]
    task, line = recognise(written(tmp_path, [{"prompt": text, "answer": text} for text in some]))
    assert task.reward == LATEX
    assert "answers are numbers, 3 of 8 as fractions or percentages such as 3/4: comparing with math-verify" in line
    marked = [{"prompt": "p", "answer": f"so it is\n#### {text}"} for text in some]
    assert recognise(written(tmp_path, marked))[0].reward == LATEX
    for text in ("2 1/2", "1/0", "3/4/5", "12 %%"):  # no value that can be relied on
        task, line = recognise(written(tmp_path, [{"prompt": "p", "answer": each} for each in ("1/2", text)]))
        assert task.reward == TEXT
        assert "a completion must equal its answer" in line


def test_every_answer_is_looked_at(tmp_path: Path):
    rows = [{"prompt": "p", "answer": str(number)} for number in range(20)]
    task, line = recognise(written(tmp_path, [*rows, {"prompt": "p", "answer": r"\pi"}]))
    assert task.reward == LATEX
    assert "1 of 21 answers are LaTeX" in line
    _, line = recognise(written(tmp_path, [*rows, {"prompt": "p", "answer": "yes"}]))
    assert "1 of 21 answers are no numbers: a completion must equal its answer" in line


@pytest.mark.parametrize("missing", [{"answer": None}, {"answer": ""}, {"answer": " "}, {}])
@pytest.mark.parametrize("chosen", [Chosen(), Chosen(answer_columns=("answer",))])
def test_rows_without_an_answer_are_bad_rows_and_change_no_grader(missing: dict[str, Any], chosen, tmp_path: Path):
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(20)]
    task, line = recognise(written(tmp_path, [*rows, {"prompt": "p", **missing}]), chosen)
    assert task.reward == NUMBER, line
    with pytest.raises(ValueError, match=r"x.jsonl:21: (no answer in answer|answer is empty)"):
        task.size("train")
    kept = replace(task, skip_bad=True)
    assert kept.size("train") + kept.size("held_out") == 20


@pytest.mark.parametrize("has_reward", [False, True])
def test_a_chosen_column_that_no_row_has_is_one_line_with_those_that_exist(has_reward: bool, tmp_path: Path):
    """Not a bad row for each row, after a line that says how its answers are compared."""
    path = written(tmp_path, [{"question": "1+1=", "answer": "2", "info": {"level": 3}, "x": None}] * 20)
    for chosen, field, name in (
        (Chosen(answer_columns=("solutoin",)), "task.answer_columns", "the column 'solutoin'"),
        (Chosen(answer_columns=("info.a", "b")), "task.answer_columns", "any of the columns info.a, b"),
        (Chosen(prompt_column="questoin"), "task.prompt_column", "the column 'questoin'"),
    ):
        with pytest.raises(ValueError, match="no row has a value") as refused:
            recognise(path, replace(chosen, has_reward=has_reward))
        assert str(refused.value) == (
            f"data is {path!r}: no row has a value in {name}, only in question, answer, info.level: choose with "
            f"`{field}=NAME`"
        )


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_task_whose_file_has_no_answers_says_so_once(skip_bad: bool, tmp_path: Path):
    path = written(tmp_path, [{"prompt": f"{number}+1=", "result": "2"} for number in range(20)])
    with pytest.raises(ValueError, match="no row has a value") as refused:
        File(path, answer_columns=("answer",), skip_bad=skip_bad).size("train")
    assert str(refused.value) == (
        f"task.path is {path!r}: no row has a value in the column 'answer', only in prompt, result: choose with "
        "`task.answer_columns=NAME`"
    )
    assert File(path, reward=None, held_out=0.5).size("train")


def test_nothing_is_claimed_of_answers_that_are_none(tmp_path: Path):
    path = written(tmp_path, [{"prompt": f"{n}+1=", "reward_model": {"ground_truth": "2"}} for n in range(20)])
    task, line = recognise(path, Chosen(answer_columns=("reward_model",)))
    assert "answers" not in line
    with pytest.raises(ValueError, match="set task.answer_columns to one of reward_model.ground_truth"):
        task.size("train")


def test_a_column_of_lists_is_named(tmp_path: Path):
    rows = [{"messages": ASKED, "ground_truth": [str(number)]} for number in range(20)]
    task, _ = recognise(written(tmp_path, rows))
    with pytest.raises(ValueError, match="ground_truth is a list, which no completion equals"):
        task.size("train")


@pytest.mark.parametrize(
    ("row", "chosen", "line"),
    [
        (
            {"prompt": "p", "question": "q", "answer": "1"},
            Chosen(prompt_column="question"),
            "whose prompt may be in prompt or question: choose with `task.prompt_column=prompt` or `task.prompt_",
        ),
        (
            {"problem": "p", "solution": "so 1", "answer": "1"},
            Chosen(answer_columns=("answer",)),
            "whose answer may be in answer or solution: choose with `task.answer_columns=answer` or `task.answer_col",
        ),
        ({"prompt": "p"}, Chosen(has_reward=True), "with no answers in "),
        ({"text": "p", "answer": "1"}, Chosen(prompt_column="text"), "whose columns are text, answer: choose the one"),
    ],
)
def test_what_can_be_read_in_two_ways_or_none_is_refused(row, chosen: Chosen, line: str, tmp_path: Path):
    path = written(tmp_path, [row] * 3)
    with pytest.raises(ValueError, match="data is") as told:
        recognise(path)
    assert line in str(told.value)
    assert "\n" not in str(told.value)
    assert recognise(path, chosen)[0].path == path


@pytest.mark.parametrize("place", [0, 10])
def test_a_row_without_a_prompt_changes_nothing_about_the_others(place: int, tmp_path: Path):
    """One that is skipped had switched the chat template off."""
    rows: list[dict[str, Any]] = [{"question": f"What is {n}+1?", "answer": f"so #### {n + 1}"} for n in range(20)]
    whole, line = recognise(written(tmp_path, rows), chat=True)
    for bad in ({}, {"question": None, "label": "x"}):
        some, with_bad = recognise(written(tmp_path, [*rows[:place], bad, *rows[place:]]), chat=True)
        assert some == whole
        assert some.chat is True
        assert with_bad.partition(" rows, ")[2] == line.partition(" rows, ")[2]
    recognise(written(tmp_path, [*rows[:place], {}, *rows[place:]]), Chosen(only_watched=True), chat=True)


WATCHED = Chosen(only_watched=True)


def test_beside_a_reward_model_answers_are_graded_where_there_are_any(tmp_path: Path):
    rows: list[dict[str, Any]] = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(20)]
    task, line = recognise(written(tmp_path, rows), WATCHED)
    assert task.reward == NUMBER
    assert "answer in answer; answers are numbers: comparing last numbers, which is logged and not rewarded" in line
    task, line = recognise(written(tmp_path, [{"question": "q"}] * 3), WATCHED)
    assert task.reward is None
    assert "; no answers: the reward model's score is the reward, and there is no other; " in line
    both = [row | {"solution": "so it is"} for row in rows]
    task, line = recognise(written(tmp_path, both), WATCHED)
    assert task.reward is None
    assert "; answers may be in answer or solution (`task.answer_columns=NAME`): the reward model's score" in line
    task, _ = recognise(written(tmp_path, both), replace(WATCHED, answer_columns=("answer",)))
    assert task.reward == NUMBER
    task, _ = recognise(written(tmp_path, [*rows, {"question": "q"}]), WATCHED)  # a row without is no bad row
    assert task.reward is None


def test_test_files_are_held_out(tmp_path: Path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": name, "answer": "#### 1"}) + "\n")
    task, line = recognise(str(tmp_path))
    assert (task.path, task.held_out) == (f"{tmp_path}/train.jsonl", f"{tmp_path}/test.jsonl")
    assert f"held out: {tmp_path}/test.jsonl" in line
    (tmp_path / "validation.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="test.jsonl and .*validation.jsonl: choose with `task.h"):
        recognise(str(tmp_path))
    assert recognise(str(tmp_path), Chosen(held_out=0.0))[0].held_out == 0


def test_a_broken_file_is_refused_with_line_and_mistake(tmp_path: Path):
    path = tmp_path / "broken.jsonl"
    path.write_text("{'prompt': '1+2='}\n")
    with pytest.raises(ValueError, match=r"no row can be read:\n.*broken.jsonl:1: not JSON"):
        recognise(str(path))
    path.write_text("")
    with pytest.raises(ValueError, match="it has no rows"):
        recognise(str(path))


# What a row is asked as


def asked(tmp_path: Path, row: dict[str, Any], **fields: Any) -> Any:
    return File(written(tmp_path, [row]), held_out=0.0, **fields).problem(0, "train", 0).prompt


def test_templates_system_prompts_and_chat(tmp_path: Path):
    row = {"prompt": "7+5?", "answer": "12", "info": {"unit": "apples"}}
    user = {"role": "user", "content": "7+5?"}
    system = {"role": "system", "content": "Be brief."}
    assert asked(tmp_path, row) == "7+5?"
    template = r"{prompt} In {info.unit}, as \boxed{} or {{answer}}."
    assert asked(tmp_path, row, template=template) == r"7+5? In apples, as \boxed{} or {answer}."
    assert asked(tmp_path, row, chat=True) == (user,)
    assert asked(tmp_path, row, system="Be brief.") == (system, user)
    conversation = {"messages": [user, {"role": "assistant", "content": "12"}], "answer": "12"}
    assert asked(tmp_path, conversation, prompt_column="messages") == (user,)
    assert asked(tmp_path, conversation, prompt_column="messages", system="Be brief.") == (system, user)
    # Without a chat template, what is said is asked as it is.
    plain = asked(tmp_path, conversation, prompt_column="messages", system="Be brief.", chat=False)
    assert plain == "Be brief.\n\n7+5?"
    assert asked(tmp_path, {"prompt": [user], "answer": "12"}, chat=False) == "7+5?"
    assert asked(tmp_path, row, system="Be brief.", chat=False) == "Be brief.\n\n7+5?"
    nested = {"extra": {"prompt": [user]}, "answer": "12"}
    assert asked(tmp_path, nested, prompt_column="extra.prompt") == (user,)
    own = File("x.jsonl", template="{prompt}=", system="Be brief.", chat_template_kwargs={"enable_thinking": False})
    assert own.ask("7+5").prompt == (system, {"role": "user", "content": "7+5="})
    assert own.ask("7+5").chat_template_kwargs == {"enable_thinking": False}
    assert File("x.jsonl", template="{question}=").ask("7+5").prompt == "7+5="
    assert File("x.jsonl", template="{first}+{second}=").ask("7+5=").prompt == "7+5="


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"template": "Think."}, "task.template is 'Think.': put a column in braces, such as {question}"),
        ({"template": r"{prompt} \boxed{answer}"}, "task.template has {answer}, which is the answer: leave it out, or"),
        ({"template": "{promt}"}, "task.template has {promt}, and the row has no such text: its columns are prompt"),
        ({"chat_template_kwargs": {"enable_thinking": "false"}}, "has enable_thinking as the text 'false': give False"),
        ({"system": "Be brief.", "prompt_column": "talk"}, "begins with a system message, and task.system is given"),
    ],
)
def test_templates_that_cannot_be_meant(fields: dict[str, Any], line: str, tmp_path: Path):
    row = {"prompt": "7+5?", "answer": "12", "talk": [{"role": "system", "content": "s"}, *ASKED]}
    with pytest.raises(ValueError, match="task") as told:
        asked(tmp_path, row, **fields)
    assert line in str(told.value)


def test_no_chat_is_obeyed_for_messages(tmp_path: Path):
    row = {"prompt": [{"role": "user", "content": "A conversation. User: 7+5?\nAssistant: <think>"}], "answer": "12"}
    path = written(tmp_path, [row] * 3)
    task, line = recognise(path, Chosen(chat=False, held_out=0.0), chat=True)
    assert task.problem(0, "train", 0).prompt == row["prompt"][0]["content"]
    assert "without a chat template" in line
    for chosen in (Chosen(held_out=0.0), Chosen(held_out=0.0, chat=True)):
        assert recognise(path, chosen, chat=True)[0].problem(0, "train", 0).prompt == tuple(row["prompt"])
