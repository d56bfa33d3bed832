"""A new adapter on a model that is an adapter: fine-tuning with LoRA, and then whatever else with LoRA."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import proximo
from proximo.data import DataFile
from proximo.models import load_model, tiny_model, tiny_tokenizer
from proximo.models.adapters.files import base_name
from proximo.models.adapters.lora import Lora
from proximo.models.shipped import resolve
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.samplers.sampler import SamplingOptions
from proximo.supervised.dpo import DpoConfig, dpo, dpo_overview
from proximo.supervised.fitting import FitOptions
from proximo.supervised.reward_model import RewardModelConfig, train_reward_model
from proximo.supervised.sft import SftConfig, open_model, sft
from proximo.tasks.echo import Echo

FIT = FitOptions(batch=4, learning_rate=0.02, warmup_steps=0)


def quiet(line: str) -> None: ...


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> DataFile:
    rows = [{"prompt": f"{number}:", "chosen": "a" * (1 + number % 5), "rejected": "b"} for number in range(8)]
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row | {"completion": row["chosen"]}) + "\n" for row in rows))
    return DataFile(str(path), held_out=0.0)


@pytest.fixture(scope="module")
def tuned(pairs: DataFile, tmp_path_factory) -> Path:
    """Run folder of a fine-tuning with LoRA."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=24).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    config = SftConfig(
        pairs, str(folder), Lora(rank=2), fit=FIT, prompt_column="prompt", completion_column="completion"
    )
    sft(config, run := tmp_path_factory.mktemp("runs") / "sft", quiet)
    return run


def whole(model: str | Path) -> dict[str, torch.Tensor]:
    return load_model(str(model)).state_dict()


@pytest.mark.slow("trains three models")
def test_dpo_goes_on_from_a_fine_tuned_adapter_with_another(pairs: DataFile, tuned: Path, tmp_path: Path):
    config, lines = DpoConfig(pairs, str(tuned), Lora(rank=2), fit=FIT), list[str]()
    assert "written to RUN/base" in dict(dpo_overview(config).lines)["starts from"]
    first = dpo(config, tmp_path / "dpo", lines.append)
    assert any(f"{tmp_path}/dpo/base" in line.replace("\n", "") for line in lines)
    assert base_name(first.checkpoint) == str((tmp_path / "dpo" / "base").absolute())
    begun, base, after = (
        whole(Path(resolve(str(tuned)))),
        whole(tmp_path / "dpo/base"),
        whole(first.checkpoint),
    )
    assert all(torch.equal(begun[name], each) for name, each in base.items())
    assert not all(torch.equal(after[name], each) for name, each in base.items())
    # The reference is the model that it began with, and a third link goes on from the second.
    again = replace(config, model=str(first.checkpoint), reference_logprobs=None)
    assert base_name(dpo(again, tmp_path / "third", quiet).checkpoint) == str((tmp_path / "third" / "base").absolute())
    merged = proximo.merge(tmp_path / "third", tmp_path / "merged")
    assert whole(merged.folder).keys() == begun.keys()


def test_a_base_that_was_written_is_what_a_resumed_stage_reads(pairs: DataFile, tuned: Path, tmp_path: Path):
    config = SftConfig(pairs, str(tuned), Lora(rank=2), fit=FIT, prompt_column="prompt", completion_column="completion")
    first, _ = open_model(config, None, tmp_path)
    (other := tmp_path / "other").mkdir()
    moved = replace(config, model=str(other), seed=config.seed)
    for file in Path(resolve(str(tuned))).iterdir():
        if file.is_file():
            (other / file.name).write_bytes(file.read_bytes())
    (other / "adapter_model.safetensors").unlink()
    second, _ = open_model(moved, None, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.slow("trains two reward models")
def test_a_reward_model_begins_on_an_adapter_and_on_another_reward_model_s(
    pairs: DataFile, tuned: Path, tmp_path: Path
):
    config = RewardModelConfig(pairs, str(tuned), Lora(rank=2), fit=FIT)
    judge = train_reward_model(config, tmp_path / "judge", quiet)
    further = train_reward_model(replace(config, model=str(judge.checkpoint)), tmp_path / "further", quiet)
    assert base_name(further.checkpoint) == str((tmp_path / "further" / "base").absolute())


def test_reinforcement_learning_goes_on_from_a_fine_tuned_adapter(tuned: Path, tmp_path: Path):
    config = RunConfig(
        task=Echo(held_out=8),
        model=str(tuned),
        adapter=Lora(rank=2),
        device="cpu",
        sampling=SamplingOptions(max_tokens=4),
        training=TrainingOptions(groups=2, group_size=2, minibatches=1),
        evaluation=EvaluationOptions(problems=0),
        steps=1,
    )
    run = Run(config, tmp_path / "rl", ProgressLines())
    (tmp_path / "saved").mkdir()
    run.learner.policy.save(tmp_path / "saved")
    assert base_name(tmp_path / "saved") == str((tmp_path / "rl" / "base").absolute())
    begun = whole(Path(resolve(str(tuned))))
    assert all(torch.equal(begun[name], each) for name, each in whole(tmp_path / "saved").items())
