"""Models: loading, and the log-probs of completions."""

from proximo.models.devices import Precision, free_bytes, pick_device, pick_dtype, with_precision
from proximo.models.loading import frozen_copy, load_model, load_tokenizer
from proximo.models.packing.layout import micro_batches
from proximo.models.packing.support import PaddedFallback, supports_packing
from proximo.models.scoring import Scores, States, completion_states, score, score_rows
from proximo.models.tiny import tiny_model, tiny_moe, tiny_tokenizer
from proximo.models.tokens.tokenizing import problem_tokens, prompt_tokens

__all__ = [
    "PaddedFallback",
    "Precision",
    "Scores",
    "States",
    "completion_states",
    "free_bytes",
    "frozen_copy",
    "load_model",
    "load_tokenizer",
    "micro_batches",
    "pick_device",
    "pick_dtype",
    "problem_tokens",
    "prompt_tokens",
    "score",
    "score_rows",
    "supports_packing",
    "tiny_model",
    "tiny_moe",
    "tiny_tokenizer",
    "with_precision",
]
