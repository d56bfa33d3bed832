"""The demo's model and data are used where nobody named one, and only there; resume goes on by a run's own config."""

import json
from pathlib import Path

import pytest

import proximo
from proximo.cli import main
from proximo.cli.configs import base_config, run_config
from proximo.models import tiny_model, tiny_tokenizer
from proximo.rewards import ExactMatch
from proximo.rl.reward_config import RewardModel
from proximo.tasks import File
from tests.cli.test_bad_inputs import refusal

SUMS = "".join(f'{{"prompt": "{i}+1=", "completion": "{i + 1}", "answer": "{i + 1}"}}\n' for i in range(20))
DEMO = "the demo: sums of two numbers with tiny-arithmetic"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("named") / "model"
    tiny_model(hidden=16, layers=1, heads=1, kv_heads=1, intermediate=16).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def data(tmp_path) -> str:
    (tmp_path / "sums.jsonl").write_text(SUMS)
    return str(tmp_path / "sums.jsonl")


@pytest.mark.parametrize("command", ["train", "selfcheck", "init"])
def test_half_a_run_is_refused_not_filled_up_with_the_demo(command, model, data, tmp_path, capsys):
    out = ["--out", str(tmp_path / "new.toml")] if command == "init" else []
    assert "has data and no model: give --model MODEL" in refusal([command, "--data", data, *out], capsys)
    assert "has data and no model" in refusal([command, "--task.type", "Countdown", *out], capsys)
    assert "has a model and no data: give --data DATA" in refusal([command, "--model", model, *out], capsys)


def test_a_config_file_names_both_or_the_demo(model, tmp_path, capsys):
    file = tmp_path / "half.toml"
    file.write_text(f'model = "{model}"\n')
    assert f"{file} has a model and no data" in refusal(["train", str(file), "--dry-run"], capsys)
    file.write_text('[task]\ntype = "Countdown"\n')
    assert f"{file} has data and no model" in refusal(["train", str(file), "--dry-run"], capsys)
    assert main(["train", str(file), "--model", "tiny-arithmetic", "--dry-run", "--evaluation.problems", "0"]) == 0
    file.write_text("steps = 3\n")
    capsys.readouterr()
    assert main(["train", str(file), "--dry-run"]) == 0
    assert capsys.readouterr().err.startswith(DEMO)


def test_train_alone_is_the_demo_and_says_so_first(capsys):
    assert main(["train", "--dry-run"]) == 0
    assert capsys.readouterr().err.startswith(DEMO)
    assert main(["train", "arithmetic", "--dry-run"]) == 0
    assert DEMO not in capsys.readouterr().err  # a preset was asked for


@pytest.mark.parametrize("stage", ["sft", "dpo", "reward-model"])
def test_a_stage_needs_data_and_a_model(stage, model, data, tmp_path, capsys):
    assert f"{stage} needs data" in refusal([stage], capsys)
    assert f"{stage} needs data" in refusal([stage, "--model", model], capsys)
    assert f"{stage} needs a model: --model MODEL" in refusal([stage, data], capsys)
    (tmp_path / "half.toml").write_text(f'[data]\npath = "{data}"\n' + 'type = "DataFile"\n' * (stage == "sft"))
    assert "half.toml names no model" in refusal([stage, str(tmp_path / "half.toml")], capsys)


@pytest.mark.parametrize("lora", [["--lora"], ["--lora", "2", "--adapter.alpha", "4"]], ids=" ".join)
def test_an_adapter_of_fine_tuning_is_one_of_the_flags_model(lora, model, data, capsys):
    """It is put into the config before other flags are read: of a config without a model it was refused."""
    wrong = ["--fit.batch", "0"]
    assert "fit.batch is 0" in refusal(["sft", data, "--model", model, *lora, *wrong], capsys)
    assert "no model that it would be an adapter of" in refusal(["sft", data, "--model", "None", "--lora"], capsys)


