"""Models that are packed: those whose attention and heads ours are equal to."""

import warnings
from functools import cache

from torch import nn

from proximo.models.model_types import PreTrainedModel


class PaddedFallback(UserWarning):
    """The model is outside the fast path: correct, but each completion pays for its prompt again."""


def supports_packing(model: PreTrainedModel) -> bool:
    """True where our attention and our heads are exact: full attention in each layer, logits = states · weightᵀ.

    A table of what the tests cover, not a guess: other classes may scale or cap their logits or look through
    a window, and keep to transformers' own forward pass.
    """
    always, without_window, by_layer_types = _packed_classes()
    kind = type(model)
    if kind in always:
        full_attention = True
    elif kind in without_window:
        full_attention = model.config.sliding_window is None
    elif kind in by_layer_types:
        full_attention = set(model.config.layer_types) == {"full_attention"}
    else:
        return False
    head = dict(model.named_children()).get("lm_head") or model.get_submodule("score")
    return full_attention and type(head) is nn.Linear and head.bias is None


@cache
def _packed_classes() -> tuple[frozenset[type], frozenset[type], frozenset[type]]:
    """Classes with full attention always, where there is no window, and where each layer's type says so."""
    from transformers import (
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        MistralForCausalLM,
        MistralForSequenceClassification,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
        Qwen3ForCausalLM,
        Qwen3ForSequenceClassification,
        Qwen3MoeForCausalLM,
        SmolLM3ForCausalLM,
        SmolLM3ForSequenceClassification,
    )

    return (
        frozenset({LlamaForCausalLM, LlamaForSequenceClassification}),
        frozenset({MistralForCausalLM, MistralForSequenceClassification, Qwen3MoeForCausalLM}),
        frozenset(
            {
                Qwen2ForCausalLM,
                Qwen2ForSequenceClassification,
                Qwen3ForCausalLM,
                Qwen3ForSequenceClassification,
                SmolLM3ForCausalLM,
                SmolLM3ForSequenceClassification,
            }
        ),
    )


@cache
def warn_of_fallback(kind: str) -> None:
    """Warn once per process and model class."""
    message = f"{kind} is outside the packed fast path: scored padded, with its own logits (slower, same numbers)"
    warnings.warn(message, PaddedFallback, stacklevel=3)
