"""Run folders as they are found: growing, torn, shrunk, killed, copied, foreign."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from proximo.insight.doctor.checkup import check_up
from proximo.insight.folder import RunFolder, find_runs
from proximo.runs.health.history import in_order
from proximo.system.locks import FolderLock


def run_folder(path: Path, *rows: dict) -> RunFolder:
    path.mkdir(parents=True)
    (path / "run.json").write_text('{"format": 2, "argv": ["proximo"]}')
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunFolder(path)


def test_rows_are_read_on_from_where_they_ended(tmp_path):
    run = run_folder(tmp_path / "a", {"step": 0}, {"step": 1})
    rows, end = run.rows_from("metrics.jsonl", 0)
    assert rows == [{"step": 0}, {"step": 1}]
    assert end == (tmp_path / "a" / "metrics.jsonl").stat().st_size
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n{"step"')  # the last one is being written
    rows, later = run.rows_from("metrics.jsonl", end)
    assert rows == [{"step": 2}]
    assert later == end + len('{"step": 2}\n')
    assert run.rows_from("metrics.jsonl", later) == ([], later)


def test_a_file_that_shrank_is_read_from_its_beginning(tmp_path):
    run = run_folder(tmp_path / "a", {"step": 0}, {"step": 1})
    _, end = run.rows_from("metrics.jsonl", 0)
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 0}\n')
    assert run.rows_from("metrics.jsonl", end) == ([{"step": 0}], 12)


def test_what_is_no_row_is_passed_over(tmp_path):
    run = run_folder(tmp_path / "a", {"step": 0})
    deep = "[" * 100_000 + "]" * 100_000
    (tmp_path / "a" / "metrics.jsonl").write_text(f'{{"step": 0}}\n\0\0\n[1]\n{deep}\n{{"step": 3, "reward": null}}\n')
    assert run.rows("metrics.jsonl") == [{"step": 0}, {"step": 3, "reward": None}]
    os.mkfifo(tmp_path / "a" / "timings.jsonl")
    assert run.rows("timings.jsonl") == run.rows("events.jsonl") == []


def test_a_curve_has_the_numbers_that_there_are(tmp_path):
    run = run_folder(
        tmp_path / "a",
        {"step": 0, "held_out/accuracy": 0.25},
        {"step": 0, "reward": 1},
        {"step": 1, "reward": None},
        {"step": 2, "reward": 0.5},
        {"step": 2, "held_out/accuracy": 0.75},
        {"step": 3, "reward": 10**400},
        {"step": 4, "reward": float("nan")},
        {"step": True, "reward": "1"},
    )
    assert run.curve("reward") == [(0, 1.0), (2, 0.5)]
    assert run.curve("held_out/accuracy") == [(0, 0.25), (2, 0.75)]
    assert run.curve("loss") == []


def test_a_run_is_running_while_its_owner_lives(tmp_path):
    run = run_folder(tmp_path / "a", {"step": 0})
    assert run.state == "stopped"
    lock = tmp_path / "a" / "lock"
    lock.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    assert run.state == "running"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    lock.write_text(json.dumps({"pid": dead.pid, "host": socket.gethostname()}))
    assert run.state == "stopped"  # it was killed
    lock.write_text(json.dumps({"pid": dead.pid, "host": "elsewhere"}))
    assert run.state == "running"  # nobody here can tell
    lock.write_text("")
    assert run.state == "running"  # it is just being written
    (tmp_path / "a" / "result.json").write_text("{}")
    assert run.state == "finished"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the states of processes are Linux's")
def test_a_process_that_has_ended_and_was_not_waited_for_is_not_running(tmp_path):
    run = run_folder(tmp_path / "a")
    code = "import sys; from pathlib import Path; from proximo.system.locks import FolderLock\n"
    code += "lock = FolderLock(Path(sys.argv[1])); print(flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "a")], stdin=pipe, stdout=pipe) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"\n"
        assert run.state == "running"
        owner.kill()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
        os.kill(owner.pid, 0)
        assert (tmp_path / "a" / "lock").exists()
        assert run.state == "stopped"


def test_a_copied_lock_and_a_reused_number_are_nobody(tmp_path):
    original, copied = run_folder(tmp_path / "a"), run_folder(tmp_path / "b")
    with FolderLock(tmp_path / "a"):
        shutil.copy(tmp_path / "a" / "lock", tmp_path / "b" / "lock")
        assert (original.state, copied.state) == ("running", "stopped")
        owner = json.loads((tmp_path / "a" / "lock").read_text())
    lock = tmp_path / "a" / "lock"
    lock.touch()
    owner["inode"] = lock.stat().st_ino
    lock.write_text(json.dumps(owner))
    assert original.state == "running"
    if owner["started"] is not None:  # as Linux knows it
        lock.write_text(json.dumps(owner | {"started": "1"}))
        assert original.state == "stopped"  # another process has its number now
    if owner["boot"] is not None:
        lock.write_text(json.dumps(owner | {"boot": "before"}))
        assert original.state == "stopped"  # the machine was started again


def test_a_row_whose_step_cannot_be_is_passed_over(tmp_path):
    good = [{"step": step, "outcome": step / 10} for step in (0, 1, 2, 2, 3, 4)]
    odd = [{"step": 1, "outcome": 9}, {"step": 10**20, "outcome": 9}, {"step": -1, "outcome": 9}]
    odd += [{"step": 2.5, "outcome": 9}, {"step": True, "outcome": 9}, {"outcome": 9}, {"step": 500, "outcome": 9}]
    run = run_folder(tmp_path / "a", *good[:5], *odd, good[5])
    assert run.rows("metrics.jsonl") == good
    assert run.curve("outcome")[-1] == (4, 0.4)
    [lost] = [each.finding for each in check_up(run).standing if each.finding.rule == "damaged-file"]
    assert lost.message == "7 of the 13 rows of metrics.jsonl cannot be read"
    assert in_order([]) == in_order([{"step": 10**20}]) == []


def test_runs_are_found_below_a_folder_newest_first(tmp_path):
    for age, name in enumerate(("new", "chain/sft", "compare/runs/grpo-seed-0", "old")):
        run_folder(tmp_path / name)
        os.utime(tmp_path / name / "run.json", (1000 - age, 1000 - age))
    run_folder(tmp_path / "old" / "checkpoints" / "step-000001")  # not where runs are
    (tmp_path / "link").symlink_to(tmp_path / "old")
    assert [str(run.path.relative_to(tmp_path)) for run in find_runs(tmp_path)] == [
        "new",
        "chain/sft",
        "compare/runs/grpo-seed-0",
        "old",
    ]
    assert [run.name for run in find_runs(tmp_path / "old")] == ["old"]
    assert find_runs(tmp_path / "nowhere") == []


def test_what_is_no_run_is_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        RunFolder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is no run: give the folder"):
        RunFolder(tmp_path)
    run = run_folder(tmp_path / "a")
    assert run.steps() == []
    with pytest.raises(ValueError, match="no rollouts of step 3: there are none yet"):
        run.step(3)
    with pytest.raises(ValueError, match="there is no such file"):
        _ = run.config
    assert run.config_text == ""


@pytest.mark.parametrize("name", ["result.json", "config.toml", "lock"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path):
    run = run_folder(tmp_path / "a")
    os.mkfifo(tmp_path / "a" / name)
    assert (run.result, run.config_text, run.state) == (None, "", "stopped")
