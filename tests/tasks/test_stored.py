"""Large files: problems made when they are drawn are those of a file that is kept in memory."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

import proximo
from proximo.data import Mistakes, read_rows, row_copies, stable_hash, stored
from proximo.data.row_copies import copied, copies_folder
from proximo.data.stored import stored_rows
from proximo.rewards import ExactMatch
from proximo.runs.ledger import check_ledger
from proximo.tasks import File, Mixture, Source, row_index
from proximo.tasks import stored as stored_problems
from proximo.tasks.draws import shuffled
from proximo.tasks.sources import recognising
from proximo.tasks.sources.mixture import data_remarks, storage_words
from proximo.tasks.sources.recognising import recognise
from proximo.tasks.stored import StoredProblems
from proximo.types import Problem
from tests.api.settings import small
from tests.runs.test_resume import assert_same, numbers

Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Files of more than 50 rows are large, and batches of their copies small."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stored, "IN_MEMORY", 50)
    for module in (stored, row_copies):
        monkeypatch.setattr(module, "TOGETHER", 16)


def sums(count: int = 300, first: int = 0) -> Rows:
    return [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "n": n} for n in range(first, first + count)]


def table(path: Path, rows: Rows, **options: Any) -> str:
    parquet.write_table(pa.Table.from_pylist(rows), path, **options)
    return str(path)


def refusal(path: str) -> str:
    """Why a file is not read; empty if it is."""
    try:
        File(path, skip_bad=True).size("train")
    except ValueError as error:
        return str(error)
    return ""


def both(task: File, monkeypatch: pytest.MonkeyPatch) -> tuple[File, File]:
    """The task as it is read from disk, and as it is read in memory."""
    large, in_memory = replace(task), replace(task)
    assert isinstance(large._problems, StoredProblems)
    with monkeypatch.context() as patch:
        patch.setattr(stored, "IN_MEMORY", 10**6)
        assert not isinstance(in_memory._problems, StoredProblems)
    return large, in_memory


def assert_alike(large: File, in_memory: File) -> None:
    for split in ("train", "held_out"):
        assert large.size(split) == in_memory.size(split)
        for index in range(large.size(split) + min(large.size(split), 5)):
            assert large.problem(index, split, 7) == in_memory.problem(index, split, 7)
    assert large.remarks == in_memory.remarks


def too_long(limit: int):
    """Complaints about prompts of more characters."""

    def complaints(problems: Sequence[Problem]) -> list[str | None]:
        return [None if len(problem.prompt) <= limit else "the prompt is too long" for problem in problems]

    return complaints


# The same as in memory


def test_splits_order_and_problems_are_those_of_a_file_in_memory(tmp_path: Path, monkeypatch):
    task = File(table(tmp_path / "x.parquet", sums(), row_group_size=37))
    large, in_memory = both(task, monkeypatch)
    assert_alike(large, in_memory)
    assert 10 < large.size("held_out") < 60
    assert large.storage_words == "read from disk as they are drawn; all rows were checked"
    assert in_memory.storage_words == "in memory, all checked"
    assert large.check(too_long(100)) == []
    assert large.storage_words.endswith("and the tokens of 300")
    assert_alike(large, in_memory)


def test_several_files_conversations_and_repeated_prompts_are_read_alike(tmp_path: Path, monkeypatch):
    asked = [{"role": "user", "content": "12+7="}]
    rows = [{"messages": [{**asked[0], "content": f"{n % 90}+1="}], "label": f"{n % 90 + 1}"} for n in range(130)]
    table(tmp_path / "a-0.parquet", rows[:41])
    table(tmp_path / "a-1.parquet", rows[41:], row_group_size=11)
    task = File(str(tmp_path / "a-*.parquet"), prompt_column="messages", system="Add.", chat=True)
    large, in_memory = both(task, monkeypatch)
    assert_alike(large, in_memory)
    [line] = large.remarks
    assert line.startswith(f"{task.path}: 40 of 90 prompts occur more than once, 40 rows more than prompts, such as")


def test_held_out_files_second_hashes_and_pass_rates_are_alike(tmp_path: Path, monkeypatch):
    train, test = table(tmp_path / "a.parquet", sums()), table(tmp_path / "b.parquet", sums(70, first=500))
    assert_alike(*both(File(train, held_out=test), monkeypatch))
    with pytest.raises(ValueError, match="which is trained on"):
        File(train, held_out=train).size("train")
    kept = [row for row in sums() if stable_hash("held_out", json.dumps(row["prompt"])) >= 0.1 * 2**64]
    again = File(table(tmp_path / "c.parquet", kept))
    large, in_memory = both(again, monkeypatch)
    assert_alike(large, in_memory)
    assert "by a second hash" in large.remarks[0]
    rated = [row | {"pass_rate": row["n"] / 300} for row in sums()]
    large, in_memory = both(File(table(tmp_path / "d.parquet", rated), keep_pass_rate=(0.2, 0.5)), monkeypatch)
    assert_alike(large, in_memory)
    assert large.size("train") < 100


def test_bad_rows_are_refused_or_left_out_alike(tmp_path: Path, monkeypatch):
    rows = sums()
    rows[3]["prompt"], rows[120]["answer"], rows[200]["prompt"] = None, " ", "a\0b"
    task = File(table(tmp_path / "x.parquet", rows))
    refusals = []
    for limit in (50, 1000):
        monkeypatch.setattr(stored, "IN_MEMORY", limit)
        with pytest.raises(ValueError, match="with bad rows") as caught:
            replace(task).size("train")
        refusals.append(str(caught.value))
    assert refusals[0] == refusals[1]
    assert "x.parquet, row 121: answer is empty" in refusals[0]
    monkeypatch.setattr(stored, "IN_MEMORY", 50)
    large, in_memory = both(replace(task, skip_bad=True), monkeypatch)
    assert_alike(large, in_memory)
    assert large.check(too_long(100)) == in_memory.check(too_long(100))
    monkeypatch.setattr(stored_problems, "NAMED", 2)
    with pytest.raises(ValueError, match=r"3 of 300 rows are bad, more than the 2 that can be left out.*row 4: "):
        replace(task, skip_bad=True).size("train")


def test_prompts_that_are_held_out_elsewhere_are_refused(tmp_path: Path, monkeypatch):
    train = File(table(tmp_path / "a.parquet", sums()), held_out=0.0)
    other = File(table(tmp_path / "b.parquet", sums(60, first=290)), held_out=1.0)
    mixed = Mixture((Source("a", train), Source("b", other, weight=0.0)))
    with pytest.raises(ValueError, match="10 training prompts of a are also held out, such as a-"):
        mixed.check(too_long(100))
    assert storage_words(mixed).startswith("a read from disk as they are drawn")
    with pytest.raises(ValueError, match=r"a.parquet, row 291: this prompt is also in .*b.parquet"):
        File(train.path, held_out=other.path).size("train")
    large, in_memory = both(File(train.path, held_out=other.path, skip_bad=True), monkeypatch)
    assert_alike(large, in_memory)


def test_an_order_takes_four_bytes_a_row_and_is_that_of_a_list():
    order = list(range(1000))
    Random(stable_hash("shuffle", 1000, 3, 0)).shuffle(order)
    assert [shuffled(index, 1000, 3) for index in range(1000)] == order


# Tokens


def test_long_prompts_are_looked_for_among_the_longest_and_in_a_sample(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(stored_problems, "LONGEST", 4)
    monkeypatch.setattr(stored_problems, "SAMPLED", 1)
    rows = sums()
    for number in (7, 90, 91, 92, 93, 211):
        rows[number]["prompt"] = f"{number}" * 50
    task = File(table(tmp_path / "x.parquet", rows), held_out=0.0)
    with pytest.raises(ValueError, match=r"x.parquet, row (91|92|93|94|212): the prompt is too long"):
        task.check(too_long(90))
    large, in_memory = both(replace(task, skip_bad=True), monkeypatch)
    lines = large.check(too_long(90))
    assert sorted(lines) == sorted(in_memory.check(too_long(90)))
    assert len(lines) == 5
    assert_alike(large, in_memory)


def test_a_prompt_that_proves_too_long_when_it_is_drawn_is_refused_or_passed_over(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(stored_problems, "LONGEST", 4)
    monkeypatch.setattr(stored_problems, "SAMPLED", 1)
    task = File(table(tmp_path / "x.parquet", sums()), held_out=0.0)

    def complaints(problems: Sequence[Problem]) -> list[str | None]:  # it has few characters, and many tokens
        return ["it has 99 tokens" if problem.prompt == "7+7=" else None for problem in problems]

    task.check(complaints)
    [index] = [index for index in range(300) if shuffled(index, 300, 0) == 7]
    assert task.problem(index + 1, "train", 0).unusable == ""
    with pytest.raises(ValueError, match=r"skip_bad=True.*\n.*x.parquet, row 8: it has 99 tokens"):
        task.problem(index, "train", 0)
    task = replace(task, skip_bad=True)
    task.check(complaints)
    assert task.problem(index, "train", 0).unusable == f"{task.path}, row 8: it has 99 tokens"


# Runs


@pytest.mark.usefixtures("ordinary_precision")
@pytest.mark.slow("trains and resumes runs")
def test_a_run_writes_the_bytes_of_one_in_memory_also_when_it_is_resumed(tmp_path: Path, monkeypatch):
    task = File(table(tmp_path / "x.parquet", sums()), reward=ExactMatch(last_number=True))
    config = small(task=task, steps=4)
    proximo.train(config, tmp_path / "disk", quiet=True)
    proximo.train(config, tmp_path / "parts", quiet=True, on_step=lambda step, _: step == 2)
    proximo.train(config, tmp_path / "parts", quiet=True, allow_change=["steps"])
    monkeypatch.setattr(stored, "IN_MEMORY", 1000)
    proximo.train(replace(config, task=replace(task)), tmp_path / "memory", quiet=True)
    assert_same(numbers(tmp_path / "disk"), numbers(tmp_path / "memory"))
    assert_same(numbers(tmp_path / "parts"), numbers(tmp_path / "disk"))


@pytest.mark.usefixtures("ordinary_precision")
@pytest.mark.slow("trains and resumes runs")
def test_a_row_that_is_passed_over_is_in_ledger_metrics_and_events(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(stored_problems, "LONGEST", 2)
    monkeypatch.setattr(stored_problems, "SAMPLED", 1)
    rows = sums(60)
    for number in range(0, 60, 3):
        rows[number]["prompt"] = f"{number}+" + "1" * 90  # more tokens than others, and not more characters
    for number in (1, 2):
        rows[number]["prompt"] = f"{number}+" + " " * 200
    task = File(table(tmp_path / "x.parquet", rows), held_out=0.0, skip_bad=True, reward=ExactMatch(last_number=True))
    config = small(task=task, evaluation=proximo.EvaluationOptions(problems=0), steps=4)

    def judged(self: StoredProblems, complaints: Any) -> list[str]:
        self._complaints = lambda problems: ["too long" if "111" in str(p.prompt) else None for p in problems]
        return []

    monkeypatch.setattr(StoredProblems, "check", judged)
    proximo.train(config, tmp_path / "whole", quiet=True)
    proximo.train(config, tmp_path / "parts", quiet=True, on_step=lambda step, _: step == 2)
    proximo.train(config, tmp_path / "parts", quiet=True, allow_change=["steps"])
    assert_same(numbers(tmp_path / "parts"), numbers(tmp_path / "whole"))
    proof = check_ledger(tmp_path / "whole")
    assert not proof.wrong
    metrics = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (tmp_path / "whole" / "events.jsonl").read_text().splitlines()]
    skipped = [event for event in events if "too long" in event["message"]]
    assert proof.states["passed_over"] == sum(row.get("passed_over", 0) for row in metrics) == len(skipped) > 0


def test_data_are_recognised_from_some_rows_and_the_line_says_so(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(recognising, "LOOKED_AT", 40)
    task, line = recognise(table(tmp_path / "x.parquet", sums()))
    assert line.startswith(f"data {task.path}: 300 rows, 40 of them looked at, TRL's shape")
    assert task.reward == ExactMatch(last_number=True)
    assert data_remarks(task) == []


# The copies


def test_values_of_all_kinds_are_copied_as_they_are(tmp_path: Path):
    count = 120
    columns = pa.table(
        {
            "text": pa.array(["a", None, "é" * 40] * 40),
            "kind": pa.array(["x", None, "y"] * 40).dictionary_encode(),
            "messages": [[{"role": "user", "content": "hi", "n": None}]] * count,
            "map": pa.array([[("a", 1)]] * count, pa.map_(pa.string(), pa.int64())),
            "when": pa.array([0, 1, None] * 40).cast(pa.timestamp("us")),
            "none": pa.nulls(count),
        }
    )
    parquet.write_table(columns, tmp_path / "x.parquet", row_group_size=13)
    rows = stored_rows(str(tmp_path / "x.parquet"), "data")
    assert rows is not None
    wanted = read_rows(str(tmp_path / "x.parquet"), Mistakes())
    assert list(rows) == [rows[index] for index in range(count)] == wanted
    assert rows[5:9] == wanted[5:9]
    assert [row.location for row in rows.spread(3)] == [wanted[index].location for index in (0, 40, 80)]
    with pytest.raises(IndexError):
        _ = rows[count]


def test_a_file_is_copied_and_checked_once(tmp_path: Path, monkeypatch):
    path = table(tmp_path / "x.parquet", sums())
    assert File(path).size("train")
    names = sorted(file.name for file in copies_folder().iterdir())
    assert [name.rpartition(".")[2] for name in names] == ["arrow", "index"] or len(names) == 2
    monkeypatch.setattr(row_index, "_made", None)
    monkeypatch.setattr(row_copies, "_copy", None)
    assert File(path).size("train") == File(path, held_out=0.1).size("train")
    os.rename(path, tmp_path / "y.parquet")  # named after the content
    assert copied(str(tmp_path / "y.parquet"), "data").name in names
    with pytest.raises(TypeError):
        File(path.replace("x.", "y."), system="Add.", chat=True).size("train")  # asks otherwise


def test_copies_that_nobody_reads_are_removed(tmp_path: Path):
    first = copied(table(tmp_path / "x.parquet", sums()), "data")
    long_ago = time.time() - row_copies.UNUSED - 10
    os.utime(first, (long_ago, long_ago))
    second = copied(table(tmp_path / "y.parquet", sums(200)), "data")
    assert [file.name for file in copies_folder().iterdir()] == [second.name]


def test_a_cache_of_others_and_a_damaged_copy_are_refused_in_one_line(tmp_path: Path):
    path = table(tmp_path / "x.parquet", sums())
    copy = copied(path, "data")
    copy.write_bytes(copy.read_bytes()[:2000])
    with pytest.raises(ValueError, match="a copy of rows, is damaged .*: remove it, and start again$"):
        File(path).size("train")
    copies_folder().chmod(0o777)
    with pytest.raises(ValueError, match=r"others can write there; set XDG_CACHE_HOME to a folder of your own[^\n]*$"):
        File(path).size("train")


# Strangers' files


def test_a_file_that_changes_while_it_is_copied_is_refused(tmp_path: Path, monkeypatch):
    path, write = table(tmp_path / "x.parquet", sums()), row_copies._write

    def meanwhile(*given: Any) -> None:
        write(*given)
        os.utime(path, (1, 1))

    monkeypatch.setattr(row_copies, "_write", meanwhile)
    with pytest.raises(ValueError, match="it changed while it was read"):
        File(path).size("train")
    assert not list(copies_folder().iterdir())


def test_what_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(row_copies, "MAX_BYTES", 100_000)
    monkeypatch.setattr(row_copies, "MAX_SHARED", 5000)
    rows = [{"prompt": "x" * 1000, "answer": "1"}] * 200
    path = table(tmp_path / "x.parquet", rows)
    assert os.stat(path).st_size < 5000
    with pytest.raises(ValueError, match="cannot be read, its values take"):
        File(path).size("train")
    path = table(tmp_path / "y.parquet", [{"prompt": "x" * 9000, "answer": "1"}] * 60)
    with pytest.raises(ValueError, match=r"its column 'prompt' has a page of 0 MiB from which rows take their texts"):
        File(path).size("train")
    assert not list(copies_folder().glob("*"))


def test_damaged_files_are_refused_in_one_line(tmp_path: Path):
    path = table(tmp_path / "x.parquet", sums(400), compression="none")
    whole, random = Path(path).read_bytes(), Random(0)
    for _ in range(20):
        data = bytearray(whole)
        for _ in range(3):
            data[random.randrange(len(data))] = random.randrange(256)
        Path(path).write_bytes(data)
        assert "\n" not in refusal(path)
