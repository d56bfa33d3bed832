"""`proximo init`: a commented config that loads back to the run it describes."""

import pytest

from proximo.algorithms import DAPO
from proximo.cli import main
from proximo.config import toml
from proximo.learner.ranks import Ranks
from proximo.rl.config import RunConfig


@pytest.fixture
def data(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f'{{"prompt": "{number}+1=", "answer": "{number + 1}"}}\n' for number in range(40))
    (tmp_path / "sums.jsonl").write_text(rows)
    return "sums.jsonl"


def test_a_config_is_written_with_reasons_and_loads_back(data: str, tmp_path, capsys):
    flags = ["--model", "tiny-arithmetic", "--data", data, "--algorithm", "dapo", "--steps", "7"]
    assert main(["init", *flags, "--out", "mine.toml"]) == 0
    assert "proximo train mine.toml --dry-run" in capsys.readouterr().out
    text = (tmp_path / "mine.toml").read_text()
    assert "\n# room to reason before the answer\nmax_tokens = 1024\n" in text
    assert 'type = "Clip"  # or SoftGate, ' in text
    assert "passes over" not in text  # steps were given
    config = toml.load("mine.toml", RunConfig)
    assert (config.steps, config.algorithm, config.model) == (7, DAPO, "tiny-arithmetic")
    assert main(["train", *flags, "--dry-run"]) == 0
    assert toml.loads(capsys.readouterr().out, RunConfig) == config


def test_a_config_is_written_for_ranks(data: str, tmp_path):
    assert main(["init", "--model", "tiny-arithmetic", "--data", data, "--ranks", "8"]) == 0
    assert toml.load("run.toml", RunConfig).ranks == Ranks(8)


def test_code_is_named_from_the_folder_of_the_file(data: str, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def length(completion):\n    return 0.0 + len(completion)\n")
    (tmp_path / "else").mkdir()
    flags = ["--model", "tiny-arithmetic", "--data", data, "--task.reward.type", "PythonFunction"]
    assert main(["init", *flags, "--task.reward.path", "mine.py:length", "--out", "else/run.toml"]) == 0
    assert 'path = "../mine.py:length"' in (tmp_path / "else" / "run.toml").read_text()
    capsys.readouterr()
    assert main(["train", "else/run.toml", "--dry-run"]) == 0  # as the command says
    assert 'path = "mine.py:length"' in capsys.readouterr().out


def test_nothing_is_overwritten(data: str, tmp_path, capsys):
    (tmp_path / "run.toml").write_text("mine")
    for flags, why in (([], "run.toml: it exists"), (["--out", "run.json"], "run.json: no .toml file")):
        with pytest.raises(SystemExit):
            main(["init", "--model", "tiny-arithmetic", "--data", data, *flags])
        assert capsys.readouterr().err == f"error: --out {why}; give another name\n"
    assert (tmp_path / "run.toml").read_text() == "mine"
