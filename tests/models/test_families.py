"""Adapters in families beyond the fast path: on attention, dense and shared MLPs, never on experts and routers; what
training writes is read back exactly, alone and merged."""

import json
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, PreTrainedModel

from proximo.algorithms import GRPO
from proximo.learner.learner import Learner
from proximo.learner.lora import LoraPolicy
from proximo.learner.options import LearnerOptions
from proximo.models import load_model
from proximo.models.adapters.files import CONFIG, read_adapter, save_model
from proximo.models.adapters.lora import Lora, adapter_size, add_lora, lora_layers, merged_weights
from proximo.models.adapters.starting import check_adapter
from proximo.models.adapters.targets import target_layers
from proximo.models.loading import skeleton
from proximo.models.packing.attention import attention, uses_our_attention
from proximo.rl.assemble import assemble
from tests.learner.test_lora import stirred
from tests.learner.test_values import groups
from tests.models.test_architectures import MAMBA2, built

LORA = Lora(rank=2, alpha=3)
SLOW_PATHS = pytest.mark.filterwarnings("ignore")  # transformers and torch say much about them
ROUTED = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MOE: dict[str, Any] = dict.fromkeys(ROUTED, 4) | {
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse"],
}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
INDEXED = MLA | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 8}
QKVO = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LATENT = tuple(f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))


def mlp(name: str) -> tuple[str, ...]:
    return tuple(f"{name}.{part}" for part in ("gate_proj", "up_proj", "down_proj"))


