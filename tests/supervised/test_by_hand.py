"""Rankings by a person: what is asked, what is written, and how a session goes on."""

import io
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from proximo.cli import keys, main
from proximo.cli.commands import rank
from proximo.data import DataFile, Mistakes, read_rankings
from proximo.runs.files import ROLLOUTS
from proximo.supervised import by_hand
from proximo.supervised.by_hand import (
    RankConfig,
    RankingFile,
    RankingQuestion,
    RankingSession,
    first_questions,
    questions,
)
from proximo.supervised.encoding import prepare
from tests.rows import write_rows
from tests.supervised.test_encoding import TINY
from tests.supervised.test_pairs import hand_made

CHAT = [{"role": "user", "content": "größer?"}]
ROWS = [
    {"prompt": "1+1=", "completions": ["2", "3", "4", "2"]},
    {"prompt": CHAT, "completions": [[{"role": "assistant", "content": "yes"}], "no"]},
    {"prompt": "same", "completions": ["once", "once"]},
    {"prompt": "pair", "chosen": "good", "rejected": "bad", "margin": 0.5},
    {"prompt": "list", "ranking": ["a", "b", "c"]},
]


@pytest.fixture
def data(tmp_path) -> str:
    return write_rows(tmp_path / "data.jsonl", ROWS)


@pytest.fixture
def out(tmp_path) -> str:
    return str(tmp_path / "out" / "pairs.jsonl")


def answered(lines: str, arguments: list[str], monkeypatch) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["rank", *arguments])


def rows_of(out: str) -> list[dict]:
    return [json.loads(line) for line in Path(out).read_text().splitlines()]


# What is asked


def test_each_prompt_is_asked_once_with_different_completions(data, out):
    asked = questions(RankConfig(data, out))
    assert sorted(str(each.prompt) for each in asked) == sorted(["1+1=", str(tuple(CHAT)), "pair", "list"])
    assert all(len({*each.completions}) == 2 for each in asked)


def test_order_depends_on_the_seed_alone(data, out, tmp_path):
    """Neither places in the file nor which completion was better shows in the order."""
    backwards = [
        {**row, "chosen": row["rejected"], "rejected": row["chosen"]} if "chosen" in row else row for row in ROWS[::-1]
    ]
    other = write_rows(tmp_path / "other.jsonl", backwards)
    assert questions(RankConfig(data, out)) == questions(RankConfig(other, out))
    first = [questions(RankConfig(data, out, seed=seed))[0] for seed in range(20)]
    assert {str(each.prompt) for each in first} == {"1+1=", str(tuple(CHAT)), "pair", "list"}
    assert {each.completions for each in first if each.prompt == "pair"} == {("good", "bad"), ("bad", "good")}


def test_more_at_a_time_and_more_times(data, out):
    three = {str(each.prompt): {*each.completions} for each in questions(RankConfig(data, out, completions=3))}
    assert (three["1+1="], three["list"], three["pair"]) == ({"2", "3", "4"}, {"a", "b", "c"}, {"good", "bad"})
    eight = write_rows(Path(out).parent.parent / "eight.jsonl", [{"prompt": "p", "completions": [*"abcdefgh"]}])
    times = questions(RankConfig(eight, out, per_prompt=3))
    assert len(times) == 3
    assert len({text for each in times for text in each.completions}) == 6
    assert questions(RankConfig(eight, out))[0] in times


def test_a_run_is_asked_without_what_was_cut_off(tmp_path, out):
    run = hand_made(tmp_path / "run")
    asked = questions(RankConfig(run, out, completions=9))
    everything = {text for each in asked for text in each.completions}
    assert {"wrong", "right", "right too", "wrong too"} <= everything
    assert not {"cut"} & everything
    assert any(isinstance(each.prompt, tuple) for each in asked)
    assert len(questions(RankConfig(run, out, steps="3:4"))) < len(asked)


