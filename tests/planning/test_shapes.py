"""Parameter counts: exact, by hand and by what is published, for tied, untied and mixture models."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from proximo.learner.memory import token_cost
from proximo.models import tiny_model, tiny_moe
from proximo.models.adapters.lora import Lora, adapter_size
from proximo.models.adapters.targets import target_layers
from proximo.planning.shapes import SHAPES, ModelShape, read_shape

PUBLISHED = {
    "SmolLM2-135M": 134_515_008,
    "0.6B": 596_049_920,
    "1.7B": 1_720_574_976,
    "4B": 4_022_468_096,
    "8B": 8_190_735_360,
    "14B": 14_768_307_200,
    "30B-A3B": 30_532_122_624,
    "Llama-1B": 1_235_814_400,
    "Llama-3B": 3_212_749_824,
    "Llama-8B": 8_030_261_248,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
}
"""As the models' pages say, tied weights once."""


@pytest.mark.slow("plans many models")
@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_have_the_published_number_of_parameters(name: str):
    assert read_shape(name).parameters == PUBLISHED[name]


def test_eight_billion_by_hand():
    shape = read_shape("8b")  # names are read in any case, and with the family's name
    assert read_shape("Qwen3-8B").parameters == shape.parameters
    attention = 4096 * (32 * 128) * 2 + 4096 * (8 * 128) * 2
    mlp = 3 * 4096 * 12288
    norms = 2 * 4096 + 2 * 128
    assert shape.parameters == 36 * (attention + mlp + norms) + 4096 + 2 * 151936 * 4096
    assert shape.body == shape.matrices == 36 * (attention + mlp)
    assert shape.head == 151936 * 4096
    assert shape.kv_bytes(2) == 2 * 36 * 8 * 128 * 2 == 147_456


def test_a_mixture_multiplies_a_token_with_its_chosen_experts_only():
    shape = read_shape("30B-A3B")
    attention = 2048 * (32 * 128) * 2 + 2048 * (4 * 128) * 2
    expert, router = 3 * 2048 * 768, 2048 * 128
    assert shape.matrices == 48 * (attention + router + 128 * expert)
    assert shape.body == 48 * (attention + router + 8 * expert)
    # Adapters are on attention: the experts are one tensor each.
    assert len(target_layers(shape.model, ())) == 48 * 4


@given(
    layers=st.integers(1, 4),
    heads=st.sampled_from([2, 4]),
    width=st.sampled_from([8, 16]),
    inner=st.integers(8, 40),
    tied=st.booleans(),
    family=st.sampled_from([LlamaConfig, Qwen3Config]),
)
@settings(max_examples=15, deadline=None)
def test_the_count_is_that_of_the_real_model(tmp_path_factory, layers, heads, width, inner, tied, family):
    config = family(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=width,
        tie_word_embeddings=tied,
    )
    file = tmp_path_factory.mktemp("shape") / "config.json"
    config.to_json_file(file)
    found = read_shape(str(file))
    real = AutoModelForCausalLM.from_config(config)
    assert found.parameters == sum(each.numel() for each in real.parameters())
    assert next(found.model.parameters()).device == torch.device("meta")


@pytest.mark.parametrize("model", [tiny_model(layers=2), tiny_moe(layers=2)], ids=["dense", "mixture"])
def test_a_folder_and_its_config_give_the_same_shape(model, tmp_path):
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # weights are not looked at
    expected = sum(each.numel() for each in model.parameters())
    for name in (tmp_path, tmp_path / "config.json"):
        shape = read_shape(str(name))
        assert (shape.parameters, shape.layers, shape.is_packed) == (expected, 2, True)


def test_adapters_by_hand():
    model = read_shape("0.6B").model
    assert adapter_size(model, Lora(rank=8, targets=("q_proj", "down_proj"))) == 8 * 28 * (1024 + 2048 + 3072 + 1024)
    everything = (1024 + 2048) + 2 * (1024 + 1024) + (2048 + 1024) + 2 * (1024 + 3072) + (3072 + 1024)
    assert adapter_size(model, Lora(rank=16)) == 16 * 28 * everything
    assert len(target_layers(model, ())) == 28 * 7
    assert len(target_layers(model, ("q_proj", "v_proj"))) == 28 * 2


def test_what_is_no_model_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"neither a folder .*by name: SmolLM2-135M, 0.6B, 1.7B"):
        read_shape("nobody/nothing")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "toaster"}))
    with pytest.raises(ValueError, match="transformers cannot read its config.json") as caught:
        read_shape(str(file))
    assert "\n" not in str(caught.value)


def test_a_model_without_attention_is_refused_and_experts_by_either_name_are_counted(tmp_path):
    size: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}
    MambaConfig(**size).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mamba model.*num_attention_heads.*decoders with attention"):
        read_shape(str(tmp_path))
    experts: dict[str, Any] = {
        "num_experts_per_tok": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    mixtral = MixtralConfig(**size, **experts, intermediate_size=24)
    qwen = Qwen3MoeConfig(**size, **experts, intermediate_size=96, moe_intermediate_size=24)
    one, other = (token_cost(each, torch.bfloat16, compiled=False) for each in (mixtral, qwen))
    assert one == other


def test_a_model_outside_the_fast_path_is_counted_too():

    config = GPTNeoXConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    with torch.device("meta"):
        shape = ModelShape("neox", AutoModelForCausalLM.from_config(config))
    assert not shape.is_packed
    assert shape.kv_bytes(2) == 2 * 2 * 2 * 16 * 2
