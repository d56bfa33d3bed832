"""A second start on the same rows encodes nothing, and has exactly the same rows."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from proximo.data import DataFile, read_examples, read_rankings
from proximo.data.examples import Columns
from proximo.data.rows import forget_rows
from proximo.supervised import encoding, kept_rows
from proximo.supervised.encoding import Prepared, prepare
from tests.supervised.test_encoding import TINY, chatml

CONVERSATION = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "so?"},
    {"role": "assistant", "content": "well"},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """Folder of the cache, in which rows of any number and time are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_rows, "LARGE", 0)
    monkeypatch.setattr(encoding, "SECONDS", -1.0)
    return tmp_path / "cache" / "proximo" / "tokens"


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """Number of rows of each part that was encoded."""
    counts, encode = [], encoding.encode
    monkeypatch.setattr(
        encoding, "encode", lambda t, items, *more: counts.append(len(items)) or encode(t, items, *more)
    )
    return counts


def chats(path: Path, rows: int = 30) -> DataFile:
    lines = [{"messages": [{"role": "user", "content": f"hi {number}"}, *CONVERSATION[1:]]} for number in range(rows)]
    lines += [{"prompt": f"{number}+1=", "completion": f"{number + 1}"} for number in range(rows)]
    lines += [{"text": "plain " * 5}, {"prompt": "long", "completion": "x" * 300}, {"messages": "no"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DataFile(str(path), max_tokens=200, skip_bad=True)


def parts(prepared: Prepared) -> tuple[object, ...]:
    limit = prepared.limit
    return prepared.train, prepared.held_out, prepared.mistakes.noted, limit, prepared.held_out_again, prepared.counts


def test_a_second_start_has_the_same_rows_and_encodes_none(tmp_path, folder, encoded):
    data, tokenizer = chats(tmp_path / "chats.jsonl"), chatml()
    first = prepare(data, read_examples, tokenizer, frozenset({1}))
    assert (len(encoded), len([*folder.iterdir()])) == (2, 1)
    second = prepare(data, read_examples, tokenizer, frozenset({1}))
    assert len(encoded) == 2
    assert parts(second) == parts(first)
    assert (second.counts, len(second.mistakes)) == (first.counts, 1)
    assert "1 left out at 200 tokens" in second.counts
    assert any(row.trained for row in second.train)
    assert all(type(token) is int for row in second.train for token in row.prompt)


def test_margins_and_rankings_are_kept(tmp_path, folder, encoded):
    path = tmp_path / "pairs.jsonl"
    lines = [{"prompt": f"{n}", "chosen": "a", "rejected": "b", "margin": n / 7} for n in range(20)]
    lines += [{"prompt": f"more {n}", "ranking": ["a", "b", "c"]} for n in range(20)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = (prepare(DataFile(str(path)), read_rankings, TINY) for _ in range(2))
    assert len(encoded) == 2
    assert parts(second) == parts(first)


def test_rows_are_encoded_anew_for_whatever_they_depend_on(tmp_path, folder, encoded):
    data = chats(tmp_path / "chats.jsonl")
    other = chatml()
    other.chat_template = str(other.chat_template).replace("\\n", "\\n\\n")
    named = partial(read_examples, columns=Columns(), chat=True)
    (tmp_path / "held.jsonl").write_text('{"prompt": "away", "completion": "yes"}\n')
    calls: list[Callable[[], Prepared]] = [
        lambda: prepare(data, read_examples, chatml()),
        lambda: prepare(data, read_examples, other),
        lambda: prepare(data, read_examples, TINY),
        lambda: prepare(data, read_examples, chatml(), {3}),
        lambda: prepare(data, named, chatml()),
        lambda: prepare(replace(data, too_long="cut"), read_examples, chatml()),
        lambda: prepare(replace(data, held_out=str(tmp_path / "held.jsonl")), read_examples, chatml()),
        lambda: prepare(chats(tmp_path / "chats.jsonl", rows=31), read_examples, chatml()),
    ]
    for number, call in enumerate(calls, 1):
        call()
        assert len(encoded) == 2 * number
        forget_rows()
    assert len([*folder.iterdir()]) == len(calls)


def test_what_is_not_known_to_repeat_is_not_kept(tmp_path, folder):
    data, today = chats(tmp_path / "chats.jsonl"), chatml()
    today.chat_template = f"{{{{ strftime_now('%d') }}}}{today.chat_template}"
    prepare(data, read_examples, today)
    prepare(data, lambda *given, **more: read_examples(*given, **more), chatml())
    with pytest.raises(ValueError, match="with bad rows"):
        prepare(replace(data, skip_bad=False), read_examples, chatml())
    assert not folder.exists()


def test_few_rows_and_quick_ones_are_not_kept(tmp_path, folder, monkeypatch):
    data = chats(tmp_path / "chats.jsonl")
    monkeypatch.setattr(encoding, "SECONDS", 60.0)
    prepare(data, read_examples, chatml())
    monkeypatch.setattr(encoding, "SECONDS", -1.0)
    monkeypatch.setattr(kept_rows, "LARGE", 1 << 20)
    prepare(data, read_examples, chatml())
    assert not folder.exists()


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b'{"words": 1}'])
def test_odd_files_are_thrown_away_and_made_again(tmp_path, folder, encoded, content):
    data = chats(tmp_path / "chats.jsonl")
    first = prepare(data, read_examples, TINY)
    [file] = folder.iterdir()
    whole = file.read_bytes()
    kept_rows.CACHE.write(file.name, content)  # whole, and no rows
    assert parts(prepare(data, read_examples, TINY)) == parts(first)
    assert (len(encoded), file.read_bytes()) == (4, whole)