REFUSED = {
    "nothing there": (["nowhere"], "there is no run folder and no file"),
    "no name": ([], "rank needs one run folder or one file"),
    "two names": (["data.jsonl", "b"], "rank needs one run folder"),
    "a wrong flag": (["data.jsonl", "--complitions", "3"], "the nearest is '--completions'"),
    "too many": (["data.jsonl", "--completions", "12"], "completions is 12: give 2 to 9"),
    "none": (["data.jsonl", "--per-prompt", "0"], "per_prompt is 0"),
    "steps": (["data.jsonl", "--steps", "4"], "give A:B"),
    "a bad row": (["bad.jsonl"], "bad.jsonl:2: completions is no list"),
    "one completion": (["single.jsonl"], "no prompt in it has two different completions"),
    "no rollouts": (["empty"], "it has no rollouts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_written(case, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "bad.jsonl", [ROWS[0], {"prompt": "a", "completions": "b"}])
    write_rows(tmp_path / "single.jsonl", [{"prompt": "a", "completions": ["b"]}])
    (tmp_path / "empty" / ROLLOUTS).mkdir(parents=True)
    arguments, wanted = REFUSED[case]
    with pytest.raises(SystemExit) as stopped:
        answered("1\n", [*arguments, "--out", "new.jsonl"], monkeypatch)
    error = capsys.readouterr().err
    assert (stopped.value.code, wanted in error) == (2, True), error
    assert not (tmp_path / "new.jsonl").exists()


# What is written


def test_answers_become_rankings_that_stages_read(data, out, monkeypatch, capsys):
    lines = "21\n12\nx\n\n21\n12\n"
    assert answered(lines, [data, "--out", out, "--completions", "3"], monkeypatch) == 0
    asked = questions(RankConfig(data, out, completions=3))
    printed = capsys.readouterr()
    assert "4 ranked" in printed.out
    assert "'x' is no answer" in printed.err
    wanted = [[1, 0, 2], [0, 1, 2], [1, 0, 2], [0, 1, 2]]
    best_first = [
        tuple(each.completions[number] for number in order if number < len(each.completions))
        for each, order in zip(asked, wanted, strict=True)
    ]
    read = read_rankings(out, Mistakes())
    assert [ranking.prompt for ranking in read] == [each.prompt for each in asked]
    assert [ranking.completions for ranking in read] == best_first
    # reward-model and dpo prepare their data with this.
    assert len(prepare(DataFile(out, held_out=0.0), read_rankings, TINY).train) == 4


@pytest.mark.parametrize(
    ("answer", "count", "order"),
    [
        ("1", 2, [0, 1]),
        ("2", 2, [1, 0]),
        ("2 > 1", 2, [1, 0]),
        ("31", 3, [2, 0, 1]),
        ("312", 3, [2, 0, 1]),
        ("3, 1", 4, [2, 0]),
        ("3", 3, None),
        ("3", 2, None),
        ("11", 3, None),
        ("0", 2, None),
        ("", 2, None),
        ("²", 3, None),
    ],
)
def test_order_of_an_answer(answer, count, order):
    assert rank._order(answer, count) == order


def test_a_session_goes_on_where_it_was_stopped(data, out, monkeypatch, capsys):
    """A ranking and a tie are not asked again, a skipped prompt is; an interrupted row is removed."""
    asked = questions(RankConfig(data, out))
    answered("1\nt\ns\nq\n", [data, "--out", out], monkeypatch)
    assert "1 ranked" in (printed := capsys.readouterr().out)
    assert "1 tie in pairs.ties.jsonl; 1 skipped\n2 left" in printed
    with open(out, "a") as file:
        file.write('{"prompt": "1+')
    again = RankingSession(asked, RankingFile(out))
    assert (again.earlier, again.left, again.question) == (2, 2, asked[2])
    answered("2\n1\n", [data, "--out", out], monkeypatch)
    assert [row["prompt"] for row in rows_of(out)] == [
        row if isinstance(row, str) else [dict(each) for each in row]
        for row in (asked[0].prompt, asked[2].prompt, asked[3].prompt)
    ]
    assert answered("", [data, "--out", out], monkeypatch) == 0
    assert "left" not in capsys.readouterr().out.splitlines()[-2]


def test_without_an_answer_nothing_is_written_and_nothing_comes_next(data, out, monkeypatch, capsys):
    answered("q\n", [data, "--out", out], monkeypatch)
    printed = capsys.readouterr().out
    assert f"0 ranked, nothing is written to {out}; 0 skipped\n4 left: the same command goes on\n" in printed
    assert "next:" not in printed
    assert not Path(out).exists()
    answered("1\nq\n", [data, "--out", out], monkeypatch)
    assert f"1 ranked, written to {out}; 0 skipped" in (printed := capsys.readouterr().out)
    assert f"next: proximo dpo {out} --model MODEL" in printed


def test_a_list_in_a_cell_of_a_table_is_read(tmp_path, out):
    path = tmp_path / "x.csv"
    path.write_text('prompt,completions\n1+1=,"[""2"", ""3""]"\n', newline="")
    [asked] = questions(RankConfig(str(path), out))
    assert (asked.prompt, sorted(asked.completions)) == ("1+1=", ["2", "3"])
    path.write_text('prompt,ranking\n1+1=,"[""2"", ""3""]"\n', newline="")
    [ranking] = read_rankings(str(path), Mistakes())
    assert ranking.completions == ("2", "3")
    path.write_text("prompt,completions\n1+1=,2 or 3\n", newline="")
    with pytest.raises(ValueError, match="line 2: completions is no list: .* in a table as JSON"):
        questions(RankConfig(str(path), out))


def test_rows_without_completions_are_told_what_rank_needs(tmp_path, out):
    """`rank` has no flags for columns."""
    path = tmp_path / "x.csv"
    path.write_text("question,answer\n1+1=,2\n", newline="")
    with pytest.raises(ValueError, match="rank needs completions, and the columns are question, answer: give") as said:
        questions(RankConfig(str(path), out))
    assert "_column" not in str(said.value)
    data = write_rows(tmp_path / "x.jsonl", [{"question": "1+1=", "ranking": ["2", "3"]}])
    with pytest.raises(ValueError, match="no column 'prompt', only question, ranking: give the prompt") as said:
        questions(RankConfig(data, out))
    assert "_column" not in str(said.value)


def test_undo_leaves_the_files_as_they_were(data, out):
    session = RankingSession(questions(RankConfig(data, out)), RankingFile(out))
    session.rank([0, 1])
    before = Path(out).read_bytes()
    session.rank([1, 0])
    session.tie()
    session.skip()
    for _ in range(3):
        assert session.take_back()
    assert Path(out).read_bytes() == before
    assert (session.left, session.count("ranked")) == (3, 1)
    session.rank([0, 1])
    assert len(rows_of(out)) == 2


def test_undo_removes_nothing_that_another_wrote(data, out):
    session = RankingSession(questions(RankConfig(data, out)), RankingFile(out))
    session.rank([0, 1])
    with open(out, "a") as file:
        file.write('{"prompt": "another", "chosen": "a", "rejected": "b"}\n')
    with pytest.raises(ValueError, match="changed by something else"):
        session.take_back()
    assert len(rows_of(out)) == 2


def test_nothing_is_written_through_a_link(data, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("")
    answers = RankingFile(str(tmp_path / "pairs.jsonl"))
    (tmp_path / "pairs.jsonl").symlink_to(secret)
    with pytest.raises(OSError, match="symbolic link"):
        answers.rank(RankingQuestion("p", ("a", "b")), [0, 1])
    assert secret.read_text() == ""


def test_rankings_of_another_kind_are_not_touched(data, out, tmp_path, monkeypatch, capsys):
    other = write_rows(tmp_path / "other.jsonl", [{"answer": 3}])
    with pytest.raises(SystemExit):
        answered("1\n", [data, "--out", other], monkeypatch)
    assert "rows that are no rankings" in capsys.readouterr().err
    assert rows_of(other) == [{"answer": 3}]


def test_a_file_without_a_last_line_feed_keeps_its_last_row(data, out, tmp_path):
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"prompt": "pair", "chosen": "good", "rejected": "bad"}')
    session = RankingSession(questions(RankConfig(data, str(mine))), RankingFile(str(mine)))
    session.rank([0, 1])
    assert (session.earlier, len(rows_of(str(mine)))) == (1, 2)


# The terminal


def test_text_cannot_steer_the_terminal(tmp_path, out, monkeypatch, capsys):
    data = write_rows(tmp_path / "x.jsonl", [{"prompt": "\x1b[2J", "completions": ["\x1b]0;t\x07", "[bold]b[/]"]}])
    answered("t\n", [data, "--out", out], monkeypatch)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "[bold]b[/]" in printed


PRESSED = {
    "a number": (b"2", 2, "2"),
    "the left arrow": (b"\x1b[D", 2, "1"),
    "the right arrow": (b"\x1bOC", 2, "2"),
    "an arrow among three": (b"\x1b[D3\x1b[C1", 3, "31"),
    "twice the same, and taken back": (b"33\x7f21", 3, "21"),
    "only the best two": (b"41\n", 5, "41"),
    "a letter": (b"xu", 2, "u"),
    "keys that mean nothing": (b"\x1b[1;5D\x1b[15~\x1bx3\n", 3, "3"),
    "an end": (b"\x04", 2, "q"),
}


@pytest.mark.parametrize("case", PRESSED)
def test_keys(case, monkeypatch):
    typed, count, answer = PRESSED[case]
    person, terminal = os.openpty()
    try:
        with open(terminal, closefd=False) as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            with keys.single_keys():
                os.write(person, typed)
                assert rank._pressed(count) == answer
    finally:
        os.close(person)
        os.close(terminal)


def test_keys_that_were_typed_before_count(monkeypatch):
    person, terminal = os.openpty()
    try:
        with open(terminal, closefd=False) as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            os.write(person, b"2")  # while the terminal still waits for whole lines
            with keys.single_keys():
                os.write(person, b"1")
                assert [rank._pressed(2), rank._pressed(2)] == ["2", "1"]
    finally:
        os.close(person)
        os.close(terminal)


# Files that are none


def test_what_cannot_be_written_is_refused_before_anything_is_asked(data, tmp_path, capsys, monkeypatch):
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.mkfifo(tmp_path / "a.ties.jsonl")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "b.ties.jsonl").symlink_to("secret")
    (tmp_path / "zeros.jsonl").symlink_to("/dev/zero")
    for name, what in (("pipe", "a pipe"), ("a", "a pipe"), ("b", "a symbolic link"), ("zeros", "a device")):
        with pytest.raises(SystemExit):
            answered("1\nt\n", [data, "--out", str(tmp_path / f"{name}.jsonl")], monkeypatch)
        shown = capsys.readouterr()
        assert what in shown.err
        assert not shown.out
    assert (tmp_path / "secret").read_text() == "secret"


@pytest.mark.parametrize(
    "text", ["my notes", '{"prompt": "p", "chosen": "a", "rejected": "b"}\nnotes', "\0\xff", "[1]"]
)
def test_text_that_was_not_written_here_is_not_cut_off(data, tmp_path, text):
    path = tmp_path / "notes.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="its last line is no ranking"):
        RankingFile(str(path))
    assert path.read_text() == text


@pytest.mark.parametrize("tail", ['{"prompt": "p", "cho', "{", '{"promp'])
def test_a_row_that_a_crash_cut_off_is_removed(data, tmp_path, tail):
    whole = '{"prompt": "p", "chosen": "a", "rejected": "b"}\n'
    path = tmp_path / "pairs.jsonl"
    path.write_text(whole + tail)
    RankingFile(str(path))
    assert path.read_text() == whole


STORED = {"group": [0, 0], "prompt": ["p", "p"], "messages": [None, None], "text": ["a", "b"], "truncated": [False] * 2}


@pytest.mark.parametrize(
    "column",
    [
        {"group": [[0], [0]]},
        {"group": [None, None]},
        {"prompt": [1, 1]},
        {"messages": [1, 1]},
        {"text": [b"a", b"b"]},
        {"text": ["a", None]},
        {"truncated": ["no", "no"]},
    ],
    ids=str,
)
def test_columns_that_no_run_writes_are_refused(tmp_path, out, column):
    stored(tmp_path / "run", column)
    with pytest.raises(ValueError, match=f"has a column {next(iter(column))} that no run writes"):
        questions(RankConfig(str(tmp_path / "run"), out))


def test_messages_that_are_none_are_left_out(tmp_path, out):
    stored(tmp_path / "run", {"messages": ["[" * 100_000] * 2})
    with pytest.raises(ValueError, match="no prompt in it has two different completions"):
        questions(RankConfig(str(tmp_path / "run"), out))


def stored(folder: Path, columns: dict[str, list]) -> None:
    (folder / ROLLOUTS).mkdir(parents=True)
    pq.write_table(pa.table(STORED | columns), folder / ROLLOUTS / "step-000001.parquet")


def test_the_end_names_what_reads_the_rankings_only_where_there_are_some(data, out, capsys, monkeypatch):
    assert answered("q\n", [data, "--out", out], monkeypatch) == 0
    assert "next:" not in capsys.readouterr().out
    spaced = out.replace("pairs", "my pairs")
    assert answered("1\nq\n", [data, "--out", spaced], monkeypatch) == 0
    assert f"next: proximo dpo '{spaced}' --model MODEL" in capsys.readouterr().out


# Large files


@pytest.fixture
def large(tmp_path, monkeypatch) -> str:
    """A file of which only the first rows are read before the first question."""
    monkeypatch.setattr(by_hand, "BEFORE_OTHERS", 400)
    rows = [{"prompt": f"{number}", "completions": ["good", "bad"]} for number in range(100)]
    return write_rows(tmp_path / "large.jsonl", rows)


def test_the_first_question_of_a_large_file_comes_before_the_others_are_read(large, out):
    config = RankConfig(large, out)
    first, everything = first_questions(config), questions(config)
    assert 1 < len(first) < 12
    assert [each for each in everything if each in first] == first
    session = RankingSession(first, RankingFile(out), lambda: everything)
    assert (session.question, session.is_complete) == (first[0], False)
    session.rank([0, 1])
    asked = [first[0]]
    while session.question is not None:
        asked.append(session.question)
        session.skip()
    assert asked == [first[0], *(each for each in everything if each != first[0])]
    while session.take_back():
        pass
    assert (session.question, session.left, session.earlier) == (first[0], 100, 0)
    session.rank([1, 0])
    again = RankingSession(first[:1], RankingFile(out), lambda: everything)
    assert (again.is_complete, again.left, again.earlier) == (True, 99, 1)
    assert again.question == next(each for each in everything if each != first[0])


def test_a_large_file_is_ranked_whole_and_what_is_wrong_in_it_is_told_after_the_first_answer(
    large, out, monkeypatch, capsys
):
    assert answered("1\n" * 100, [large, "--out", out], monkeypatch) == 0
    assert len({row["prompt"] for row in rows_of(out)}) == len(rows_of(out)) == 100
    assert "more than" in capsys.readouterr().out
    with Path(large).open("a") as file:
        file.write('{"prompt": "no"}\n')
    Path(out).unlink()
    with pytest.raises(SystemExit):
        answered("1\n1\n", [large, "--out", out], monkeypatch)
    assert len(rows_of(out)) == 1
    assert "large.jsonl:101: rank needs completions" in capsys.readouterr().err
    write_rows(Path(large), [{"prompt": "no"}, *({"prompt": str(n), "completions": ["a", "b"]} for n in range(100))])
    assert first_questions(RankConfig(large, out)) == []


def test_small_files_and_tables_are_read_whole(data, out, tmp_path, large):
    pq.write_table(pa.table({"prompt": ["a"] * 100, "completions": [["b", "c"]] * 100}), tmp_path / "large.parquet")
    assert first_questions(RankConfig(str(tmp_path / "large.parquet"), out)) == []
    assert first_questions(RankConfig(data, out)) == []
    assert first_questions(RankConfig(str(tmp_path / "nowhere.jsonl"), out)) == []
