"""What a stage says, and refuses, before it loads weights."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proximo.cli import main
from proximo.config import toml
from proximo.data import DataFile
from proximo.models import loading, tiny_model, tiny_tokenizer
from proximo.models.adapters.lora import Lora
from proximo.models.reward_models import load_reward_model
from proximo.supervised.dpo import DpoConfig, dpo_overview
from proximo.supervised.fitting import FitOptions
from proximo.supervised.reward_model import RewardModelConfig, reward_model_overview
from proximo.supervised.sft import SftConfig, sft_overview
from proximo.system.amounts import in_bytes, in_units
from tests.rows import write_rows

FIT = FitOptions(batch=4, epochs=2.0, warmup_steps=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model(hidden=32, layers=2, intermediate=48).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def no_weights(monkeypatch):
    """Whoever loads weights fails."""
    monkeypatch.setattr(loading, "load_weights", lambda *_, **__: pytest.fail("weights were loaded"))


@pytest.fixture
def examples(tmp_path: Path) -> DataFile:
    rows = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(10)]
    return DataFile(write_rows(tmp_path / "sums.jsonl", rows), held_out=0.0)


@pytest.fixture
def pairs(tmp_path: Path) -> DataFile:
    rows = [{"prompt": f"{number}+1=", "ranking": [str(number + 1), "x", "yz"]} for number in range(10)]
    return DataFile(write_rows(tmp_path / "pairs.jsonl", rows), held_out=0.0)


@pytest.mark.usefixtures("no_weights")
def test_a_fine_tuning_is_told_before_it_begins(folder: str, examples: DataFile):
    lines = dict(sft_overview(SftConfig(examples, folder, fit=FIT)).lines)
    parameters = tiny_model(hidden=32, layers=2, intermediate=48).num_parameters()
    assert lines["model"] == f"{folder}, Qwen3ForCausalLM, {in_units(parameters)} parameters"
    assert (lines["device"], lines["trains"]) == ("cpu, float32", "all weights")
    assert lines["data"] == f"10 to train on, 0 held out; {examples.path}"
    assert lines["prompt"] == "0+1=\n(4 tokens, not trained)"
    assert lines["completion"] == "1<eos>\n(2 tokens, trained)"
    # Nine rows of 4 + 2 tokens and one of 4 + 3.
    assert lines["lengths"].startswith("6 to 7, median 6, 95 % within 7 tokens with the prompt")
    assert lines["lengths"].endswith("an epoch trains 21 tokens")
    assert lines["steps"] == "6 (2 epochs of 3), at most 4 rows each; a resume point every 100"
    assert lines["learning rate"] == "1e-05 after 1 step of warm-up, then linearly to 0"
    assert lines["evaluation"] == "nothing is held out: the last weights are kept"
    assert lines["memory"].startswith(f"{in_bytes(16 * parameters)} of ")


@pytest.mark.usefixtures("no_weights")
def test_rankings_are_told_by_their_best_and_worst(folder: str, pairs: DataFile):
    for overview in (dpo_overview(DpoConfig(pairs, folder)), reward_model_overview(RewardModelConfig(pairs, folder))):
        lines = dict(overview.lines)
        assert lines["chosen"] == "1<eos>\n(2 tokens, the best of 3)"
        assert lines["rejected"] == "yz<eos>\n(3 tokens, the worst of 3)"


@pytest.mark.usefixtures("no_weights")
def test_what_is_trained_is_counted(folder: str, pairs: DataFile):
    config, parameters = RewardModelConfig(pairs, folder), tiny_model(hidden=32, layers=2, intermediate=48)
    embedding = parameters.get_parameter("model.embed_tokens.weight").numel()
    trunk = sum(each.numel() for each in parameters.base_model.parameters())
    frozen = reward_model_overview(replace(config, fit=FitOptions(freeze=("embed",))))
    assert frozen.weights.all == trunk + 32
    assert frozen.weights.trained == trunk + 32 - embedding
    assert frozen.weights.bytes == 16 * (trunk + 32) - 12 * embedding
    adapted = reward_model_overview(replace(config, adapter=Lora(rank=2, targets=("q_proj",))))
    assert adapted.weights.trained == 2 * 2 * (32 + 32) + 32  # two layers; and the score head
    assert "rank 2 and the score head" in dict(adapted.lines)["trains"]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fit": FitOptions(patience=2)}, "fit.patience is 2, but no data is held out"),
        ({"fit": FitOptions(freeze=("nothing",))}, "fit.freeze has 'nothing', which no parameter's name contains"),
        ({"fit": FitOptions(freeze=("",))}, "fit.freeze is .*, which freezes every parameter"),
        ({"adapter": Lora(targets=("nothing",))}, "adapter.targets has 'nothing'"),
        ({"fit": FitOptions(metric="outcome")}, "fit.metric is 'outcome': give one of loss, "),
        ({"device": "cuda:99"}, "device is 'cuda:99'"),
        ({"model": "no/such-model"}, "path 'no/such-model': neither a folder"),
    ],
)
def test_all_stages_refuse_the_same_before_weights(
    change: dict[str, Any], message: str, folder: str, examples: DataFile, pairs: DataFile
):
    for check in (
        lambda: sft_overview(replace(SftConfig(examples, folder), **change)),
        lambda: dpo_overview(replace(DpoConfig(pairs, folder), **change)),
        lambda: reward_model_overview(replace(RewardModelConfig(pairs, folder), **change)),
    ):
        with pytest.raises(ValueError, match=message):
            check()


def test_an_adapter_and_frozen_weights_exclude_each_other(pairs: DataFile):
    for kind in (SftConfig, DpoConfig, RewardModelConfig):
        with pytest.raises(ValueError, match="fit.freeze is .*'embed'.*, but with adapter no weight"):
            kind(pairs, "model", adapter=Lora(), fit=FitOptions(freeze=("embed",)))


def test_a_reward_model_speaks_not(tmp_path: Path, folder: str, examples: DataFile, pairs: DataFile, monkeypatch):
    load_reward_model(folder).save_pretrained(tmp_path / "judge")
    tiny_tokenizer().save_pretrained(tmp_path / "judge")
    monkeypatch.setattr(loading, "load_weights", lambda *_, **__: pytest.fail("weights were loaded"))
    judge = str(tmp_path / "judge")
    for check in (
        lambda: sft_overview(SftConfig(examples, judge)),
        lambda: dpo_overview(DpoConfig(pairs, judge)),
        lambda: dpo_overview(DpoConfig(pairs, folder, reference=judge)),
    ):
        with pytest.raises(ValueError, match="holds a reward model, which scores and cannot speak"):
            check()


@pytest.mark.slow("runs four commands")
@pytest.mark.usefixtures("no_weights")
def test_a_dry_run_prints_the_config_and_starts_nothing(folder: str, pairs: DataFile, tmp_path: Path, capsys):
    run = ["--model", folder, "--run", str(tmp_path / "run"), "--dry-run"]
    for command, kind in (("dpo", DpoConfig), ("reward-model", RewardModelConfig)):
        assert main([command, "--data", pairs.path, "--data.held-out", "0", *run]) == 0
        printed = capsys.readouterr()
        assert toml.loads(printed.out, kind) == kind(pairs, folder)
        assert "10 to train on, 0 held out" in printed.err
        assert main([command, pairs.path, "--data.held-out", "0", *run, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["config"]["model"], told["train"], told["steps"]) == (folder, 10, 1)
    with pytest.raises(SystemExit) as refused:
        main(["sft", pairs.path, *run, "--fit.freeze", "nothing"])
    assert refused.value.code == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.slow("runs commands")
@pytest.mark.usefixtures("no_weights")
def test_steps_are_given_in_the_place_of_epochs(folder: str, pairs: DataFile, tmp_path: Path, capsys):
    flags = ["dpo", pairs.path, "--data.held-out", "0", "--model", folder, "--batch", "2", "--dry-run"]
    assert main([*flags, "--steps", "8"]) == 0
    printed = capsys.readouterr()
    assert toml.loads(printed.out, DpoConfig).fit.steps == 8
    assert re.search("steps +8 .1.6 epochs of 5.", printed.err)
    file = tmp_path / "dpo.toml"
    file.write_text(f'model = "{folder}"\nsteps = 8\n[data]\npath = "{pairs.path}"\n')
    for given, steps in (([], 8), (["--steps", "9"], 9), (["--epochs", "2"], 10)):
        assert main(["dpo", str(file), "--data.held-out", "0", "--batch", "2", *given, "--dry-run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["steps"] == steps
    file.write_text(f"epochs = 2\n{file.read_text()}")
    for both in ([*flags, "--steps", "8", "--fit.epochs", "1"], ["dpo", str(file), "--dry-run"]):
        with pytest.raises(SystemExit):
            main(both)
        assert "epochs and steps are both given: give one of them" in capsys.readouterr().err


def test_data_is_named_once(pairs: DataFile, folder: str, capsys):
    with pytest.raises(SystemExit):
        main(["dpo", pairs.path, "--data", pairs.path, "--model", folder])
    assert "both name the data to train on" in capsys.readouterr().err


def test_numbers_for_a_person():
    assert [in_units(number) for number in (12, 22_000, 1_540_000_000)] == ["12", "22 k", "1.54 B"]
    assert [in_bytes(number) for number in (12_808_192, 2_500_000_000)] == ["12.8 MB", "2.5 GB"]


@pytest.mark.slow("trains a model")
def test_what_goes_on_from_a_stage(folder: str, pairs: DataFile, tmp_path: Path, capsys):
    """Its folder stands in the commands that it suggests, and `proximo watch` knows its steps."""
    run = str(tmp_path / "run of dpo")
    assert main(["dpo", pairs.path, "--data.held-out", "0", "--model", folder, "--fit.batch", "5", "--run", run]) == 0
    printed = capsys.readouterr()
    assert f"next        proximo eval '{run}' --data PROMPTS\n            proximo chat '{run}'\n" in printed.out
    assert "  learning rate 1e-06  " in printed.err
    assert "run folder     " in printed.err
    assert main(["watch", run, "--once"]) == 0
    assert "finished, step 2 of 2" in capsys.readouterr().out
