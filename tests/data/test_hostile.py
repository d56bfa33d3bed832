"""Data files of strangers: each is refused in one line, or read, and none ends the process or takes its memory."""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

from proximo.data import Mistakes, formats, read_examples, read_rows, rows
from proximo.system.arrow import arrow_batches
from proximo.system.parquet import TableLimits, open_parquet
from tests.data.test_data import written

SMALL = TableLimits(rows=10_000, values=100_000, size=8 << 20)


def refusal(path: Path) -> str:
    """Why a file is not read: one line."""
    with pytest.raises(ValueError, match="cannot be read") as caught:
        read_rows(str(path), Mistakes())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def as_arrow(path: Path, table: pa.Table, **options: Any) -> Path:
    with pa.OSFile(str(path), "wb") as file, _writer(file, table, options) as writer:
        writer.write_table(table)
    return path


def _writer(file: Any, table: pa.Table, options: Mapping[str, Any]) -> Any:
    return ipc.new_file(file, table.schema, options=ipc.IpcWriteOptions(**options))


def reason(read: Any, path: Path) -> str:
    """Why a file exceeds small limits: one line."""
    with path.open("rb") as file, pytest.raises(ValueError, match="^[^\n]*$") as caught:
        _ = [*found] if isinstance(found := read(file, SMALL), Iterator) else found
    return str(caught.value)


def refused_in_one_line(path: Path) -> None:
    """Read, or refused with a ValueError of one line."""
    try:
        read_rows(str(path), Mistakes())
    except ValueError as error:
        reason = str(error)
    else:
        return
    assert "\n" not in reason


# Parquet


def test_what_a_parquet_file_holds_is_known_before_it_is_read(tmp_path: Path):
    """Equal values take nearly nothing in a file: sixty million of them did not end in minutes."""
    path = tmp_path / "x.parquet"
    numbers = np.zeros(200_000, dtype=np.int8)
    pq.write_table(pa.table({"n": numbers[:20_000]}), path)
    assert reason(open_parquet, path).startswith("it has 20,000 rows, more than the 10,000")
    pq.write_table(pa.table({"n": pa.ListArray.from_arrays(np.array([0, 200_000], dtype=np.int32), numbers)}), path)
    assert reason(open_parquet, path).startswith("it has 200,000 values, more than the 100,000")
    texts = pa.array(["x" * 10_000])
    shared = pa.DictionaryArray.from_arrays(np.zeros(5000, dtype=np.int32), texts)
    pq.write_table(pa.table({"t": shared}), path)
    assert path.stat().st_size < 2000
    assert reason(open_parquet, path).startswith("its values take 47 MiB, more than the 8 MiB")
    nested = pa.ListArray.from_arrays(np.array([0, 5000], dtype=np.int32), shared.cast(pa.string()))
    pq.write_table(pa.table({"t": nested}), path)
    assert reason(open_parquet, path).startswith("its values take 47 MiB")
    pq.write_table(
        pa.table({"t": ["x" * 10_000] * 5000}), path, use_dictionary=False, column_encoding="DELTA_BYTE_ARRAY"
    )
    assert reason(open_parquet, path).startswith("its values take")


def test_a_footer_that_claims_less_than_the_pages_hold_is_no_way_around(tmp_path: Path):
    path = tmp_path / "x.parquet"
    lists = pa.ListArray.from_arrays(np.array([0, 200_000], dtype=np.int32), np.zeros(200_000, dtype=np.int8))
    pq.write_table(pa.table({"n": lists}), path, compression="none", write_statistics=False)
    data, claimed = bytearray(path.read_bytes()), _zigzag(200_000)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    path.write_bytes(data[:footer] + data[footer:].replace(claimed, _zigzag(70_000)))
    assert pq.read_metadata(path).row_group(0).column(0).num_values == 70_000
    assert reason(open_parquet, path).startswith("it has 200,000 values")


def _zigzag(number: int) -> bytes:
    left, parts = number * 2, []
    while left > 127:
        parts.append(left & 127 | 128)
        left >>= 7
    return bytes([*parts, left])


