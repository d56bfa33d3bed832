"""What is known before torch is imported: the first line of a command, and flags that do not exist."""

import subprocess
import sys

import pytest

from proximo.api.evaluating import EvalConfig
from proximo.cli import main
from proximo.cli.help_pages import page, unknown_flag
from proximo.cli.mistakes import PRESETS as PRESET_NAMES
from proximo.cli.mistakes import mistake
from proximo.cli.naming import DEMO, first_line
from proximo.cli.pieces import flags_of
from proximo.data import DataFile
from proximo.recipes.presets import ARITHMETIC, PRESETS
from proximo.rl.config import RunConfig
from proximo.supervised.dpo import DpoConfig
from proximo.supervised.reward_model import RewardModelConfig
from proximo.supervised.sft import SftConfig
from tests.cli.test_bad_inputs import refusal

CONFIGS = {
    "eval": EvalConfig(),
    "sft": SftConfig(),
    "dpo": DpoConfig(DataFile("x")),
    "reward-model": RewardModelConfig(DataFile("x")),
}


def test_a_first_argument_that_is_no_preset_is_answered_before_torch_with_what_it_is(tmp_path):
    assert list(PRESET_NAMES) == [preset.name for preset in PRESETS]
    assert all(mistake("train", [name]) is None for name in (*PRESET_NAMES, "run.toml", "--steps"))
    model, run = tmp_path / "model", tmp_path / "run"
    for folder, file in ((model, "config.json"), (run, "run.json")):
        folder.mkdir()
        (folder / file).write_text("{}")
    assert f"--model {model} --data DATA" in (mistake("train", [str(model)]) or "")
    assert f"proximo resume {run} " in (mistake("train", [str(run)]) or "")
    assert "--model Qwen/Qwen3-4B" in (mistake("plan", ["Qwen/Qwen3-4B"]) or "")
    assert "--algorithm dapo" in (mistake("train", ["DAPO"]) or "")
    assert "the nearest is 'arithmetic'" in (mistake("selfcheck", ["aritmetic"]) or "")


@pytest.mark.parametrize("command", CONFIGS)
def test_no_flag_of_a_stage_is_taken_for_a_wrong_one(command):
    for name in flags_of(CONFIGS[command]):
        assert unknown_flag(command, [name, "1"]) is None, name
        assert unknown_flag(command, [f"{name.replace('-', '_').replace('__', '--', 1)}=1"]) is None, name


@pytest.mark.slow("reads every flag")
@pytest.mark.parametrize(
    "preset", [each for each in PRESETS if isinstance(each.config, RunConfig)], ids=lambda it: it.name
)
def test_no_flag_of_a_run_is_taken_for_a_wrong_one(preset):
    for name in flags_of(preset.config):
        if name != "--schedules":  # a table by fields' names, given by --schedule
            assert unknown_flag("train", [name, "1"]) is None, name


@pytest.mark.parametrize(
    "given",
    [
        "--task.no-chat",
        "--no-compile",
        "--task.reward.path f.py:f",
        "--algorithm.gate.type mine.py:Gate --algorithm.gate.anything 3",
        "--rewards.rules.0.weight 2",
        "--rewards.rules.add LengthReward",
        "--adapter.rank 8",
        "--ranks 4 --ranks.shard 2",
        "--value.type None",
        "--track wandb --run runs/a --skip-bad --allow-change steps",
        "--training 3",
        "pipeline-demo --sft.fit.epochs 2",
    ],
)
def test_flags_that_only_the_config_knows_are_left_to_it(given):
    assert unknown_flag("train", given.split()) is None


def test_a_flag_that_is_certainly_wrong_is_refused_without_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    page("train")  # makes the pages
    script = """
import sys
from proximo.cli import main
try:
    main(["train", "--steps", "3", "--stpes", "3"])
except SystemExit as stopped:
    print(stopped.code, "torch" in sys.modules, "tyro" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False False\n"
    assert done.stderr == (
        "error: --stpes: there is no such flag, the nearest is '--steps'; proximo train --help lists all\n"
    )


def test_the_refusal_is_the_same_for_stages_and_deep_flags(capsys):
    assert "--fit.epoch: there is no such flag, the nearest is '--fit.epochs'" in refusal(
        ["sft", "--fit.epoch", "1"], capsys
    )
    assert "nearest is '--training.learning-rate'" in refusal(["train", "--training.learnin-rate", "1"], capsys)
    assert "--mgn: there is no such flag, the nearest is '--training.max-gradient-norm'" in refusal(
        ["train", "--mgn=1"], capsys
    )


@pytest.mark.parametrize("command", ["train", "init", "selfcheck", "iterate"])
def test_a_command_on_the_demo_says_so_at_once(command):
    assert first_line(command, []) == DEMO
    assert first_line(command, ["--steps", "3"]) == DEMO
    assert first_line(command, ["--help"]) is None
    assert first_line(command, ["arithmetic"]) != DEMO
    assert first_line(command, ["--model", "x", "--data", "y"]) != DEMO


def test_the_demo_is_what_the_line_says():
    assert ARITHMETIC.model in DEMO


def test_compare_says_when_it_compares_on_the_demo(capsys):
    assert first_line("compare", ["five"]) is None
    assert main(["compare", "--algorithms", "grpo,sapo", "--updates", "4", "--dry-run"]) == 0
    assert capsys.readouterr().err.startswith(DEMO)


def test_the_first_line_names_what_is_given():
    given = ["--model", "m", "--data=d.jsonl", "--algorithm", "dapo", "--steps", "3"]
    assert first_line("train", given) == "train model m, data d.jsonl, algorithm dapo; loading torch"
    assert first_line("train", ["run.toml", "--run", "runs/a", "--task.type", "Echo", "--model", "m"]) == (
        "train run.toml, model m, task.type Echo, run runs/a; loading torch"
    )


def test_plan_reads_no_data_with_a_model_that_nobody_named(capsys):
    assert "--data is read with a model's tokenizer: give --model MODEL" in refusal(["plan", "--data", "x"], capsys)
