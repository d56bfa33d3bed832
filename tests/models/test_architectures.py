"""Sampler, learner and an unbatched forward pass give the same log-probs, whatever the architecture."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from proximo.models import PaddedFallback, score, tiny_tokenizer
from proximo.models.packing.attention import attention, uses_our_attention
from proximo.samplers.embedded import local_sampler
from proximo.samplers.sampler import SamplingOptions
from proximo.types import Request

TOKENIZER = tiny_tokenizer()
SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_n_groups": 1,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "smollm3": {},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3n_text": {
        "head_dim": 8,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "vocab_size_per_layer_input": len(TOKENIZER),
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
    },
    "phi3": {},
    "gpt_neox": {},
    "gpt2": GPT,
    "gptj": GPT | {"rotary_dim": 4},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "block_size": 8,
    },
    "granitemoehybrid": MAMBA2
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 64},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 64, "head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "chunk_size": 8, "n_groups": 1},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
}


def built(name: str, **more: Any) -> PreTrainedModel:
    """With weights far from 0: log-probs then depend on where tokens stand."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {name}")
    config = CONFIG_MAPPING[name](**(SHAPE | ARCHITECTURES.get(name, {}) | more))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and 0 < parameter.std() < 0.1:
                parameter.mul_(8)
    return model


def by_itself(model: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Tensor:
    whole = torch.tensor([[*prompt, *tokens]])
    ordinary = attention(model, "sdpa") if uses_our_attention(model) else nullcontext()
    with torch.no_grad(), ordinary:
        logprobs = model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.slow("makes a model of every architecture")
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore")  # transformers and torch say much about the slow paths of hybrids
def test_sampler_learner_and_plain_forward_agree(name: str):
    model = built(name)
    prompts = [(7, 20, 33), (9, 40, 12, 55, 61, 30, 8)]
    found = local_sampler(model, TOKENIZER).sample(
        [Request(key, prompt, 2) for key, prompt in enumerate(prompts)], SamplingOptions(max_tokens=12), seed=0, step=0
    )
    group = torch.tensor([0, 0, 1, 1])
    completions = [completion for siblings in found for completion in siblings]
    lengths = torch.tensor([len(each.tokens) for each in completions])
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(each.tokens) for each in completions], batch_first=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", PaddedFallback)
        learned = score(model, prompts=prompts, tokens=tokens, lengths=lengths, group=group).logprobs
    assert int(lengths.sum()) > 20
    for number, row, each in zip(group.tolist(), learned, completions, strict=True):
        own = by_itself(model, prompts[number], each.tokens)
        torch.testing.assert_close(torch.tensor(each.logprobs, dtype=own.dtype), own, atol=3e-5, rtol=0)
        torch.testing.assert_close(row[: len(own)], own, atol=3e-5, rtol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["rwkv", "recurrent_gemma"])
def test_a_model_that_keeps_its_cache_to_itself_is_refused_in_one_line(name: str):
    more = {"recurrent_gemma": {"lru_width": 32, "attention_window_size": 16, "num_hidden_layers": 3}}
    model = built(name, **more.get(name, {}))
    with pytest.raises(
        ValueError, match=f"{type(model).__name__}, whose forward pass does not take and return a cache"
    ):
        local_sampler(model, TOKENIZER).sample([Request(0, (5, 6), 1)], SamplingOptions(max_tokens=2), seed=0, step=0)
