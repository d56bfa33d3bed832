"""`proximo watch`: a run in the terminal, once or until it ends."""

import io
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from proximo.cli import main
from proximo.insight.folder import RunFolder
from proximo.insight.terminal import look, spark
from tests.insight.page.browser import append, write_run

HOSTILE = "\x1b[31m[bold]red[/bold]\u202e"
METRICS = [
    {"step": 0, "held_out/accuracy": 0.2, "held_out/outcome": 0.2, "held_out/low": 0.18, "held_out/high": 0.22},
    *({"step": step, "outcome": step / 40, "reward": step / 40, "entropy": 1.0, "loss": 9.0} for step in range(1, 31)),
    {"step": 30, "held_out/accuracy": 0.8, "held_out/outcome": 0.8, "held_out/low": 0.78, "held_out/high": 0.82},
]


@pytest.fixture
def run(tmp_path):
    events = [{"step": 3, "attempt": 2, "kind": "resumed", "message": HOSTILE}]
    made = write_run(tmp_path / "a", METRICS, events=events, steps=30, state="running")
    (made / "rollouts").mkdir()
    rows = {"prompt": ["1+1=", "2+2="], "text": ["2", HOSTILE], "outcome": [1.0, 0.0]}
    pq.write_table(pa.table(rows), made / "rollouts" / "step-000030.parquet")
    (made / "rollouts" / "step-000031.parquet").write_bytes(b"half written")
    return made


def test_it_prints_the_verdict_the_curves_the_events_and_a_completion(run, capsys):
    assert main(["watch", str(run), "--once"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "a  running, step 30 of 30"
    assert lines[1] == "learning, +60.0 points (57.2 to 62.8) of held-out accuracy in 30 steps; no warnings"
    titles = [line.split("  ")[0] for line in lines[3:6]]
    assert titles == [
        "held-out accuracy",
        "task score",
        "entropy",
    ]  # the reward is the score, and the loss says nothing
    assert "▁▁▁▂▂" in lines[4]
    assert lines[4].rstrip().endswith("2.5% → 75.0%")
    assert lines[5].rstrip().endswith("▁  1")
    assert "step 3, resumed: \\x1b[31m[bold]red[/bold]\\u202e" in out
    assert "newest completion, step 30, task score 0" in out
    assert "2+2=\\x1b[31m[bold]red[/bold]\\u202e" in out
    assert not set(out) & set("\x1b\u202e")


def test_a_run_in_progress_is_drawn_until_it_ends(run, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        append(run, "metrics", {"step": 30 + len(slept), "outcome": 0.75})
        if len(slept) == 2:
            (run / "lock").unlink()

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert main(["watch", str(run), "--every", "5"]) == 0
    assert slept == [5.0, 5.0]
    assert "running, step 31 of 30" in terminal.getvalue()
    assert "stopped, step 32 of 30" in terminal.getvalue()


def test_an_empty_run_and_a_stage(tmp_path, capsys):
    write_run(tmp_path / "empty")
    stage = write_run(tmp_path / "sft", [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 1.5}], state="finished")
    (stage / "config.toml").write_text("[fit]\nepochs = 1.0\n")
    assert look(RunFolder(tmp_path / "empty")).verdict.word == "not started"
    assert main(["watch", str(stage)]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "sft  finished, step 2",
        "loss 3 → 1.5 in 2 steps; too few steps for most rules",
    ]


def test_accuracy_of_a_stage_is_one_of_pairs(tmp_path):
    held_out = {"step": 1, "held_out/loss": 0.5, "held_out/accuracy": 0.75}
    stage = look(RunFolder(write_run(tmp_path / "dpo", [{"step": 1, "loss": 1.0}, held_out])))
    assert [curve.title for curve in stage.curves] == ["held-out pairs right", "loss", "held-out loss"]
    run = look(RunFolder(write_run(tmp_path / "grpo", [{"step": 1, "outcome": 0.5, "held_out/accuracy": 0.75}])))
    assert [curve.title for curve in run.curves] == ["held-out accuracy", "task score"]


def test_sparklines():
    assert spark([0, 1, 2, 3], 4) == "▁▃▆█"
    assert spark([0, 0, 1, 1], 2) == "▁█"
    assert spark([5.0] * 7, 3) == "▁▁▁"
    assert spark([], 5) == ""
    assert spark([1e308, -1e308, 1e308], 3) == "█▁█"
    assert spark([1e308] * 4 + [0.0], 2) == "█▁"
    assert len(spark(list(range(1000)), 60)) == 60


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["a", "b"], ["a", "--every", "0"], ["a", "--every", "x"]])
def test_bad_arguments_are_refused_in_one_line(tmp_path, monkeypatch, capsys, arguments):
    write_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["watch", *arguments])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
