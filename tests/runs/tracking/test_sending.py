"""Each row is sent once, whatever happens to the run, to the tracker or to the process in between."""

import json
from pathlib import Path

import pytest

from proximo.runs.files import METRICS
from proximo.runs.tracking.sending import Sender
from tests.runs.tracking.folders import (
    add_finding,
    add_rollouts,
    add_row,
    add_step,
    finish,
    make_run,
    remembering,
    write_record,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", steps=2)


@pytest.fixture
def place(run: Path) -> Path:
    folder = run / "tracking" / "fresh"
    folder.mkdir(parents=True)
    return folder


def outcomes(kind) -> list[tuple[int, float]]:
    return [(call[1], call[2]["outcome"]) for call in kind.calls if call[0] == "metrics" and "outcome" in call[2]]


def named(kind, name: str) -> list[tuple]:
    return [call[1:] for call in kind.calls if call[0] == name]


def test_everything_is_sent_once_and_in_order(run: Path, place: Path):
    kind = remembering()
    sender = Sender(run, place, kind)
    sender.send(is_over=False)
    add_step(run, 3)
    add_finding(run, 3)
    add_row(run / METRICS, {"step": 3, "held_out/accuracy": 0.5})
    sender.send(is_over=False)
    sender.send(is_over=False)
    assert kind.calls[0] == ("open", "run", None)
    assert outcomes(kind) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert (3, {"held_out/accuracy": 0.5}) in named(kind, "metrics")
    assert named(kind, "metrics").count((3, {"seconds/rollout": 0.5})) == 1
    assert named(kind, "event") == [(3, "failing", "dead_groups: all is dead. First: raise the temperature")]
    assert named(kind, "close") == []


def test_another_process_continues_where_the_first_one_ended(run: Path, place: Path):
    kind = remembering()
    Sender(run, place, kind).send(is_over=False)
    add_step(run, 3)
    finish(run)
    Sender(run, place, kind).send(is_over=True)
    Sender(run, place, kind).send(is_over=True)
    assert outcomes(kind) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert named(kind, "open") == [("run", None), ("run", "first")]
    assert named(kind, "close") == [({"before/accuracy": 0.25, "after/accuracy": 0.5, "seconds": 2.0}, True)]


def test_a_row_that_is_not_whole_yet_waits(run: Path, place: Path):
    kind = remembering()
    with (run / METRICS).open("a") as file:
        file.write('{"step": 3, "outcome"')
    Sender(run, place, kind).send(is_over=False)
    assert outcomes(kind) == [(1, 0.1), (2, 0.2)]
    with (run / METRICS).open("a") as file:
        file.write(": 0.3}\n")
    Sender(run, place, kind).send(is_over=False)
    assert outcomes(kind) == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_a_tracker_that_fails_gets_the_rest_later(run: Path, place: Path):
    kind = remembering()
    kind.fails_after = 1
    sender = Sender(run, place, kind)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            sender.send(is_over=False)
    kind.fails_after = None
    Sender(run, place, kind).send(is_over=False)
    assert outcomes(kind) == [(1, 0.1), (2, 0.2)]
    assert named(kind, "open") == [("run", None), ("run", "first"), ("run", "first")]


def test_what_a_tracker_could_not_store_is_sent_again(run: Path, place: Path):
    kind = remembering()
    kind.fails_to_flush = True
    with pytest.raises(OSError, match="no space"):
        Sender(run, place, kind).send(is_over=False)
    kind.fails_to_flush = False
    Sender(run, place, kind).send(is_over=False)
    assert outcomes(kind) == [(1, 0.1), (2, 0.2)] * 2


def test_a_resumed_run_that_writes_the_same_rows_is_not_sent_twice(run: Path, place: Path):
    kind = remembering()
    Sender(run, place, kind).send(is_over=False)
    whole = (run / METRICS).read_bytes()
    (run / METRICS).write_bytes(whole.splitlines(keepends=True)[0])  # as after a crash, from step 1's checkpoint
    write_record(run, [None, "step-000001"])
    sender = Sender(run, place, kind)
    sender.send(is_over=False)
    add_step(run, 2)  # again; its time is in timings.jsonl twice
    sender.send(is_over=False)
    add_step(run, 3)
    sender.send(is_over=False)
    assert (run / METRICS).read_bytes().startswith(whole)
    assert outcomes(kind) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert [step for step, values in named(kind, "metrics") if "seconds/rollout" in values] == [1, 2, 3]
    assert named(kind, "event") == []


def test_a_resumed_run_with_other_numbers_is_sent_from_where_it_resumed(run: Path, place: Path):
    kind = remembering()
    add_rollouts(run, 1, 1)
    add_rollouts(run, 2, 1)
    Sender(run, place, kind).send(is_over=False)
    (run / METRICS).write_bytes((run / METRICS).read_bytes().splitlines(keepends=True)[0])
    write_record(run, [None, "step-000001"])
    add_step(run, 2, outcome=0.9)
    add_step(run, 3)
    Sender(run, place, kind).send(is_over=False)
    assert outcomes(kind) == [(1, 0.1), (2, 0.2), (2, 0.9), (3, 0.3)]
    assert [step for step, _ in named(kind, "completions")] == [1, 2, 2]
    [(step, severity, text)] = named(kind, "event")
    assert (step, severity) == (1, "warning")
    assert text == "resumed after step 1 with other numbers than before: later steps follow again"


def test_completions_are_few_short_and_without_secrets(run: Path, place: Path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "swordfish-12345")
    add_rollouts(run, 1, 100, "swordfish-12345 " * 1000)
    kind = remembering()
    Sender(run, place, kind).send(is_over=False)
    [(step, rows)] = named(kind, "completions")
    assert (step, len(rows)) == (1, 16)
    assert [row["group"] for row in rows[:3]] == [0, 6, 12]
    assert rows[0]["tokens"] == 3
    assert len(rows[0]["text"]) == 2002
    assert "swordfish" not in rows[0]["text"]


def test_a_damaged_rollout_file_is_an_event(run: Path, place: Path):
    add_rollouts(run, 1, 2)
    (run / "rollouts" / "step-000001.parquet").write_bytes(b"PAR1 no")
    kind = remembering()
    Sender(run, place, kind).send(is_over=False)
    assert named(kind, "event")[0][2].startswith("completions of step 1 cannot be read: ")


def test_a_run_that_was_stopped_is_closed_as_such_and_continued(run: Path, place: Path):
    kind = remembering()
    Sender(run, place, kind).send(is_over=True)
    assert named(kind, "close") == [({}, False)]
    add_step(run, 3)
    Sender(run, place, kind).send(is_over=True)
    assert outcomes(kind)[-1] == (3, 0.3)
    assert len(named(kind, "close")) == 2


def test_a_damaged_position_is_refused(run: Path, place: Path):
    (place / "sent.json").write_text(json.dumps({"key": 3}))
    with pytest.raises(ValueError, match="sent.json is damaged: remove its folder to send everything again"):
        Sender(run, place, remembering())