@pytest.mark.parametrize(
    "options", [{}, {"data_page_version": "2.0", "compression": "zstd"}, {"use_dictionary": False}]
)
def test_honest_parquet_files_are_read(options: dict[str, Any], tmp_path: Path):
    said = [{"role": "user", "content": "hello " * 30}]
    table = pa.table(
        {
            "messages": [said] * 3000,
            "answer": [str(number) for number in range(3000)],
            "decimal": pa.array([1, None, 3] * 1000).cast(pa.decimal128(22, 2)),
            "when": pa.array([0, 1, 2] * 1000).cast(pa.timestamp("us")),
            "map": pa.array([[("a", 1)]] * 3000, pa.map_(pa.string(), pa.int64())),
            "none": pa.nulls(3000),
            "long": pa.array(["x"] * 3000, pa.large_string()),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=1000, **options)
    found = [dict(row.values) for row in read_rows(str(tmp_path / "x.parquet"), Mistakes())]
    assert found == table.to_pylist()


def test_columns_nested_too_deeply_are_refused(tmp_path: Path):
    kind = pa.int8()
    for _ in range(40):
        kind = pa.struct([("a", kind)])
    pq.write_table(pa.table({"a": pa.array([None], kind)}), tmp_path / "x.parquet")
    assert "nested more than 32 deep" in refusal(tmp_path / "x.parquet")


def test_damaged_tables_are_refused_in_one_line(tmp_path: Path):
    """Bytes changed anywhere: read, or refused with a ValueError. Arrow files were mapped, and ended the process."""
    random = np.random.default_rng(0)
    table = pa.table({"prompt": [f"{n}+1=" for n in range(200)], "l": [["a", "b"]] * 200, "d": ["x", "y"] * 100})
    pq.write_table(table, tmp_path / "x.parquet")
    as_arrow(tmp_path / "x.arrow", table.set_column(2, "d", table.column(2).dictionary_encode()))
    for name in ("x.parquet", "x.arrow"):
        whole = (tmp_path / name).read_bytes()
        for attempt in range(60):
            data = bytearray(whole)
            for place in random.integers(0, len(data), 1 + attempt % 8):
                data[place] = random.integers(0, 256)
            (tmp_path / name).write_bytes(data[: random.integers(0, len(data))] if attempt % 7 == 0 else data)
            refused_in_one_line(tmp_path / name)


# Arrow


def test_offsets_beyond_the_values_are_refused(tmp_path: Path):
    """They were followed: beyond the file's end that is a SIGBUS."""
    table = pa.table({"prompt": ["abc"] * 100})
    path = as_arrow(tmp_path / "x.arrow", table)
    data = bytearray(path.read_bytes())
    offsets = np.arange(0, 303, 3, dtype=np.int32).tobytes()
    place = data.index(offsets)
    data[place + 4 * 50 : place + 4 * 51] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(data)
    assert "not Arrow" in refusal(path)


def test_what_an_arrow_file_holds_is_bounded(tmp_path: Path):
    path = tmp_path / "x.arrow"
    many = np.array([0, 10**9], dtype=np.int32)
    as_arrow(path, pa.table({"n": pa.ListArray.from_arrays(many, pa.nulls(10**9))}))  # which take no byte at all
    assert reason(arrow_batches, path).startswith("it has 1,000,000,001 values")
    as_arrow(path, pa.table({"n": np.zeros(2_000_000, dtype=np.int64)}), compression="zstd")
    assert reason(arrow_batches, path).startswith("its values take")
    shared = pa.DictionaryArray.from_arrays(np.zeros(5000, dtype=np.int32), pa.array(["x" * 10_000]))
    as_arrow(path, pa.table({"t": shared}))
    assert reason(arrow_batches, path).startswith("its values take 47 MiB")
    as_arrow(path, pa.table({"u": pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])}))
    assert "of type sparse_union" in reason(arrow_batches, path)


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"compression": "lz4"}])
def test_honest_arrow_files_are_read(options: dict[str, Any], tmp_path: Path):
    table = pa.table(
        {
            "prompt": pa.array(["a", "b" * 50, None] * 100, pa.string_view()),
            "kind": pa.array(["x", None, "y"] * 100).dictionary_encode(),
            "messages": [[{"role": "user", "content": "hi"}]] * 300,
        }
    )
    path = as_arrow(tmp_path / "x.arrow", table, **options)
    assert [dict(row.values) for row in read_rows(str(path), Mistakes())] == table.to_pylist()


# Text


def test_a_huge_row_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(formats, "MAX_ROW", 1000)
    monkeypatch.setattr(rows, "MAX_TEXT", 500)
    mistakes = Mistakes()
    good = {"prompt": "1+1=", "completion": "2"}
    path = written(tmp_path / "x.jsonl", [{"a": "x" * 5000}, good, {**good, "prompt": "x" * 600}])
    assert len(read_examples(path, mistakes)) == 1
    first, second = mistakes
    assert first.endswith("x.jsonl:1: more than 0 MiB in one line: shorten it")
    assert second.endswith("the prompt has 600 characters, more than the 500 that are read: shorten it")


def test_too_many_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(formats, "MAX_ROWS", 5)
    for name, text in [("x.jsonl", "{}\n" * 9), ("x.json", json.dumps([{}] * 9)), ("x.csv", "a\n" + "1\n" * 9)]:
        (tmp_path / name).write_text(text)
        assert "more than" in refusal(tmp_path / name)


