"""Files of texts: what every row becomes, and what is said of every row that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from proximo.data import (
    DataFile,
    Example,
    Mistakes,
    Prompt,
    Ranking,
    read_examples,
    read_rankings,
    read_rows,
    read_splits,
)
from proximo.data.examples import Columns
from proximo.data.rankings import RankedColumns
from proximo.data.splits import chosen_again, held_out_keys, is_held_out, prompt_key

USER, SYSTEM = {"role": "user", "content": "hi"}, {"role": "system", "content": "Be brief."}
REPLY = {"role": "assistant", "content": "hello"}
AGAIN, BYE = {"role": "user", "content": "bye"}, {"role": "assistant", "content": "ciao"}


def written(path: Path, rows: list[Any]) -> str:
    """Rows that are texts are lines as they are."""
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    columns = dict.fromkeys(column for row in rows for column in row)
    table = pyarrow.table({column: [row.get(column) for row in rows] for column in columns})
    parquet.write_table(table, path)
    return str(path)


def assert_said(read, rows: list[Any], path: Path, beginnings: list[str]) -> None:
    """What is said of each bad row begins like this, behind the file's name."""
    mistakes = Mistakes()
    read(written(path, rows), mistakes)
    said = [line.removeprefix(f"{path}:") for line in str(mistakes).splitlines()]
    assert [line[: len(start)] for line, start in zip(said, beginnings, strict=True)] == beginnings


# Rows.


def test_rows_know_their_places(tmp_path: Path):
    rows = [{"a": 1}, "", {"a": "x\u2028y"}]
    mistakes = Mistakes()
    found = read_rows(written(tmp_path / "x.jsonl", rows), mistakes)
    assert [(row.location, dict(row.values)) for row in found] == [
        (f"{tmp_path}/x.jsonl:1", {"a": 1}),
        (f"{tmp_path}/x.jsonl:3", {"a": "x\u2028y"}),
    ]
    path = as_parquet(tmp_path / "x.parquet", [{"a": 1}, {"a": 2}])
    assert [row.location for row in read_rows(path, mistakes)] == [f"{path}, row 1", f"{path}, row 2"]
    assert not mistakes


def test_lines_that_cannot_be_read(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": \n"\xff"\n[1]\n' + b"[" * 100_000 + b"\n")
    mistakes = Mistakes()
    assert len(read_rows(str(path), mistakes)) == 1
    said = [line.removeprefix(f"{path}:") for line in str(mistakes).splitlines()]
    assert [line[:20] for line in said] == [
        "2: not JSON, Expecti",
        "3: not UTF-8, invali",
        "4: [1] is not an obj",
        "5: not JSON, maximum",
    ]


def test_files_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "x.txt").touch()
    (tmp_path / "x.parquet").write_text("no")
    (tmp_path / "x.csv").write_text("prompt,answer,answer\n1,2,3\n")
    for name, why in [
        ("none.jsonl", "there is no such file"),
        ("x.txt", ".txt is not a known format, use .jsonl, .json, .parquet, .csv, .tsv, .arrow"),
        ("x.parquet", "cannot be read, not Parquet"),
        ("x.csv", "two columns with one name"),
    ]:
        with pytest.raises(ValueError, match=f"pairs is '.*{name}': .*{why}"):
            read_rows(str(tmp_path / name), Mistakes(), field="pairs")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.csv", 'prompt,answer\n"1,5;2",3\n4,\n'),
        ("x.csv", "prompt;answer\r\n1,5;3\r\n4;\r\n"),
        ("x.csv", '"prompt"\tanswer\n"1,5"\t3\n4\t\n'),
        ("x.tsv", "prompt\tanswer\n1,5\t3\n4\t\n"),
    ],
)
def test_the_header_shows_what_separates_values(name: str, text: str, tmp_path: Path):
    (tmp_path / name).write_bytes(text.encode())
    mistakes = Mistakes()
    first, second = (dict(row.values) for row in read_rows(str(tmp_path / name), mistakes))
    assert not mistakes
    assert first == {"prompt": "1,5;2" if ";2" in text else "1,5", "answer": "3"}
    assert second == {"prompt": "4", "answer": None}


