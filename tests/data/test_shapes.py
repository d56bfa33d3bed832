"""Odd shapes of data: what train, sft and dpo answer names the row, the column and the remedy, in a line."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from proximo.data import DataFile, read_examples, read_rankings
from proximo.data.messages import without_nothing
from proximo.models import tiny_tokenizer
from proximo.supervised.encoding import prepare
from proximo.tasks.sources.recognising import recognise

TINY = tiny_tokenizer()
GOOD = {"prompt": "1+1=", "completion": "2", "answer": "2", "chosen": "2", "rejected": "3"}
USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
HEADER = b"prompt,completion,answer,chosen,rejected\n"
MESSAGES = "give a text, or a list of messages with role and content"
TEXT = "give a text, or a list of one message by the assistant"


def lines(*rows: Any) -> bytes:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


def bad(**values: Any) -> bytes:
    return lines(GOOD, GOOD | values)


def talk(*messages: Any) -> bytes:
    """A file whose second row holds these messages; as rankings they are the chosen conversation."""
    rows = [{"messages": each, "answer": "1"} for each in ([USER, REPLY], list(messages))]
    return lines(*(row | {"chosen": row["messages"], "rejected": [USER, {**REPLY, "content": "no"}]} for row in rows))


SHAPES: Mapping[str, tuple[Any, ...]] = {
    "a column is missing": (
        "jsonl",
        lines(GOOD, {"x": 1}),
        "no column 'prompt', only x: set task.prompt_column",
        "no column 'prompt' or 'messages', only x: choose with `prompt_column=NAME`",
        "no column 'chosen', only x: choose with `prompt_column=NAME` `chosen_column=NAME`",
    ),
    "a prompt is null": (
        "jsonl",
        bad(prompt=None),
        f"the prompt is null: {MESSAGES}",
        "prompt is null: give a text, or leave the row out",
        f"the prompt is null: {MESSAGES}",
    ),
    "a prompt is a number": ("jsonl", bad(prompt=7), *[f"the prompt is 7: {MESSAGES}"] * 3),
    "a prompt is empty": ("jsonl", bad(prompt=""), *[f'the prompt is "": {MESSAGES}'] * 3),
    "lists in a list": (
        "jsonl",
        bad(prompt=[["a"]]),
        'prompt[0] is ["a"]: give a message with role and content',
        *[f'the prompt is [["a"]]: {MESSAGES}'] * 2,
    ),
    "a prompt is an object": ("jsonl", bad(prompt={"text": "a"}), *[f'the prompt is {{"text": "a"}}: {MESSAGES}'] * 3),
    "an answer is null": (
        "jsonl",
        bad(answer=None, completion=None, chosen=None),
        "no answer in answer, and ExactMatch needs one: give the answer, or leave the row out",
        "completion is null: give a text, or leave the row out",
        f"chosen is null: {TEXT}",
    ),
    "an answer is a list": (
        "jsonl",
        bad(answer=["2"], completion=["2"], chosen=["2"]),
        "answer is a list, which no completion equals: give one answer, or judge with a PythonFunction",
        f'completion is ["2"]: {TEXT}',
        f'chosen is ["2"]: {TEXT}',
    ),
    "no messages": (
        "jsonl",
        talk(),
        *["messages is []: give a list of messages with role and content"] * 2,
        f"chosen is []: {TEXT}",
    ),
    "a message without content": (
        "jsonl",
        talk({"role": "user"}, REPLY),
        *["messages[0] has null as its content: give a text"] * 2,
        "chosen[0] has null as its content: give a text",
    ),
    "a role that is a number": (
        "jsonl",
        talk({"role": 3, "content": "x"}, REPLY),
        *["messages[0] has 3 as its role: give a text"] * 2,
        "chosen[0] has 3 as its role: give a text",
    ),
    "messages that are texts": (
        "jsonl",
        talk("hi", "yo"),
        *['messages[0] is "hi": give a message with role and content'] * 2,
        'chosen[0] is "hi": give a message with role and content',
    ),
    "a call of nothing": (
        "jsonl",
        talk(USER, {"role": "assistant", "tool_calls": ["add"]}),
        *['messages[1] has "add" as a tool call: give a function with name and arguments'] * 2,
        'chosen[1] has "add" as a tool call: give a function with name and arguments',
    ),
    "calls that are no list": (
        "jsonl",
        talk(USER, {"role": "assistant", "tool_calls": {"add": 1}}),
        *['messages[1] has {"add": 1} as its tool_calls: give a list of them'] * 2,
        'chosen[1] has {"add": 1} as its tool_calls: give a list of them',
    ),
    "a number of calls": (
        "jsonl",
        talk(USER, {"role": "assistant", "tool_calls": 5}),
        *["messages[1] has 5 as its tool_calls: give a list of them"] * 2,
        "chosen[1] has 5 as its tool_calls: give a list of them",
    ),
    "an unknown speaker": (
        "jsonl",
        talk(USER, {"from": "narrator", "value": "x"}),
        *['a turn is from "narrator": give one of system, user, human'] * 3,
    ),
    "another encoding": (
        "jsonl",
        lines(GOOD) + '{"prompt": "é"}\n'.encode("latin-1"),
        *["not UTF-8, invalid continuation byte at byte 12: save the file as UTF-8"] * 3,
    ),
    "UTF-16": ("jsonl", lines(GOOD).decode().encode("utf-16"), *["it is UTF-16: save it as UTF-8"] * 3),
    "a mark before UTF-8": (
        "jsonl",
        b"\xef\xbb\xbf" + bad(prompt=7),
        *[f"the prompt is 7: {MESSAGES}"] * 3,
    ),
    "a ragged row": (
        "csv",
        HEADER + b"1+1=,2,2,2,3\n1+1=,2\n",
        *["2 values for 5 columns: put quotes around values with a separator"] * 3,
    ),
    "columns of one name": (
        "csv",
        b"prompt,prompt,answer\na,b,c\n",
        *["it has two columns with one name, of prompt, prompt, answer: rename one"] * 3,
    ),
    "no rows": ("jsonl", b"", *["it has no rows"] * 3),
    "a header alone": ("csv", HEADER, *["it has no rows"] * 3),
    "a list in a line": (
        "jsonl",
        lines(GOOD, "[1, 2]"),
        *["[1, 2] is not an object with columns: write one object"] * 3,
    ),
    "no JSON": ("jsonl", lines(GOOD, "{a: 1}"), *["at column 2: write one object to a line"] * 3),
    "NaN": (
        "jsonl",
        bad(prompt=float("nan")),
        *[f"the prompt is NaN: {MESSAGES}"] * 3,
    ),
}


def read(command: str, path: str) -> None:
    if command == "train":
        replace(recognise(path)[0], held_out=0.0).size("train")
    elif command == "sft":
        prepare(DataFile(path, held_out=0.0), read_examples, TINY)
    else:
        prepare(DataFile(path, held_out=0.0), read_rankings, TINY)


def refused(command: str, path: str) -> str:
    with pytest.raises(ValueError, match=".") as caught:
        read(command, path)
    return str(caught.value)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("command", ["train", "sft", "dpo"])
def test_an_odd_shape_is_answered_in_a_line(shape: str, command: str, tmp_path: Path):
    suffix, content, *answers = SHAPES[shape]
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(content)
    answer = refused(command, str(path))
    last = answer.splitlines()[-1]
    assert answers[("train", "sft", "dpo").index(command)] in last
    assert len(answer.splitlines()) <= 2  # with the heading that says how bad rows are left out
    if len(answer.splitlines()) == 2:
        assert last.startswith((f"{path}:2: ", f"{path}, line 3: "))


@pytest.mark.parametrize("command", ["train", "sft", "dpo"])
def test_columns_of_structs_and_bytes_are_answered_in_a_line(command: str, tmp_path: Path):
    for values in ([{"a": 1}, {"a": 2}], [b"\xff", b"\xfe"]):
        table = pyarrow.table({name: values for name in GOOD if name != "rejected"} | {"rejected": values[::-1]})
        parquet.write_table(table, tmp_path / "x.parquet")
        answer = refused(command, str(tmp_path / "x.parquet"))
        assert "x.parquet, row 1: " in answer
        assert "give a text" in answer


def test_what_is_nested_too_deeply_is_refused():
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply: leave the row out"):
        without_nothing({"arguments": deep})
    for _ in range(5000):  # else it would be freed by a recursion of its own
        deep = deep[0]
