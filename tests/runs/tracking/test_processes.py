"""The processes next to a run: they send it, and neither hold it up nor outlive it for long."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from proximo.cli import main
from proximo.insight.doctor.installation import EXTRAS
from proximo.runs.tracking import processes, readings, trackers
from proximo.runs.tracking.processes import tracked
from proximo.runs.tracking.trackers import check_names, tracker_class
from tests import ROOT
from tests.runs.tracking.folders import MINE, add_step, finish, make_run


@pytest.fixture
def mine(tmp_path: Path, monkeypatch) -> str:
    """A user's own tracker."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return "mine.py:Mine"


@pytest.mark.slow("trains a run")
def test_a_run_is_sent_while_it_runs_and_to_its_end(tmp_path: Path, mine: str, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 60.0)
    lines: list[str] = []
    with tracked(Path("run"), [mine], lines.append):
        run = make_run(tmp_path / "run", steps=2)
        finish(run)
    sent = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert [row[:2] for row in sent[:-1]] == [["metrics", 1], ["metrics", 2]] * 2
    assert sent[-1][0] == "close"
    assert sent[-1][2] is True
    assert lines == []


def test_a_tracker_that_hangs_does_not_hold_up_the_run(tmp_path: Path, mine: str, monkeypatch):
    started: list[subprocess.Popen] = []

    class Noted(subprocess.Popen):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(processes.subprocess, "Popen", Noted)
    monkeypatch.setattr(processes, "PATIENCE", 0.0)
    monkeypatch.setenv("TRACKER_HANGS", "yes")
    lines: list[str] = []
    run = make_run(tmp_path / "run", steps=1)
    with tracked(run, [mine], lines.append):
        add_step(run, 2)
    assert lines == [
        f"tracker {mine} is still sending, for a minute at most; if it does not finish, this sends the rest: "
        f"proximo track {run} --to {mine}"
    ]
    assert [os.getpgid(process.pid) for process in started] == [process.pid for process in started]  # no Ctrl-C
    assert {os.getsid(process.pid) for process in started} == {os.getsid(0)}  # or its low priority counts for nothing
    for process in started:
        process.kill()
        process.wait()
    monkeypatch.delenv("TRACKER_HANGS")
    assert main(["track", str(run), "--to", mine]) == 0
    assert len((tmp_path / "mine.jsonl").read_text().splitlines()) == 4 + 1


def test_a_process_ends_soon_after_the_run_whatever_it_is_doing():
    code = """
import threading
from proximo.runs.tracking import processes
processes.DRAIN = 0.01
over = processes.end_of_run()
print("before the end:", over.is_set(), flush=True)
threading.Event().wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "before the end: False\n"  # the run goes on: its pipe is open
        process.stdin.close()
        assert process.wait(timeout=60) == 3


def test_the_processes_need_no_torch():
    code = "import sys, proximo.runs.tracking.processes, proximo.runs.tracking.readings; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_tracker_without_its_package_is_refused_before_the_run(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["train", "--track", "wandb", "--run", str(tmp_path / "run")])
    refusal = 'error: --track: tracker wandb needs wandb: pip install "proximo[wandb]"'
    assert capsys.readouterr().err.splitlines()[1:] == [refusal]  # behind the line that says what is trained
    assert not (tmp_path / "run").exists()


def test_trackers_that_cannot_be_used_are_refused(mine: str):
    with pytest.raises(ValueError, match="no tracker is called 'wandd': give .*wandb.* or FI"):
        tracker_class("wandd")
    with pytest.raises(ValueError, match="mine.py:Mine is given twice"):
        check_names([mine, mine])
    Path("mine.py").write_text("class Mine:\n    def open(self, run, key): ...\n")
    with pytest.raises(ValueError, match="mine.py:Mine lacks metrics, event, completions, flush, close"):
        check_names([mine])


def test_a_tracker_of_a_package_has_an_extra_and_doctor_looks_for_it():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, kind in trackers.TRACKERS.items():
        assert name in trackers.CHOICES
        assert [each.packages for each in EXTRAS if each.name == name] == [(kind.package,)] * bool(kind.package)
        packages = [re.split("[<>=]", each)[0] for each in extras.get(name, [])]
        assert kind.package in packages or not kind.package


def test_track_says_what_it_sent(tmp_path: Path, mine: str, capsys):
    run = make_run(tmp_path / "run", steps=2)
    assert main(["track", str(run), "--to", mine, "--json"]) == 0
    place = str(run / "tracking" / "Mine")
    assert json.loads(capsys.readouterr().out) == [{"tracker": mine, "items": 4, "folder": place}]
    assert main(["track", str(run), "--to", mine]) == 0
    assert capsys.readouterr().out == f"{mine}: everything was sent before; its files: {place}\n"
    for wrong in ([str(tmp_path), "--to", mine], [str(run)], [str(run), "--to"]):
        with pytest.raises(SystemExit):
            main(["track", *wrong])


def test_readings_of_the_machine():
    assert readings.busy_share((10, 20), (40, 60)) == {"cpu_percent": 75.0}
    assert readings.busy_share((0, 0), (0, 0)) == {}
    gpu = readings.parsed_gpus("90, 100, 200, 60, [N/A]\n1, 2, 3, 4, 5.5\n")
    assert gpu["gpu0/utilization"] == 90
    assert "gpu0/power_watts" not in gpu
    assert gpu["gpu1/power_watts"] == 5.5
    found = readings.memory(os.getpid())
    assert 0 < found["run_memory_gib"] < found["memory_total_gib"]