def test_a_row_of_a_table_stands_where_an_editor_shows_it(tmp_path: Path):
    """Behind the header, and behind cells of several lines and empty lines."""
    path, mistakes = tmp_path / "x.csv", Mistakes()
    path.write_text('prompt,answer\n1,2\n"one\ntwo\nthree",4\n\n5,6\n7\n8,9\n')
    lines = [row.location for row in read_rows(str(path), mistakes)]
    assert lines == [f"{path}, line {number}" for number in (2, 3, 7, 9)]
    assert [line.partition(": ")[0] for line in mistakes] == [f"{path}, line 8"]


@pytest.mark.parametrize(("name", "column"), [("x.csv", "prompt"), ("x.tsv", "prompt,answer")])
def test_a_table_may_have_one_column(name: str, column: str, tmp_path: Path):
    (tmp_path / name).write_text(f"{column}\na\n")
    assert [dict(row.values) for row in read_rows(str(tmp_path / name), Mistakes())] == [{column: "a"}]


def test_mistakes_are_told_in_the_order_of_the_file():
    mistakes = Mistakes()
    mistakes.refuse("nothing is wrong:")
    for number in (10, 9, *range(11, 34)):
        mistakes.add(f"x.jsonl:{number}", "bad" + "!" * number)  # each another mistake, so that each is told
    with pytest.raises(ValueError, match="bad rows") as caught:
        mistakes.refuse("bad rows:")
    lines = [line.rstrip("!") for line in str(caught.value).splitlines()]
    assert lines[:3] == ["bad rows:", "x.jsonl:9: bad", "x.jsonl:10: bad"]
    assert lines[20:] == ["x.jsonl:28: bad", "and 5 more"]
    assert len(mistakes) == 25


# Examples.


def test_what_an_example_can_be(tmp_path: Path):
    rows = [
        {"prompt": "1+1=", "completion": "2", "more": 3},
        {"prompt": [SYSTEM, USER], "completion": "hello"},
        {"prompt": [USER], "completion": [REPLY]},
        {"messages": [USER, REPLY]},
    ]
    path, mistakes = written(tmp_path / "x.jsonl", rows), Mistakes()
    assert read_examples(path, mistakes) == [
        Example(f"{path}:1", "1+1=", "2"),
        Example(f"{path}:2", (SYSTEM, USER), "hello"),
        Example(f"{path}:3", (USER,), "hello"),
        Example(f"{path}:4", (USER,), "hello"),
    ]
    assert not mistakes


def test_all_replies_of_a_conversation_are_one_example(tmp_path: Path):
    for path in (
        written(tmp_path / "x.jsonl", [{"messages": [SYSTEM, USER, REPLY, AGAIN, BYE]}]),
        as_parquet(tmp_path / "x.parquet", [{"messages": [SYSTEM, USER, REPLY, AGAIN, BYE]}]),
    ):
        [last] = read_examples(path, Mistakes())
        [first] = last.earlier
        assert (first.prompt, first.completion) == ((SYSTEM, USER), "hello")
        assert (last.prompt, last.completion) == ((SYSTEM, USER, REPLY, AGAIN), "ciao")
        assert first.location == f"{last.location}, turn 3"
        # It stays on the side of a split on which the same question is, asked elsewhere.
        assert last.key == Example("", (SYSTEM, USER), "other").key


def test_parquet_columns_that_only_some_rows_have(tmp_path: Path):
    rows = [{"prompt": "a", "completion": "b"}, {"messages": [USER, REPLY]}]
    mistakes = Mistakes()
    found = read_examples(as_parquet(tmp_path / "x.parquet", rows), mistakes)
    assert [(example.prompt, example.completion) for example in found] == [("a", "b"), ((USER,), "hello")]
    assert not mistakes


