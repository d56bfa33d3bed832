"""Reward models as adapters: what is trained, what lies in the folder, and who opens it."""

import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from torch import Tensor

import proximo
from proximo.data import DataFile
from proximo.models import load_model, tiny_model, tiny_tokenizer
from proximo.models.adapters.lora import Lora
from proximo.models.loading import has_score, read_config
from proximo.models.reward_models import check_scores, load_reward_model
from proximo.supervised.fitting import FitOptions, Fitted
from proximo.supervised.reward_model import RewardModelConfig, open_model, train_reward_model

TOKENS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model(hidden=32, layers=2, intermediate=48).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def config(folder: str, tmp_path_factory) -> RewardModelConfig:
    rows = [{"prompt": f"{number}:", "chosen": "a" * (1 + number % 5), "rejected": "b"} for number in range(24)]
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fit = FitOptions(batch=4, learning_rate=0.02, warmup_steps=0)
    return RewardModelConfig(DataFile(str(path), held_out=0.0), folder, Lora(rank=2), fit=fit, seed=3)


@pytest.fixture(scope="module")
def trained(config: RewardModelConfig, tmp_path_factory) -> Fitted:
    return train_reward_model(config, tmp_path_factory.mktemp("judge") / "run", lambda _: None)


@torch.no_grad()
def score(model: torch.nn.Module) -> Tensor:
    return model(input_ids=TOKENS).logits


def test_the_adapter_and_the_head_are_trained_and_nothing_else(config: RewardModelConfig):
    model, _ = open_model(config, None)
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {"score.weight"}
    assert len(trained) == 1 + 2 * 2 * 7
    # Before its first step it scores as the whole model with the same fresh head does.
    assert torch.equal(score(model), score(load_reward_model(config.model, seed=config.seed)))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
def test_its_folder_is_a_reward_model_for_everybody(config: RewardModelConfig, trained: Fitted, tmp_path: Path):
    path = str(trained.checkpoint)
    stored = load_file(trained.checkpoint / "adapter_model.safetensors")
    assert "base_model.model.score.weight" in stored
    assert not (trained.checkpoint / "model.safetensors").exists()
    assert has_score(read_config(path))
    check_scores(path)
    judge = load_reward_model(path, fresh_head=False)
    assert not torch.equal(score(judge), score(load_reward_model(config.model, seed=config.seed)))
    kept = load_reward_model(path, fresh_head=False, keep_adapter=True)
    torch.testing.assert_close(score(kept), score(judge), rtol=0, atol=1e-5)
    outside = AutoPeftModelForSequenceClassification.from_pretrained(path, num_labels=1).eval()
    torch.testing.assert_close(score(outside), score(judge), rtol=0, atol=1e-5)
    merged = proximo.merge(path, tmp_path / "merged").folder
    assert torch.equal(score(load_reward_model(str(merged), fresh_head=False)), score(judge))
    with pytest.raises(ValueError, match="holds a reward model, which scores and cannot speak"):
        load_model(path)


@pytest.mark.slow("trains a model")
def test_a_policy_s_adapter_has_no_head(folder: str, config: RewardModelConfig, tmp_path: Path):
    fitted = proximo.dpo(
        proximo.DpoConfig(config.data, folder, Lora(rank=2), fit=config.fit), tmp_path / "dpo", quiet=True
    )
    assert not has_score(read_config(str(fitted.checkpoint)))
    with pytest.raises(ValueError, match="no score head"):
        load_reward_model(str(fitted.checkpoint), fresh_head=False)
    load_reward_model(str(fitted.checkpoint))
