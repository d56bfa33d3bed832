"""Exported models: the same weights, no state, a card with the run's facts, and refusals in one line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import proximo
from proximo.api.export import hub
from proximo.api.export.export import export
from proximo.cli import main
from proximo.models import load_model

pytestmark = pytest.mark.slow("exports a trained run")

SMALL = replace(
    proximo.presets.ARITHMETIC,
    steps=1,
    device="cpu",
    training=proximo.TrainingOptions(groups=2, group_size=4, minibatches=1, learning_rate=1e-3),
    evaluation=proximo.EvaluationOptions(problems=8),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with the run `whole`, and the run `lora` that trained an adapter."""
    folder = tmp_path_factory.mktemp("runs")
    torch.set_default_dtype(torch.float32)
    proximo.train(SMALL, folder / "whole", quiet=True)
    proximo.train(replace(SMALL, adapter=proximo.Lora(rank=4)), folder / "lora", quiet=True)
    torch.set_default_dtype(torch.float64)
    return folder


def answers(folder: str | Path) -> list[list[int]]:
    """Greedy tokens of the model as transformers loads it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = tokenizer(
        [f"{a:02}+{b:02}=" for a, b in ((12, 34), (70, 9), (55, 44), (8, 8), (61, 27), (33, 90))], return_tensors="pt"
    )
    return model.generate(**asked, max_new_tokens=5, do_sample=False).tolist()


def test_a_folder_has_the_weights_and_no_state(runs: Path, tmp_path: Path):
    exported = export(runs / "whole", "folder", tmp_path / "out")
    assert exported.rounding is None
    names = {path.name for path in Path(exported.place).iterdir()}
    assert {"README.md", "proximo.config.toml", "config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "state" not in names
    checkpoint = runs / "whole" / "checkpoints" / "step-000001"
    assert (tmp_path / "out/model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert answers(exported.place) == answers(checkpoint)


def test_an_adapter_is_merged_or_kept(runs: Path, tmp_path: Path):
    merged = export(runs / "lora", "folder", tmp_path / "merged")
    assert merged.rounding is not None
    assert merged.rounding < 1e-3
    trained = load_model(str(runs / "lora/checkpoints/step-000001"))
    for name, tensor in load_file(tmp_path / "merged/model.safetensors").items():
        assert torch.equal(tensor, trained.get_parameter(name).float())
    kept = export(runs / "lora", "adapter", tmp_path / "adapter")
    names = {path.name for path in Path(kept.place).iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= names
    assert "model.safetensors" not in names
    assert answers(kept.place) == answers(merged.place)


def test_another_precision(runs: Path, tmp_path: Path):
    export(runs / "whole", "folder", tmp_path / "half", dtype="bfloat16")
    assert {each.dtype for each in load_file(tmp_path / "half/model.safetensors").values()} == {torch.bfloat16}


def test_the_card_has_the_facts_of_the_run(runs: Path, tmp_path: Path):
    export(runs / "lora" / "checkpoints" / "step-000001", "adapter", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    for fact in (
        "tags:\n- proximo\n- reinforcement-learning\n---",
        "`tiny-arithmetic` trained by GRPO with Proximo.",
        "| steps | 1 of 1 |",
        "| task and data | Arithmetic(",
        "| adapter | Lora(rank=4",
        "| a step | 2 prompts × 4 completions |",
        "proximo train proximo.config.toml --run runs/again",
        f"Versions: Proximo {proximo.__version__}, torch {torch.__version__}",
    ):
        assert fact in card
    rows = [json.loads(line) for line in (runs / "lora/metrics.jsonl").read_text().splitlines()]
    before, after = (row for row in rows if "held_out/accuracy" in row)
    for name, row in (("before", before), ("after", after)):
        low, high = row["held_out/low"], row["held_out/high"]
        assert f"| {name} | {row['held_out/accuracy']:.1%} ({low:.1%} to {high:.1%}) |" in card


def test_the_card_has_no_secrets_and_no_place_on_this_machine(runs: Path, tmp_path: Path, monkeypatch):
    copy = tmp_path / "run"
    shutil.copytree(runs / "whole/checkpoints/step-000001", copy / "checkpoints/step-000001")
    (copy / "run.json").write_bytes((runs / "whole/run.json").read_bytes())
    config = (runs / "whole/config.toml").read_text()
    (copy / "config.toml").write_text(config.replace('"tiny-arithmetic"', f'"{tmp_path}/hf-swordfish-1/base"'))
    monkeypatch.setenv("SOME_TOKEN", "swordfish-1")
    export(copy, "folder", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| base model | base |" in card
    assert str(tmp_path) not in card
    assert "swordfish" not in card + (tmp_path / "out" / "proximo.config.toml").read_text()


class FakeHub:
    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self.error = error

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        self.calls.append((repo_id, private, exist_ok))

    def upload_folder(self, *, folder_path: Path, repo_id: str, commit_message: str) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append((repo_id, sorted(path.name for path in folder_path.iterdir())))


def test_the_hub_gets_the_folder(runs: Path):
    fake = FakeHub()
    exported = export(runs / "whole", "hub", "me/mine", api=fake)
    assert exported.place == "https://huggingface.co/me/mine"
    assert fake.calls[0] == ("me/mine", True, True)
    assert {"README.md", "model.safetensors"} <= set(fake.calls[1][1])
    with pytest.raises(ValueError, match="out is 'me/mine': the hub refused it, RuntimeError: 403"):
        export(runs / "whole", "hub", "me/mine", api=FakeHub(RuntimeError("403\nforbidden")))


def test_the_hub_is_refused_offline_without_a_token_and_without_a_name(runs: Path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="`to='hub'`, and HF_HUB_OFFLINE is set"):
        hub.ready_hub(None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ValueError, match="to='hub'.*set HF_TOKEN"):
        export(runs / "whole", "hub", "me/mine")
    with pytest.raises(ValueError, match="for the hub give the repository, USER/NAME"):
        export(runs / "whole", "hub", api=FakeHub())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["whole", "--to", "onnx"], "--to onnx: give one of folder, adapter, hub, gguf:f32, gguf:f16, gguf:q8_0"),
        (["whole", "--to", "adapter"], "is a whole model, not an adapter: give --to folder"),
        (["whole", "--out", "whole"], "out is 'whole', which is there already: give a new name"),
        (["whole", "--to", "gguf:f16", "--dtype", "bfloat16"], "it is for a folder or the hub"),
        (["whole", "--dtype", "int8"], "--dtype int8: give float32 or bfloat16"),
        ([], "export takes one run or model: proximo export RUN|MODEL"),
    ],
)
def test_what_cannot_be_exported_is_refused(runs: Path, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    with pytest.raises(SystemExit):
        main(["export", *arguments])
    assert message in capsys.readouterr().err
    assert {path.name for path in runs.iterdir()} == {"whole", "lora"}