def test_every_bad_example_is_reported(tmp_path: Path):
    rows = [
        {"prompt": "1+1=", "completion": "2"},
        "{not json",
        "3",
        {"asked": "1+1=", "completion": "2"},
        {"prompt": "1+1="},
        {"prompt": "", "completion": "2"},
        {"prompt": [{"role": "user"}], "completion": "2"},
        {"prompt": "1+1=", "completion": " \n"},
        {"prompt": "1+1=", "completion": 2},
        {"prompt": "1+1=", "completion": [USER]},
        {"messages": [USER, AGAIN]},
        {"messages": [REPLY, USER, REPLY]},
        {"messages": [USER, REPLY, AGAIN, BYE | {"content": ""}]},
        {"messages": "hi"},
        {"messages": []},
        '{"prompt": "half a pair \\ud800", "completion": "2"}',
    ]
    beginnings = [
        "2: not JSON, Expecting property name enclosed in double quotes at column 2",
        "3: 3 is not an object with columns",
        "4: no column 'prompt' or 'messages', only asked, completion: choose with",
        "5: no column 'completion', only prompt",
        '6: the prompt is "": give a text, or a list of messages with role and cont',
        '7: the prompt is [{"role": "user"}]: give a text, or a list of messages wi',
        "8: completion is empty",
        "9: completion is 2: give a text, or a list of one message by the assistant",
        '10: completion is [{"role": "user", "content": "hi"}]: give a text, or a l',
        "11: no turn of the conversation is the assistant's: there is nothing to le",
        "12: the conversation begins with the assistant's turn: give what it replie",
        "13: turn 4 is empty",
        "14: messages is a text: give a list of messages with role and content, or ",
        "15: messages is []: give a list of messages with role and content",
        "16: not JSON, a text has half of a surrogate pair, \\ud800: remove it",
    ]
    assert_said(read_examples, rows, tmp_path / "x.jsonl", beginnings)


def read(tmp_path: Path, *rows: dict, **options: Any) -> list[tuple[Prompt, str]]:
    mistakes = Mistakes()
    found = read_examples(written(tmp_path / "x.jsonl", list(rows)), mistakes, **options)
    mistakes.refuse("bad rows:")
    return [(each.prompt, each.completion) for each in found]


def test_chats_with_their_prompt_beside_them(tmp_path: Path):
    """UltraChat's shape: the prompt once more, an id, and the messages."""
    row = {"prompt": "hi", "prompt_id": "a1", "messages": [USER, REPLY, AGAIN, BYE]}
    assert read(tmp_path, row) == [((USER, REPLY, AGAIN), BYE["content"])]


def test_conversations_of_sharegpt(tmp_path: Path):
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    user = {"role": "user", "content": "hi"}
    system = {"role": "system", "content": "Be brief."}
    assert read(tmp_path, {"id": "1", "conversations": turns}) == [((user,), "hello")]
    assert read(tmp_path, {"conversations": turns, "system": "Be brief."}) == [((system, user), "hello")]
    with pytest.raises(ValueError, match='a turn is from "narrator": give one of system, user, human'):
        read(tmp_path, {"conversations": [{"from": "narrator", "value": "x"}, *turns]})


def test_instructions_of_alpaca(tmp_path: Path):
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3", "text": "Below is an instruction"}
    asked = "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n"
    assert read(tmp_path, row) == [(asked, "3")]
    assert read(tmp_path, row, chat=True) == [(({"role": "user", "content": "Add.\n\n1 and 2"},), "3")]
    bare = {"instruction": "Add.", "input": "", "output": "3"}
    assert read(tmp_path, bare, chat=True) == [(({"role": "user", "content": "Add."},), "3")]


