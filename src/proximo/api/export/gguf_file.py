"""One GGUF file for llama.cpp, of the architectures llama, qwen2 and qwen3.

llama.cpp's own converter knows many more, but is a script that pip does not install. What is not written here is
refused by name, and the exported folder can be given to that script.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proximo.api.export.gguf_tokens import vocabulary
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase

TYPES = ("f32", "f16", "q8_0")
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Names in GGUF, which are transformers' model types, with the classes that they hold for."""
BLOCK = 32
"""Numbers that share a scale in q8_0."""
HEAD = "lm_head.weight"
NEVER = "Ā Ā"
"""A merge of two zero bytes, which no text has: a list of merges must not be empty."""


def refuse_gguf() -> None:
    """Refuse to begin without the package."""
    if find_spec("gguf") is None:
        raise ValueError('to is "gguf:…", which needs gguf: pip install "proximo[gguf]"')


def write_gguf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, file: Path, kind: str, *, name: str) -> None:
    """Write the model; ValueError says what about it cannot be written."""
    import gguf

    config: Any = model.config
    refuse_model(model)
    writer = gguf.GGUFWriter(file, config.model_type)
    writer.add_name(name)
    _add_shapes(writer, config)
    _add_tokenizer(writer, tokenizer, config)
    file_type = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}[kind]
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    architecture = next(each for each, given in gguf.MODEL_ARCH_NAMES.items() if given == config.model_type)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for key, tensor in _tensors(model):
        known = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise ValueError(f"the model has {key}, which gguf has no name for in {config.model_type}")
        quantization = gguf.GGMLQuantizationType[_kind(tensor, kind).upper()]
        data = gguf.quants.quantize(tensor.to(torch.float32).numpy(), quantization)
        writer.add_tensor(known, np.ascontiguousarray(data), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def refuse_model(model: PreTrainedModel) -> None:
    config: Any = model.config
    if ARCHITECTURES.get(config.model_type) != type(model).__name__:
        raise ValueError(
            f"the model is {type(model).__name__}: gguf is written for {', '.join(ARCHITECTURES.values())}; convert "
            "the exported folder with llama.cpp's own script"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    sliding = getattr(config, "use_sliding_window", False)
    for wrong, is_so in {f"rope_type {rope!r}": rope != "default", "a sliding window": sliding}.items():
        if is_so:
            raise ValueError(
                f"the model has {wrong}, which is not written to gguf: convert the exported folder with llama.cpp's "
                "own script"
            )


def _add_shapes(writer: Any, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
    known = vocabulary(tokenizer, config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(known.pre)
    writer.add_token_list(known.tokens)
    writer.add_token_types(known.types)
    writer.add_token_merges(known.merges or [NEVER])
    ends = [each for each in (tokenizer.eos_token_id, config.eos_token_id) if isinstance(each, int)]
    special = {
        "bos": tokenizer.bos_token_id,
        "eos": ends[0] if ends else None,
        "pad": tokenizer.pad_token_id,
        "unk": tokenizer.unk_token_id,
    }
    for token, number in special.items():
        if isinstance(number, int):
            getattr(writer, f"add_{token}_token_id")(number)
    first = tokenizer("a")["input_ids"]
    assert isinstance(first, list)
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and first[:1] == [tokenizer.bos_token_id])
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """All weights. A head that is the embedding is left out, since llama.cpp takes the embedding then."""
    config: Any = model.config
    for name, tensor in model.state_dict().items():
        if name == HEAD and config.tie_word_embeddings:
            continue
        if config.model_type == "llama" and (heads := _heads(name, config)) is not None:
            tensor = _interleaved(tensor, heads)
        yield name, tensor.detach().cpu()


def _heads(name: str, config: Any) -> int | None:
    """Heads of a query's or key's projection."""
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".k_proj." in name else None


def _interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Rows in the order of llama.cpp's rotation for llama, which pairs neighbours; transformers pairs the halves."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _kind(tensor: Tensor, kind: str) -> str:
    """Vectors stay exact, and rows that cannot be cut into blocks are kept at half precision."""
    if tensor.dim() < 2:
        return "f32"
    return "f16" if kind == "q8_0" and tensor.shape[-1] % BLOCK else kind