DENSE, SHARED = mlp("mlp"), mlp("shared_experts")
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "afmoe": ({"num_dense_layers": 1}, (*QKVO, "self_attn.gate_proj", *DENSE, *SHARED)),
    "deepseek_v2": (MLA, (*LATENT, *DENSE, *SHARED)),
    "deepseek_v3": (MLA, (*LATENT, *DENSE, *SHARED)),
    "deepseek_v32": (INDEXED, (*LATENT, *DENSE, *SHARED)),
    "dots1": ({}, (*QKVO, *DENSE, *SHARED)),
    "ernie4_5_moe": ({"moe_k": 2, "moe_layer_start_index": 1}, (*QKVO, *DENSE, *SHARED)),
    "exaone_moe": ({"layer_types": ["full_attention"] * 2}, (*QKVO, *DENSE, *SHARED)),
    "glm4_moe": ({}, (*QKVO, *DENSE, *SHARED)),
    "glm4_moe_lite": (MLA, (*LATENT, *DENSE, *SHARED)),
    "glm_moe_dsa": (INDEXED, (*LATENT, *DENSE, *SHARED)),
    "hunyuan_v1_moe": ({"moe_topk": 2}, (*QKVO, *mlp("shared_mlp"))),
    "longcat_flash": (
        MLA
        | {"num_layers": 1, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 1},
        (*LATENT, *mlp("mlps")),
    ),
    "qwen3_next": (
        {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16}
        | {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        (*QKVO, "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj", *mlp("shared_expert")),
    ),
    "solar_open": ({}, (*QKVO, *SHARED)),
    # In no list of what was broken
    "llama4_text": (
        {"intermediate_size_mlp": 64, "moe_layers": [1], "attention_chunk_size": 32},
        (*QKVO, *mlp("feed_forward"), *mlp("shared_expert")),
    ),
    "phimoe": ({}, QKVO),
    "mixtral": ({}, QKVO),
    "qwen2_moe": ({"shared_expert_intermediate_size": 16}, (*QKVO, *mlp("shared_expert"))),
    "qwen3_moe": ({"mlp_only_layers": [0]}, (*QKVO, *DENSE)),
    "gpt_oss": ({}, QKVO),
    "granitemoeshared": (
        {"shared_intermediate_size": 16},
        (*QKVO, "shared_mlp.input_linear", "shared_mlp.output_linear"),
    ),
    "jamba": (
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
        (*QKVO, "mamba.in_proj", "mamba.x_proj", "mamba.out_proj", *mlp("feed_forward")),
    ),
    "minimax_m2": ({}, QKVO),
    "flex_olmo": ({}, QKVO),
    "olmoe": ({}, QKVO),
    "mamba": ({"state_size": 8, "time_step_rank": 4}, ("mixer.in_proj",)),
    "falcon_h1": (MAMBA2 | {"mamba_d_ssm": 64}, (*QKVO, "mamba.in_proj", *mlp("feed_forward"))),
    "gemma3n_text": (
        {"mlp_layer_types": ["dense"] * 4},
        (
            *(*QKVO, *DENSE, "laurel.linear_left", "laurel.linear_right", "altup.prediction_coefs"),
            *("layers.per_layer_input_gate", "layers.per_layer_projection", "model.per_layer_model_projection"),
            *("model.altup_projections", "model.altup_unembed_projections"),
        ),
    ),
    "nemotron_h": (
        {"layers_block_type": ["mamba", "moe", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8}
        | {"ssm_state_size": 8, "n_groups": 1, "chunk_size": 8, "moe_shared_expert_intermediate_size": 16},
        (
            "mixer.in_proj",
            *(f"mixer.{name[10:]}" for name in QKVO),
            "shared_experts.up_proj",
            "shared_experts.down_proj",
        ),
    ),
}


def made(name: str) -> PreTrainedModel:
    return built(name, **(MOE | FAMILIES[name][0]))


@pytest.fixture
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a family's model."""
    made(request.param).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """Of a plain forward pass."""
    with attention(model, "sdpa") if uses_our_attention(model) else nullcontext():
        return model(input_ids=torch.tensor([[7, 12, 33, 9, 22, 5]]), use_cache=False).logits


def saved(model: PreTrainedModel, folder: Path) -> Path:
    folder.mkdir()
    save_model(model, folder)
    return folder


def kinds(model: PreTrainedModel) -> set[str]:
    """The layers with an adapter, without numbers, by the last two parts of their names."""
    return {".".join(re.sub(r"\.\d+", "", name).split(".")[-2:]) for name, _ in lora_layers(model)}


@pytest.mark.slow("trains a model of every family")
@pytest.mark.parametrize(
    ("base", "expected"), [(name, each[1]) for name, each in FAMILIES.items()], indirect=["base"], ids=FAMILIES
)
@SLOW_PATHS
def test_an_adapter_is_trained_saved_read_and_merged(base: Path, expected: tuple[str, ...], tmp_path: Path):
    model = load_model(str(base))
    plain, before = logits(model), {name: each.detach().clone() for name, each in model.named_parameters()}
    policy = LoraPolicy(model, LORA, base=str(base), seed=0)
    assert kinds(model) == set(expected)
    assert sum(each.numel() for each in policy.parameters().values()) == adapter_size(skeleton(str(base)), LORA)

    stirred(model, 0.1)
    first = {name: each.detach().clone() for name, each in policy.parameters().items()}
    options = LearnerOptions(groups=2, minibatches=1, learning_rate=1e-2)
    trained = Learner(policy, GRPO, options, temperature=1.0, seed=0)
    trained.update(assemble(groups(), [], trained, 8).batch, fresh=True)
    assert sum(not torch.equal(first[name], each) for name, each in policy.parameters().items()) > 2
    frozen = {name.replace(".base_layer.", "."): each for name, each in model.named_parameters() if "lora" not in name}
    assert frozen.keys() == before.keys()
    assert all(torch.equal(before[name], each) for name, each in frozen.items())

    adapter, found = str(saved(model, tmp_path / "adapter")), logits(model)
    assert (found - plain).abs().max() > 1e-2
    merged = load_model(adapter)  # as `eval` of an engine, `merge` and `export` read it
    assert torch.equal(logits(load_model(adapter, keep_adapter=True)), found)  # as `eval` and `chat` do
    assert_close(logits(merged), found, rtol=0, atol=1e-4)
    pushed, whole = dict(merged_weights(model)), dict(merged.named_parameters())
    assert pushed.keys() == whole.keys() == before.keys()
    assert all(torch.equal(pushed[name], each) for name, each in whole.items())
    resumed = LoraPolicy(load_model(str(base)), LORA, base=str(base), seed=1)
    read_adapter(resumed.model, Path(adapter))
    assert torch.equal(logits(resumed.model), found)


@pytest.mark.slow("trains models and reads them with peft")
@pytest.mark.parametrize("base", ["glm4_moe", "afmoe", "hunyuan_v1_moe", "phimoe", "jamba"], indirect=True)
@SLOW_PATHS
def test_peft_and_transformers_read_it_too(base: Path, tmp_path: Path):
    """In mixtures peft takes the name of a shared MLP's layer for that of all experts."""
    model = load_model(str(base))
    add_lora(model, LORA, base=str(base), seed=0)
    stirred(model, 0.1)
    adapter = saved(model, tmp_path / "adapter")
    for kind in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        assert_close(logits(kind.from_pretrained(adapter, dtype=torch.float32)), logits(model), rtol=0, atol=1e-5)


@SLOW_PATHS
def test_experts_and_routers_are_meant_where_nothing_else_is_called_so():
    afmoe = made("afmoe")
    assert target_layers(afmoe, ("gate",)) == ["model.layers.1.mlp.router.gate"]
    assert target_layers(afmoe, ("up_proj",)) == [
        f"model.layers.{part}.up_proj" for part in ("0.mlp", "1.mlp.shared_experts")
    ]
    assert len(target_layers(made("qwen2_moe"), ("shared_expert_gate",))) == 2
    assert len(target_layers(made("deepseek_v32"), ("wq_b",))) == 2


class Mixture(nn.Module):
    """Experts that are linear layers, as families had them and may have again."""

    def __init__(self) -> None:
        super().__init__()
        layer = partial(nn.Linear, 4, 4)
        self.attention = nn.ModuleDict({"q_proj": layer()})
        self.mlp = nn.ModuleDict(
            {
                "gate": layer(),
                "shared_experts": nn.ModuleDict({"up": layer()}),
                "experts": nn.ModuleList(nn.ModuleDict({"up": layer(), "down": layer()}) for _ in range(2)),
            }
        )
        self.head = layer()

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_experts_that_are_linear_layers_have_no_adapter_unless_they_are_named():
    model: Any = Mixture()
    usual = ["attention.q_proj", "mlp.shared_experts.up"]
    assert target_layers(model, ()) == usual
    assert target_layers(model, ("q_proj", "up")) == usual
    assert target_layers(model, ("down",)) == ["mlp.experts.0.down", "mlp.experts.1.down"]
    assert target_layers(model, ("experts.1.up",)) == ["mlp.experts.1.up"]


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("llama4_text", "router", "feed_forward.router is a Llama4Router, which computes something else"),
        ("phimoe", "router", "mlp.router is a PhimoeTopKRouter"),
        ("mamba", "out_proj", "MambaMixer reads the weight of out_proj"),
        ("falcon_h1", "out_proj", "FalconH1Mixer reads the weight of out_proj"),
        ("longcat_flash", "classifier", "LongcatFlashTopkRouter reads the weight of classifier"),
        ("glm4_moe", "experts.down_proj", r"which no linear layer is called \(experts in one tensor are none\)"),
        ("qwen3_moe", "gate", "which no linear layer is called"),
    ],
)
@SLOW_PATHS
def test_what_cannot_have_an_adapter_is_refused_in_one_line(name: str, target: str, message: str):
    with pytest.raises(ValueError, match=message) as error:
        target_layers(made(name), ("up_proj", target) if name == "glm4_moe" else (target,))
    assert str(error.value).startswith(f"adapter.targets has {target!r}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("base", ["llama4_text"], indirect=True)
@SLOW_PATHS
def test_a_target_is_refused_before_weights_are_looked_at(base: Path):
    (base / "model.safetensors").unlink()
    check_adapter(str(base), Lora(targets=("q_proj",)))
    with pytest.raises(ValueError, match="adapter.targets has 'router'"):
        check_adapter(str(base), Lora(targets=("router",)))


@pytest.mark.parametrize("base", ["glm4_moe"], indirect=True)
@SLOW_PATHS
def test_adapters_of_experts_are_refused(base: Path, tmp_path: Path):
    """As peft writes them, and as runs of earlier versions did."""
    model = load_model(str(base))
    add_lora(model, LORA, base=str(base), seed=0)
    adapter = saved(model, tmp_path / "adapter")
    config = json.loads((adapter / CONFIG).read_text())
    for names in (["gate_up_proj", "down_proj"], "experts", [3], ["mlp.experts.weight"]):
        (adapter / CONFIG).write_text(json.dumps(config | {"target_parameters": names}))
        with pytest.raises(ValueError, match="only plain LoRA is read|does not fit its base model") as error:
            load_model(str(adapter))
        assert "\n" not in str(error.value)