def test_a_question_is_a_users_message_where_there_is_a_template(tmp_path: Path):
    row = {"question": "1+1?", "answer": "2"}
    assert read(tmp_path, row) == [("1+1?", "2")]
    assert read(tmp_path, row, chat=True) == [(({"role": "user", "content": "1+1?"},), "2")]
    assert read(tmp_path, {"prompt": "1+1?", "response": "2"}, chat=True) == [("1+1?", "2")]


def test_columns_are_chosen_where_there_are_two(tmp_path: Path):
    row = {"problem": "1+1?", "solution": "1 and 1 make 2", "answer": "2", "mine": "two"}
    with pytest.raises(ValueError, match="answer or solution.*`prompt_column="):
        read(tmp_path, row)
    assert read(tmp_path, row, columns=Columns("problem", "mine")) == [("1+1?", "two")]


def test_messages_and_texts_in_columns_of_other_names(tmp_path: Path):
    row = {"talk": [USER, REPLY], "body": "Once upon a time.", "prompt": "hi", "completion": "hello"}
    assert read(tmp_path, row, columns=Columns(messages="talk")) == [((USER,), "hello")]
    assert read(tmp_path, row, columns=Columns(text="body")) == [("", "Once upon a time.")]


def test_a_plain_text_is_learned_where_there_is_nothing_else(tmp_path: Path):
    assert read(tmp_path, {"text": "Once upon a time.", "source": "web"}) == [("", "Once upon a time.")]
    one, other = (Example("x", "", text) for text in ("one", "other"))
    assert one.key != other.key  # a split is by text then


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": None, "parameters": {}}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_conversations_with_tools(tmp_path: Path, tools: Any):
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "3."}]},
    ]
    mistakes = Mistakes()
    [last] = read_examples(written(tmp_path / "x.jsonl", [{"messages": turns, "tools": tools}]), mistakes)
    mistakes.refuse("bad rows:")
    [first] = last.earlier
    assert (first.completion, last.completion) == ("", "It is 3.")
    # Arguments are an object, which templates write as JSON; keys that only other rows have are gone.
    [call] = first.calls
    assert call["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert isinstance(last.prompt, tuple)
    assert last.prompt[1]["tool_calls"] == [call]
    assert last.arguments == {"tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]}


# Rankings.


def test_conversations_that_are_one_text_part_behind_the_last_reply(tmp_path: Path):
    """Anthropic's shape, and TRL's without a prompt."""
    asked = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: 1+1?\n\nAssistant:"
    rows = [
        {"chosen": f"{asked} It is 2.", "rejected": f"{asked} It is 3."},
        {"chosen": "The sky is blue.", "rejected": "The sky is brown.", "score_chosen": 8.0, "score_rejected": 2.0},
    ]
    mistakes = Mistakes()
    found = read_rankings(written(tmp_path / "x.jsonl", rows), mistakes)
    assert [(ranking.prompt, ranking.completions) for ranking in found] == [
        (asked, (" It is 2.", " It is 3.")),
        ("The sky is", (" blue.", " brown.")),
    ]
    assert not mistakes


def test_rankings_in_columns_of_other_names(tmp_path: Path):
    names = RankedColumns("question", "better", "worse", "best_first")
    rows = [
        {"question": "1+1=", "better": "2", "worse": "3", "prompt": "not this"},
        {"question": "1+1=", "best_first": ["2", "3", "4"]},
        {"question": "1+1=", "better": "2"},
    ]
    mistakes = Mistakes()
    found = read_rankings(written(tmp_path / "x.jsonl", rows), mistakes, columns=names)
    assert [(ranking.prompt, ranking.completions) for ranking in found] == [
        ("1+1=", ("2", "3")),
        ("1+1=", ("2", "3", "4")),
    ]
    assert "no column 'worse', only question, better: choose with `prompt_column=NAME`" in str(mistakes)


def test_what_a_ranking_can_be(tmp_path: Path):
    rows = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 2},
        {"prompt": [USER], "chosen": [REPLY], "rejected": [BYE]},
        {"chosen": [SYSTEM, USER, REPLY], "rejected": [SYSTEM, USER, BYE]},
        {"prompt": "hi", "chosen": [USER, REPLY], "rejected": [USER, BYE]},
        {"prompt": "1+1=", "ranking": ["2", "3", "4"]},
    ]
    path, mistakes = written(tmp_path / "x.jsonl", rows), Mistakes()
    assert read_rankings(path, mistakes) == [
        Ranking(f"{path}:1", "1+1=", ("2", "3")),
        Ranking(f"{path}:2", "1+1=", ("2", "3"), 2.0),
        Ranking(f"{path}:3", (USER,), ("hello", "ciao")),
        Ranking(f"{path}:4", (SYSTEM, USER), ("hello", "ciao")),
        Ranking(f"{path}:5", (USER,), ("hello", "ciao")),
        Ranking(f"{path}:6", "1+1=", ("2", "3", "4")),
    ]
    assert not mistakes
    columns = [{"prompt": "a", "ranking": ["b", "c"]}, {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5}]
    found = read_rankings(as_parquet(tmp_path / "x.parquet", columns), mistakes)
    assert [(ranking.completions, ranking.margin) for ranking in found] == [(("b", "c"), None), (("b", "c"), 0.5)]


