"""An algorithm with pieces from a user's own file, in words; tests/outside has whole runs."""

from pathlib import Path

import pytest

from proximo.algorithms import DAPO, Algorithm, explain
from proximo.cli import main
from proximo.cli.flags import changed
from tests.outside_files import GATE, KEEP


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_gate.py").write_text(GATE)
    (tmp_path / "my_keep.py").write_text(KEEP)
    return tmp_path


def mine() -> Algorithm:
    flags = ["--gate.type", "my_gate.py:Ceiling", "--gate.most", "3", "--keep.type", "my_keep.py:First"]
    return changed(DAPO, flags, prog="test", description="")


def test_explain_shows_what_a_piece_gives_and_says_what_it_does_not(here, capsys):
    flags = ["--gate.type", "my_gate.py:Ceiling", "--gate.most", "3", "--keep.type", "my_keep.py:First"]
    assert main(["explain", "dapo", *flags]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for line in (
        "gate is Ceiling(most=3), not Clip(low=0.2, high=0.28)",
        "J(θ) = (1/N) Σ_i Σ_t Ceiling (formula not given)",
        "over the first groups",
        "from my_gate.py:Ceiling what Holds the ratio below a ceiling. paper not given TRL not given verl not given",
        "from my_keep.py:First what Trains on the first so many groups. paper arXiv 1; arXiv 2 TRL trl_first",
    ):
        assert line in shown, line
    assert explain.own_words(DAPO.gate) == []
    assert explain.nearest(mine()).name == "dapo"
