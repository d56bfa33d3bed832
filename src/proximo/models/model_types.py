"""Models and tokenizers in signatures: `model: PreTrainedModel`.

Importing transformers' model code takes as long as importing torch, and most commands load no model. A module that
names these classes in annotations only has them from here; a function that builds or tests them imports transformers
itself, when it is called.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import (
        AddedToken,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        PreTrainedTokenizerFast,
        Qwen3ForCausalLM,
        Qwen3MoeForCausalLM,
    )
    from transformers.models.auto.auto_factory import _BaseAutoModelClass as AutoClass
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
else:
    AddedToken = AutoClass = PreTrainedConfig = PreTrainedModel = PreTrainedTokenizerBase = Any
    PreTrainedTokenizerFast = Qwen3ForCausalLM = Qwen3MoeForCausalLM = Qwen3MoeTopKRouter = Any

__all__ = [
    "AddedToken",
    "AutoClass",
    "PreTrainedConfig",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "PreTrainedTokenizerFast",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3MoeTopKRouter",
]