def test_every_bad_ranking_is_reported(tmp_path: Path):
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    rows = [
        pair,
        {"prompt": "1+1=", "chosen": "2"},
        {"chosen": "2", "rejected": "3"},
        pair | {"rejected": "2"},
        pair | {"chosen": ""},
        {"chosen": [USER, REPLY], "rejected": [AGAIN, BYE]},
        {"chosen": [USER, AGAIN], "rejected": [USER, BYE]},
        {"prompt": "other", "chosen": [USER, REPLY], "rejected": [USER, BYE]},
        {"prompt": "1+1=", "ranking": ["2"]},
        {"prompt": "1+1=", "ranking": ["2", "3", "2"]},
        {"prompt": "1+1=", "ranking": ["2", ""]},
        {"prompt": "1+1=", "ranking": ["2", "3", "4"], "margin": 1.0},
        pair | {"margin": -1},
        pair | {"margin": True},
        pair | {"margin": float("nan")},
        pair | {"chosen": [USER, REPLY]},
    ]
    beginnings = [
        "2: no column 'rejected', only prompt, chosen",
        "3: no column 'prompt', and chosen and rejected begin differently: give the",
        "4: chosen and rejected are equal: there is no preference to ",
        "5: chosen is empty",
        "6: chosen and rejected differ before their last turn: only t",
        '7: chosen is [{"role": "user", "content": "bye"}]: give a te',
        "8: the prompt is not in the conversations chosen and rejecte",
        '9: ranking is ["2"]: give at least two completions, the best',
        "10: ranking[0] and ranking[2] are equal: remove one",
        "11: ranking[1] is empty",
        "12: margin is 1.0 with 3 completions: only a pair may have a margin",
        "13: margin is -1: give a number that is not negative",
        "14: margin is true: give a number that is not negative",
        "15: margin is NaN: give a number that is not negative",
        '16: chosen is [{"role": "user", "content": "hi"}, {"role": "',
    ]
    assert_said(read_rankings, rows, tmp_path / "x.jsonl", beginnings)


# Splits.


def test_a_share_of_prompts_is_held_out(tmp_path: Path):
    rows = [{"prompt": f"{i // 2}+1=", "completion": f"{i}"} for i in range(400)]
    path, mistakes = written(tmp_path / "x.jsonl", rows), Mistakes()
    train, held_out = read_splits(read_examples, path, 0.2, mistakes)
    assert len(train) + len(held_out) == 400
    assert 50 <= len(held_out) <= 110
    assert not {example.prompt for example in train} & {example.prompt for example in held_out}
    fewer = read_splits(read_examples, written(tmp_path / "y.jsonl", rows[100:]), 0.2, mistakes)[1]
    assert {example.prompt for example in fewer} < {example.prompt for example in held_out}
    assert [len(part) for part in read_splits(read_examples, path, 0.0, mistakes)] == [400, 0]


