"""`proximo runs`, a table of the runs below a folder."""

import json
from pathlib import Path

import pytest

from proximo.cli import main
from tests.insight.page.browser import write_run
from tests.runs.tracking.folders import make_run


def test_runs_are_listed_newest_first_with_what_they_have(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/first"), steps=2)
    make_run(Path("runs/sweep/second"), steps=3)
    assert main(["runs"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "held-out", "training", "algorithm", "model", "started"]
    assert [row.split()[0] for row in rows] == ["sweep/second", "first"]
    assert "3/" in rows[0]
    assert main(["runs", "runs/sweep", "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["step"]) == ("second", 3)


def test_an_accuracy_of_pairs_is_none_of_answers(tmp_path: Path, capsys):
    rows = [{"step": 1, "loss": 0.5}, {"step": 1, "held_out/loss": 0.25, "held_out/accuracy": 0.75}]
    (write_run(tmp_path / "a", rows) / "config.toml").write_text("[loss]\nbeta = 0.1\n[fit]\nepochs = 1.0\n")
    assert main(["runs", str(tmp_path)]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert "loss 0.25, 75.0% of pairs" in line
    assert " dpo " in line
    assert "None" not in line


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(tmp_path: Path, capsys):
    make_run(tmp_path / "a", steps=1)
    (tmp_path / "a" / "metrics.jsonl").unlink()
    (tmp_path / "a" / "metrics.jsonl").symlink_to("/etc/passwd")
    assert main(["runs", str(tmp_path)]) == 0
    assert "link" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["nowhere"], ["a", "b"], ["--all"]])
def test_other_arguments_are_refused_in_a_line(arguments, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["runs", *arguments])
    assert capsys.readouterr().err.startswith("error: ")


def test_a_folder_without_runs_says_so(tmp_path: Path, capsys):
    assert main(["runs", str(tmp_path)]) == 0
    assert "there are no runs" in capsys.readouterr().err
