"""Classes of a user's own on the command line."""

import json
from pathlib import Path

import pytest

from proximo.algorithms import DAPO, SAPO
from proximo.cli import main
from proximo.cli.flags import changed
from proximo.config import toml
from proximo.rl.config import RunConfig
from tests.outside_files import REWARD, TASK

NEEDY = TASK.replace('letters: str = "ab"', "letters: str\n    times: int\n    scale: float")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TASK + REWARD)
    (tmp_path / "needy.py").write_text(NEEDY)
    return tmp_path


def given(*flags: str) -> RunConfig:
    return changed(RunConfig(), flags, prog="test", description="")


def refusal(*flags: str, capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        given(*flags)
    assert stopped.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def test_a_class_of_a_file_and_its_fields(here):
    config = given("--task.type", "mine.py:Parrot", "--task.letters", "xyz", "--task.limit", "3", "--steps", "5")
    assert toml.plain(config)["task"] == {"type": "mine.py:Parrot", "letters": "xyz", "weight": 1.0, "limit": 3}
    assert config.steps == 5
    assert config == toml.loads(toml.dumps(config), RunConfig)
    assert given("--task.type=mine.py:Parrot").task == given("--task.type", "mine.py:Parrot").task


def test_fields_without_a_default_are_taken_from_the_flags(here, capsys):
    flags = ["--task.type", "needy.py:Parrot", "--task.letters", "x", "--task.times", "3", "--task.scale", "0.5"]
    held = toml.plain(given(*flags))["task"]
    assert (held["letters"], held["times"], held["scale"]) == ("x", 3, 0.5)
    assert refusal(*flags[:-2], capsys=capsys).startswith("error: --task.type needy.py:Parrot needs --task.scale")
    assert refusal(*flags[:-1], "much", capsys=capsys) == "error: --task.scale much: give a number\n"


def test_what_cannot_be_taken_is_one_line(here, capsys):
    assert refusal("--task.type", "mine.py:Parot", capsys=capsys) == (
        "error: --task.type mine.py:Parot: mine.py has no class Parot, perhaps Parrot\n"
    )
    assert refusal("--task.type", "mine.py:Short", capsys=capsys) == (
        "error: --task.type mine.py:Short: Short lacks while_sampling, size(), problem(), grade(), which a Task has: "
        "add what is missing\n"
    )
    assert "none.py cannot be read" in refusal("--task.type", "none.py:Parrot", capsys=capsys)
    assert refusal("--task.type", "Aritmetic", capsys=capsys).endswith("File, Code, Mixture, or FILE.py:NAME\n")
    assert "no field" in refusal("--tusk.type", "mine.py:Parrot", capsys=capsys)
    with pytest.raises(SystemExit):
        given("--task.type", "mine.py:Parrot", "--task.letters", "")
    assert "give at least one letter" in capsys.readouterr().err


def test_the_help_says_that_a_file_is_taken_and_shows_its_fields(here, capsys):
    with pytest.raises(SystemExit):
        given("--task.type", "mine.py:Parrot", "--help")
    shown = capsys.readouterr().out
    names = "Arithmetic,Countdown,Echo,Sorting,Chain,Guessing,Gym,File,Code,Mixture"
    assert f"--task.type {{{names}}} or FILE.py:NAME  (now: Parrot)" in shown
    assert "--task.letters" in shown
    assert "Which letters." in shown


@pytest.mark.slow("trains a run")
def test_a_run_with_a_task_of_ones_own_trains_and_is_read_by_the_others(here, capsys):
    flags = [
        "--model",
        "tiny-arithmetic",
        "--task.type",
        "mine.py:Parrot",
        "--steps",
        "1",
        "--training.groups",
        "2",
        "--training.minibatches",
        "1",
    ]
    flags += ["--training.group-size", "2", "--evaluation.problems", "2", "--run", "out"]
    assert main(["train", *flags]) == 0
    assert 'type = "mine.py:Parrot"' in (here / "out" / "config.toml").read_text()
    (here / "alone.toml").write_text(toml.dumps(DAPO))
    (here / "run.toml").write_text(toml.dumps(RunConfig(algorithm=SAPO)))
    capsys.readouterr()
    replayed = ["replay", "out", "--step", "1", "--json", "--as"]
    assert main([*replayed, "alone.toml", "--as", "run.toml", "--as", "gspo", "--as", "out/config.toml"]) == 0
    names = [each["name"] for each in json.loads(capsys.readouterr().out)["algorithms"]]
    assert names == ["grpo", "alone", "run", "gspo", "config"]
    assert main(["eval", "out/checkpoints/step-000001", "--problems", "2"]) == 0
    assert "Parrot" in capsys.readouterr().err
    (here / "mine.py").write_text(TASK + "\n")
    with pytest.raises(SystemExit):
        main(["train", *flags])
    assert "task.type (mine.py) has changed since the run began" in capsys.readouterr().err
