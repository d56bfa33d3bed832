"""Models: loading them, and the log-probs of what they said."""

from proximo.models.layout import micro_batches
from proximo.models.loading import (
    PaddedFallback,
    frozen_copy,
    load_model,
    load_tokenizer,
    pick_device,
    prompt_tokens,
    supports_packing,
)
from proximo.models.scoring import Scores, States, completion_states, score
from proximo.models.tiny import tiny_model, tiny_moe, tiny_tokenizer

__all__ = [
    "PaddedFallback",
    "Scores",
    "States",
    "completion_states",
    "frozen_copy",
    "load_model",
    "load_tokenizer",
    "micro_batches",
    "pick_device",
    "prompt_tokens",
    "score",
    "supports_packing",
    "tiny_model",
    "tiny_moe",
    "tiny_tokenizer",
]
