"""GGUF files, read back by gguf: names, numbers and tokens as llama.cpp expects them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from proximo.api.export import export as exporting
from proximo.api.export import gguf_file
from proximo.api.export.gguf_file import refuse_model, write_gguf
from proximo.api.export.gguf_tokens import vocabulary
from proximo.cli import main

SIZES: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def bpe(splitting, **options) -> PreTrainedTokenizerFast:
    words = {"a": 0, "b": 1, "ab": 2, "Ġ": 3}
    made = Tokenizer(models.BPE(words, [("a", "b")], **options))
    made.pre_tokenizer = splitting
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")
    tokenizer.add_tokens(["tool"])
    return tokenizer


def qwen_split(pattern: str = QWEN):
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])


def read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    reader = gguf.GGUFReader(file)
    return {name: field.contents() for name, field in reader.fields.items()}, {
        each.name: each for each in reader.tensors
    }


def test_a_run_as_gguf(tmp_path: Path, capsys, monkeypatch):
    """The shipped model: qwen3, with a tokenizer of single characters."""
    monkeypatch.chdir(tmp_path)
    assert main(["export", "tiny-arithmetic", "--to", "gguf:q8_0"]) == 0
    assert capsys.readouterr().out == "the model   tiny-arithmetic.q8_0.gguf\n"
    facts, tensors = read(tmp_path / "tiny-arithmetic.q8_0.gguf")
    assert facts["general.architecture"] == "qwen3"
    assert facts["qwen3.attention.key_length"] == 32
    assert facts["qwen3.rope.freq_base"] == 10000.0
    assert facts["tokenizer.ggml.tokens"][:6] == ["<pad>", "<eos>", "<unk>", "Ċ", "Ġ", "0"]
    assert facts["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert facts["tokenizer.ggml.eos_token_id"] == 1
    assert facts["tokenizer.ggml.add_bos_token"] is False
    assert "output.weight" not in tensors  # it is the embedding
    assert tensors["blk.3.ffn_down.weight"].tensor_type == gguf.GGMLQuantizationType.Q8_0
    assert tensors["blk.3.attn_q_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32


def test_qwen2_has_its_biases_and_the_numbers_are_exact(tmp_path: Path):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)).float()
    torch.nn.init.normal_(model.get_parameter("model.layers.0.self_attn.k_proj.bias"))
    write_gguf(model, bpe(qwen_split()), tmp_path / "x.gguf", "f32", name="x")
    facts, tensors = read(tmp_path / "x.gguf")
    assert facts["tokenizer.ggml.pre"] == "qwen2"
    assert facts["tokenizer.ggml.merges"] == ["a b"]
    assert facts["tokenizer.ggml.tokens"] == [
        "a",
        "b",
        "ab",
        "Ġ",
        "<eos>",
        "tool",
        *(f"[PAD{n}]" for n in range(6, 12)),
    ]
    assert facts["tokenizer.ggml.token_type"] == [1, 1, 1, 1, 3, 4, *[5] * 6]
    for name, known in {
        "blk.0.attn_k.bias": "model.layers.0.self_attn.k_proj.bias",
        "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
        "output.weight": "lm_head.weight",
        "output_norm.weight": "model.norm.weight",
    }.items():
        assert np.array_equal(tensors[name].data, model.state_dict()[known].numpy())
    assert len(tensors) == len(model.state_dict())


def test_llama_pairs_neighbours(tmp_path: Path):
    """Rows 0 and half of a head, which transformers rotates together, become neighbours."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).float()
    rows = torch.arange(64.0).unsqueeze(1).expand(64, 64)
    model.get_parameter("model.layers.0.self_attn.q_proj.weight").data = rows.clone()
    splitting = pre_tokenizers.ByteLevel(add_prefix_space=False)
    write_gguf(model, bpe(splitting), tmp_path / "x.gguf", "f16", name="x")
    facts, tensors = read(tmp_path / "x.gguf")
    assert facts["tokenizer.ggml.pre"] == "gpt-2"
    query = tensors["blk.0.attn_q.weight"]
    assert query.tensor_type == gguf.GGMLQuantizationType.F16
    assert query.data[:6, 0].tolist() == [0, 8, 1, 9, 2, 10]
    assert query.data[16:20, 0].tolist() == [16, 24, 17, 25]


def test_splitting_rules_have_names():
    digits = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert vocabulary(bpe(digits), 12).pre == "smollm"
    three = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
    assert vocabulary(bpe(qwen_split(three)), 12).pre == "llama-bpe"
    with pytest.raises(ValueError, match="Split and ByteLevel.*llama.cpp's own script"):
        vocabulary(bpe(qwen_split(r"\w+")), 12)
    with pytest.raises(ValueError, match="BPE with byte fallback.*llama.cpp's own script"):
        vocabulary(bpe(None, byte_fallback=True), 12)
    with pytest.raises(ValueError, match="the tokenizer has 6 tokens and the model 5"):
        vocabulary(bpe(qwen_split()), 5)


def test_models_that_are_not_written_are_refused_by_name():
    scaled = LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    with torch.device("meta"):
        with pytest.raises(ValueError, match="rope_type 'linear'.*llama.cpp's own script"):
            refuse_model(LlamaForCausalLM(scaled))
        from transformers import GPT2Config, GPT2LMHeadModel

        with pytest.raises(ValueError, match="model is GPT2LMHeadModel.*LlamaForCausalLM, Qwen2"):
            refuse_model(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1)))


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(exporting, "write_gguf", fail)
    with pytest.raises(ValueError, match="no"):
        exporting.export("tiny-arithmetic", "gguf:f32", tmp_path / "x.gguf")
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'needs gguf: pip install "proximo\[gguf\]"'):
        exporting.export("tiny-arithmetic", "gguf:f32", tmp_path / "x.gguf")
    assert json.dumps([path.name for path in tmp_path.iterdir()]) == "[]"