def test_eval_asks_a_models_own_problems_or_those_that_are_named(model, data, capsys):
    assert f"{model} brings no problems of its own" in refusal(["eval", model], capsys)
    assert main(["eval", model, "--data", data, "--sampling.max-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["held_out/problems"] == 20
    assert main(["eval", "tiny-copy", "--problems", "2", "--samples", "0", "--json"]) == 0
    assert "settings from the preset copy: Echo" in capsys.readouterr().err


def test_python_names_both_too(model, data, tmp_path):
    with pytest.raises(ValueError, match="data is not given: name what"):
        proximo.train(model, tmp_path / "run")
    with pytest.raises(ValueError, match="data is not given"):
        proximo.config_for(model)
    with pytest.raises(ValueError, match="brings no problems of its own"):
        proximo.evaluate(model)
    with pytest.raises(ValueError, match="model is not given"):
        proximo.sft(data, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow("trains a run")
def test_a_reward_model_beside_data_leaves_the_answers_to_be_logged(model, data, tmp_path, capsys):
    judged = ["--model", model, "--reward-model", "judge"]
    config = base_config(["--data", data, *judged, "--rewards.task", "0"])
    assert isinstance(config.task, File)
    assert (config.task.reward, config.rewards.task) == (ExactMatch(last_number=True), 0.0)
    assert "comparing last numbers, which is logged and not rewarded" in capsys.readouterr().err
    config = base_config(["--data", data, *judged])
    assert isinstance(config.task, File)
    assert (config.task.reward, config.rewards.task) == (ExactMatch(last_number=True), 1.0)
    (tmp_path / "asked.jsonl").write_text('{"prompt": "1+1="}\n' * 3)
    config = base_config(["--data", str(tmp_path / "asked.jsonl"), *judged, "--rewards.task", "0"])
    assert isinstance(config.task, File)
    assert config.task.reward is None
    assert "no answers: the reward model's score is the reward, and there is no other" in capsys.readouterr().err


def test_python_leaves_the_answers_to_be_logged_too(model, data, tmp_path):
    settings = {"rewards.task": 0.0, "rewards.models": (RewardModel("judge"),)}
    config = proximo.config_for(model, data=data, settings=settings, quiet=True)
    assert isinstance(config.task, File)
    assert config.task.reward == ExactMatch(last_number=True)
    (tmp_path / "asked.jsonl").write_text("".join(f'{{"prompt": "{number}+1="}}\n' for number in range(20)))
    config = proximo.config_for(model, data=str(tmp_path / "asked.jsonl"), settings=settings, quiet=True)
    assert isinstance(config.task, File)
    assert config.task.reward is None


def test_a_filter_of_groups_goes_by_the_named_data_and_not_by_the_demos(model, data, tmp_path, capsys):
    """With a reward model alone: prompts have no verdict, and answers may be left ungraded."""
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(f'{{"prompt": "{number}+1="}}\n' for number in range(20)))
    judged = ["--algorithm", "dapo", "--reward-model", "runs/judge", "--rewards.task", "0", "--model", model]

    def task(*flags: str) -> File:
        config, _ = run_config([*judged, *flags], prog="proximo train", usage="", description="", help_more="")
        assert isinstance(config.task, File)
        return config.task

    for flags in (["--data", str(asked)], ["--data", data, "--task.reward.type", "None"]):
        assert task(*flags).reward is None
    with pytest.raises(SystemExit):
        task("--data", data)
    assert "by the whole reward, --task.reward.type None" in capsys.readouterr().err


@pytest.mark.slow("trains and resumes a run")
def test_resume_goes_on_with_a_runs_own_config(model, data, tmp_path, capsys):
    run = str(tmp_path / "run")
    small = ["--sampling.max-tokens", "2", "--training.groups", "2", "--training.group-size", "2"]
    flags = ["--training.minibatches", "1", "--evaluation.problems", "0", "--steps", "1", *small]
    assert main(["train", "--model", model, "--data", data, *flags, "--run", run]) == 0
    before = Path(run, "metrics.jsonl").read_text()
    capsys.readouterr()
    assert main(["resume", run]) == 0
    assert f"this run is finished; for more: proximo resume {run} --steps N, or" in capsys.readouterr().err
    assert main(["resume", run, "--steps", "2"]) == 0
    assert len(Path(run, "metrics.jsonl").read_text().splitlines()) == len(before.splitlines()) + 1
    out = capsys.readouterr().out
    for command in ("view", "eval", "chat", "export", f"resume {run} --steps 4"):
        assert f"proximo {command}" in out
    assert "steps was 2, now 1  (--allow-change steps)" in refusal(["resume", run, "--steps", "1"], capsys)
    both = ["resume", run, "--steps", "3", "--seed", "1"]
    assert "seed was 0, now 1  (--allow-change seed)" in refusal(both, capsys)
    assert f"proximo resume {run}" in refusal(["train", "--steps", "2", "--run", run], capsys)


@pytest.mark.parametrize("stage", ["sft", "dpo", "reward-model"])
def test_resume_knows_the_stages(stage, model, tmp_path, capsys):
    row = {"prompt": "1+1=", "completion": "2"} if stage == "sft" else {"prompt": "1=", "chosen": "2", "rejected": "3"}
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    run = str(tmp_path / "run")
    assert main([stage, str(tmp_path / "x.jsonl"), "--model", model, "--data.held-out", "0", "--run", run]) == 0
    capsys.readouterr()
    assert main(["resume", run]) == 0
    assert "this run is finished" in capsys.readouterr().err


def test_resume_refuses_what_it_cannot_go_on_with(tmp_path, capsys):
    assert "resume needs the folder of a run" in refusal(["resume"], capsys)
    assert "holds no run" in refusal(["resume", str(tmp_path)], capsys)
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "run.json").write_text('{"format": 2}')
    assert "run.json or config.toml is missing" in refusal(["resume", str(tmp_path / "lost")], capsys)
    assert "goes on in x" in refusal(["resume", "x", "--run", "y"], capsys)
    assert main(["resume", "--help"]) == 0


def test_rate_needs_a_model(data, tmp_path, capsys):
    assert "rate needs a model: --model MODEL" in refusal(["rate", data, "--out", str(tmp_path / "r.jsonl")], capsys)