def test_half_a_surrogate_pair_anywhere_is_a_bad_row(tmp_path: Path):
    """In an answer it was a TypeError of the tokenizer, when the run had begun."""
    texts = ['{"a": "\\ud800"}', '{"a": {"b": ["\\udfff"]}}', '{"\\uDAAA": 1}', '{"a": "\\ud83d\\ude00"}']
    (tmp_path / "x.jsonl").write_text("\n".join(texts))
    mistakes = Mistakes()
    assert [dict(row.values) for row in read_rows(str(tmp_path / "x.jsonl"), mistakes)] == [{"a": "😀"}]
    assert all("half of a surrogate pair" in line for line in mistakes)
    assert len(mistakes) == 3


@pytest.mark.parametrize(
    "text",
    ["[" * 10**5, '{"a":' * 10**5, '{"a": ' + "9" * 5000 + "}", '{"a": "\\ud800"}', "", "\0", '{"a": NaN, "a": 1}'],
)
def test_odd_json_is_refused_or_read(text: str, tmp_path: Path):
    (tmp_path / "x.json").write_text(text)
    refused_in_one_line(tmp_path / "x.json")


def test_long_texts_in_tables_are_read(tmp_path: Path):
    (tmp_path / "x.csv").write_text(f"prompt,completion\n{'x' * 300_000},y\n")  # Python's own limit is 131,072
    [row] = read_rows(str(tmp_path / "x.csv"), Mistakes())
    assert len(row["prompt"]) == 300_000


# What is no file


def test_only_files_are_read_and_no_links_of_strangers(tmp_path: Path):
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"prompt": "a"}\n')
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").symlink_to(secret)
    for path in (data, data / "*.jsonl"):
        with pytest.raises(ValueError, match="is a symbolic link and is not followed"):
            read_rows(str(path), Mistakes())
    assert len(read_rows(str(data / "train.jsonl"), Mistakes())) == 1  # typed by the user
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "is a pipe" in refusal(tmp_path / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s.jsonl"))
        assert "cannot be read" in refusal(tmp_path / "s.jsonl")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.json", "[" + "[]," * 2000 + "1]"),
        ("x.json", '{"a": [' + "{}," * 2000 + "1]}"),
        ("x.jsonl", ('{"a": [' + "[]," * 50 + "1]}\n") * 200),
        ("x.csv", ",".join(f"c{n}" for n in range(100)) + "\n" + ("," * 99 + "\n") * 100),
    ],
    ids=["lists", "objects", "lines", "columns"],
)
def test_a_text_of_many_small_values_is_refused_before_they_are_made(name: str, text: str, tmp_path: Path, monkeypatch):
    """`[],` takes three bytes in a file and eighty in memory: 400 MB took 9 GB."""
    monkeypatch.setattr(formats, "MAX_VALUES", 4000)
    (tmp_path / name).write_text(text)
    assert "more than the 4,000 values that are read" in refusal(tmp_path / name)


def test_texts_with_many_commas_are_no_values(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_VALUES", 10)
    for name in ("x.json", "x.jsonl"):
        (tmp_path / name).write_text(f"{json.dumps({'prompt': 'so, [[' + chr(92) * 3 + chr(34) + ', {' * 100})}\n")
        assert len(read_rows(str(tmp_path / name), Mistakes())) == 1


def test_a_table_is_read_line_by_line_and_a_json_file_has_a_bound(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_JSON", 1000)
    (tmp_path / "x.json").write_text("[" + " " * 1000 + "]")
    assert "save it as JSONL" in refusal(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{"a": 1}\n' * 200)
    assert len(read_rows(str(tmp_path / "x.json"), Mistakes())) == 200
    monkeypatch.setattr(formats, "MAX_ROW", 1000)
    (tmp_path / "x.csv").write_text("a,b\n1,2\n" + "\0" * 2000)
    assert "in one line: shorten it" in refusal(tmp_path / "x.csv")
    (tmp_path / "x.csv").write_text('\ufeffa,b\r\n"1\r\n2",3\r\n', newline="")
    [row] = read_rows(str(tmp_path / "x.csv"), Mistakes())
    assert dict(row.values) == {"a": "1\r\n2", "b": "3"}


def test_too_little_memory_is_said_in_a_line(tmp_path: Path, monkeypatch):
    def read(text: bytes) -> Any:
        raise MemoryError

    (tmp_path / "x.json").write_text("[]")
    monkeypatch.setattr(formats, "_value", read)
    assert "there is not enough memory" in refusal(tmp_path / "x.json")
