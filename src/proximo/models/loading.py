"""Models and tokenizers from Hugging Face folders: safetensors only, no code from elsewhere."""

import copy
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralForCausalLM,
    MistralForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeForCausalLM,
    SmolLM3ForCausalLM,
    SmolLM3ForSequenceClassification,
)

from proximo.models.attention import NAME
from proximo.types import Message

Precision = Literal["auto", "float32", "bfloat16"]


class PaddedFallback(UserWarning):
    """The model is outside the fast path: correct, but each completion pays for its prompt again."""


def pick_device(name: str) -> str:
    """As torch names it; `auto` is a GPU where there is one, else the CPU."""
    found = torch.cuda.is_available()
    if name != "auto":
        return _checked_device(name, has_gpu=found)
    return "cuda" if found else "cpu"


def _checked_device(name: str, *, has_gpu: bool) -> str:
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}: torch knows no such device; give auto, cpu or cuda") from error
    if kind == "cuda" and not has_gpu:
        raise ValueError(f"device is {name!r}, but there is no GPU here that torch can use: give auto or cpu")
    if kind == "cuda" and (number := torch.device(name).index) is not None:
        count = torch.cuda.device_count()
        if number >= count:
            raise ValueError(f"device is {name!r}, but there are {count} GPUs here: count from cuda:0")
        torch.cuda.set_device(number)  # kernels and captured steps run where torch stands
    return name


def pick_dtype(name: Precision, device: str) -> torch.dtype:
    """Of the weights; `auto` is bfloat16 on a GPU that computes in it, else float32."""
    if name != "auto":
        return getattr(torch, name)
    halves = torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if halves else torch.float32


def free_bytes(device: torch.device) -> int:
    """On a GPU: what nobody holds, and what torch holds without using it."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def load_model(path: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """A causal language model in eval mode, from a folder or a hub id.

    Example: model = load_model("runs/first/checkpoints/step-000100")
    """
    folder = Path(path)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        found = ", ".join(sorted(file.name for file in folder.glob("*.bin"))) or "no weights"
        raise ValueError(f"path {path!r} holds {found}: convert to safetensors (pickle is never read)")
    try:
        if has_score(AutoConfig.from_pretrained(path, trust_remote_code=False)):
            raise ValueError(f"path {path!r} holds a reward model, which scores and cannot speak: give a causal model")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True, trust_remote_code=False)
    except OSError as error:
        raise ValueError(f"path {path!r}: {_unreachable(folder)}") from error
    assert isinstance(model, PreTrainedModel)
    if supports_packing(model):
        model.set_attn_implementation(NAME)
    else:
        warn_of_fallback(type(model).__name__)
    return model.to(device=device).eval()  # pyright: ignore[reportCallIssue]


def with_precision(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same model with its weights rounded. Buffers stay: rotary frequencies in half precision would be others."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """To be asked, never trained."""
    return copy.deepcopy(model).requires_grad_(False).eval()


def has_score(config: PreTrainedConfig) -> bool:
    """Whether this is a model that scores, a reward model or classifier, and not one that speaks."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a hub id."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:  # transformers raises either, depending on which file is missing
        raise ValueError(f"path {path!r}: {_unreachable(Path(path))}") from error


def _unreachable(folder: Path) -> str:
    if folder.is_dir():
        return "the folder is incomplete; save model and tokenizer into it with save_pretrained"
    return "neither a folder nor a model that the hub or its local cache has; check the name, or download it first"


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Message]) -> tuple[int, ...]:
    """Text is encoded as it is, nothing added; a conversation goes through the chat template, ready for an answer."""
    if isinstance(prompt, str):
        tokens = tokenizer.encode(prompt, add_special_tokens=False)
    elif tokenizer.chat_template is None:
        raise ValueError("prompt is a conversation, but the tokenizer has no chat template: give the prompt as text")
    else:
        messages = [dict(message) for message in prompt]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert isinstance(text, str)
        tokens = tokenizer.encode(text, add_special_tokens=False)
    if not tokens:
        raise ValueError(f"prompt {prompt!r} has no tokens: give at least one")
    return tuple(tokens)


_BY_LAYER_TYPES = (
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    SmolLM3ForCausalLM,
    SmolLM3ForSequenceClassification,
)


def supports_packing(model: PreTrainedModel) -> bool:
    """True where our attention and our heads are exact: full attention in each layer, logits = states · weightᵀ.

    A table of what the tests cover, not a guess: other classes may scale or cap their logits or look through
    a window, and keep to transformers' own forward pass.
    """
    kind = type(model)
    if kind in (LlamaForCausalLM, LlamaForSequenceClassification):
        full_attention = True
    elif kind in (MistralForCausalLM, MistralForSequenceClassification, Qwen3MoeForCausalLM):
        full_attention = model.config.sliding_window is None
    elif kind in _BY_LAYER_TYPES:
        full_attention = set(model.config.layer_types) == {"full_attention"}
    else:
        return False
    head = dict(model.named_children()).get("lm_head") or model.get_submodule("score")
    return full_attention and type(head) is nn.Linear and head.bias is None


@cache
def warn_of_fallback(kind: str) -> None:
    """Once per process and model class."""
    message = f"{kind} is outside the packed fast path: scored padded, with its own logits (slower, same numbers)"
    warnings.warn(message, PaddedFallback, stacklevel=3)