def test_a_file_of_its_own_is_held_out(tmp_path: Path):
    rows = [{"prompt": f"{i}+1=", "completion": f"{i + 1}"} for i in range(8)]
    train, other = written(tmp_path / "x.jsonl", rows[:5]), written(tmp_path / "y.jsonl", rows[4:])
    mistakes = Mistakes()
    parts = read_splits(read_examples, train, other, mistakes)
    assert [len(part) for part in parts] == [4, 4]
    assert str(mistakes) == f"{train}:5: this prompt is also in {other}: remove one of them"
    with pytest.raises(ValueError, match=r"data.held_out is '.*give other data, or a share"):
        read_splits(read_examples, train, train, Mistakes())
    with pytest.raises(ValueError, match=r"data.held_out is 'none.jsonl': there is no such file"):
        read_splits(read_examples, train, "none.jsonl", mistakes)


def test_data_files_are_checked():
    with pytest.raises(ValueError, match="data.held_out is 1.0: give a share"):
        DataFile("x.jsonl", held_out=1.0)
    with pytest.raises(ValueError, match="data.max_tokens is 1"):
        DataFile("x.jsonl", max_tokens=1)


def test_the_order_of_a_messages_keys_moves_nothing_to_the_other_side_of_a_split(tmp_path: Path):
    usual = [{"role": "user", "content": "hi"}, {"role": "assistant", "name": "b", "content": "yo"}]
    turned = [{"content": "hi", "role": "user"}, {"content": "yo", "name": "b", "role": "assistant"}]
    assert prompt_key(tuple(usual)) == prompt_key(tuple(turned))
    # Files in the usual order are split as they always were.
    assert prompt_key(tuple(usual[:1])) == '[{"role": "user", "content": "hi"}]'
    assert prompt_key(tuple(usual[:1])) != prompt_key(({"role": "user", "content": "hi", "name": "b"},))
    trained = written(tmp_path / "x.jsonl", [{"prompt": usual[:1], "completion": "a"}])
    kept = written(tmp_path / "y.jsonl", [{"prompt": turned[:1], "completion": "b"}])
    mistakes = Mistakes()
    assert read_splits(read_examples, trained, kept, mistakes)[0] == []
    assert len(mistakes) == 1


def test_what_the_hash_holds_out_of_is_split_as_before():
    keys = [f"prompt {number}" for number in range(200)]
    assert held_out_keys(keys, 0.1) == {key for key in keys if is_held_out(key, 0.1)}
    assert held_out_keys(keys, 1.0) == set(keys)


def test_training_prompts_of_a_run_are_split_by_a_second_hash():
    keys = [key for number in range(200) if not is_held_out(key := f"prompt {number}", 0.1)]
    chosen = held_out_keys(keys, 0.1)
    assert chosen == held_out_keys(keys[::-1] * 2, 0.1)  # whatever their order, and however often they occur
    assert len(chosen) == round(0.1 * len(keys))
    assert not any(is_held_out(key, 0.1) for key in chosen)
    assert held_out_keys(keys, 0.0) == set()
    assert held_out_keys(keys[:9], 0.1) == set()  # too few: a person decides
    assert len(held_out_keys(keys[:10], 0.01)) == 1


def test_which_hash_has_chosen_is_known():
    one, other = (
        next(key for n in range(999) if is_held_out(key := json.dumps(f"p{n}"), 0.1) is first)
        for first in (True, False)
    )
    first, again = (Ranking("", json.loads(key), ("a", "b")) for key in (one, other))
    assert not chosen_again([first], 0.1)
    assert chosen_again([again], 0.1)
    assert not chosen_again([again], "file.jsonl")
    assert not chosen_again([], 0.1)
