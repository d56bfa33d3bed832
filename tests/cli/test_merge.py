"""Adapters on the command line: trained, evaluated, merged, refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from proximo.cli import main

SMALL = ["--training.groups", "2", "--training.group-size", "4", "--training.minibatches", "1", "--device", "cpu"]
SMALL += ["--evaluation.problems", "8", "--adapter.type", "Lora", "--adapter.rank", "4"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A LoRA run of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "lora"
    torch.set_default_dtype(torch.float32)
    arguments = ["--steps", "2", "--training.learning-rate", "1e-3", "--run", str(folder)]
    assert main(["train", *SMALL, *arguments]) == 0
    torch.set_default_dtype(torch.float64)
    return folder


def test_a_run_saves_an_adapter_and_says_what_it_trained(run: Path):
    [checkpoint] = (run / "checkpoints").iterdir()
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 32, "LORA")
    assert config["target_modules"] == sorted(config["target_modules"])
    assert not (checkpoint / "model.safetensors").exists()
    trained = json.loads((run / "run.json").read_text())["parameters"]["trained"]
    assert trained == sum(each.numel() for each in load_file(checkpoint / "adapter_model.safetensors").values())


def test_merging_in_half_precision_says_what_rounding_does(run: Path, tmp_path: Path, capsys):
    assert main(["merge", str(run), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert "of the adapter's change: --dtype float32 keeps it whole" in capsys.readouterr().out
    assert main(["merge", str(run), str(tmp_path / "whole"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["folder"], found["rounding"] < 1e-3) == (str(tmp_path / "whole"), True)
    assert {each.dtype for each in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}


REFUSED: dict[str, tuple[list[str], str]] = {
    "no folder": (["ADAPTER"], "merge takes an adapter and a new folder"),
    "a dtype": (["ADAPTER", "OUT", "--dtype", "int8"], "--dtype int8: give float32 or bfloat16"),
    "a whole model": (["tiny-arithmetic", "OUT"], "'tiny-arithmetic' is a whole model, not an adapter"),
    "a folder in use": (["ADAPTER", "ADAPTER"], "which is there already: give a new folder"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_merged_is_refused(arguments: list[str], message: str, run: Path, tmp_path: Path, capsys):
    places = {"ADAPTER": str(run), "OUT": str(tmp_path / "out")}
    with pytest.raises(SystemExit) as stopped:
        main(["merge", *(places.get(each, each) for each in arguments)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow("merges and evaluates adapters")
def test_an_adapter_is_a_base_for_another_and_may_be_trained_whole(run: Path, tmp_path: Path, capsys):
    second = ["--task.type", "Arithmetic", "--model", str(run), "--run", str(tmp_path / "second"), "--steps", "1"]
    assert main(["train", *SMALL, *second]) == 0
    assert (tmp_path / "second/base/model.safetensors").exists()
    assert (tmp_path / "second/checkpoints/step-000001/adapter_model.safetensors").exists()
    arguments = [*SMALL[: SMALL.index("--adapter.type")], "--steps", "1", "--run", str(tmp_path / "whole")]
    assert main(["train", *arguments, "--task.type", "Arithmetic", "--model", str(run)]) == 0
    assert (tmp_path / "whole/checkpoints/step-000001/model.safetensors").exists()


def test_the_dry_run_says_what_is_trained(capsys):
    assert main(["train", *SMALL, "--dry-run"]) == 0
    assert "policy (801 k, frozen), its LoRA adapter (38.9 k, trained);" in capsys.readouterr().out
    assert main(["train", "--training.freeze", "embed", "--dry-run", "--device", "cpu"]) == 0
    assert "policy (788 k, trained), its frozen part (12.7 k, frozen), reference" in capsys.readouterr().out


@pytest.mark.slow("checks a whole setup")
def test_selfcheck_looks_at_the_adapter(capsys):
    arguments = ["--training.group-size", "4", "--device", "cpu", "--adapter.type", "Lora", "--json"]
    assert main(["selfcheck", *arguments]) == 0
    found = {check["name"]: check["value"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["packed = padded, gradient"] < 1e-4
    with pytest.raises(SystemExit):
        main(["selfcheck", *arguments, "--adapter.targets", "lm_head"])
    assert "adapter.targets has 'lm_head'" in capsys.readouterr().err
