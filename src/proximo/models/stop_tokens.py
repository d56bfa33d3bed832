"""Tokens that end a completion: the tokenizer's, and those that a model's own files name. Models of conversations often
have two, since their chat template closes a turn with a token of its own."""

from typing import Any

from proximo.models.loading import base_of, opened, read_config
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.safe_files import json_object


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a completion of this model."""
    declared = model.generation_config.eos_token_id if model.generation_config else None
    ends = _numbers(model.config.eos_token_id if declared is None else declared)
    return ends | _numbers(tokenizer.eos_token_id)


def declared_ends(path: str) -> frozenset[int]:
    """The end tokens that a model's folder names, before the model is loaded."""
    base = base_of(path)
    folder = opened(base, weights=False)
    file = folder / "generation_config.json"
    declared = json_object(file).get("eos_token_id") if file.is_file() else None
    if declared is None and (folder / "config.json").is_file():  # else loading the model will say what is missing
        declared = getattr(read_config(base), "eos_token_id", None)
    return _numbers(declared)


def _numbers(tokens: Any) -> frozenset[int]:
    """Set of one token, of several, or of None."""
    if tokens is None:
        return frozenset()
    several = tokens if isinstance(tokens, list | tuple) else [tokens]
    if not all(type(each) is int and each >= 0 for each in several):
        raise ValueError(f"eos_token_id is {str(tokens)[:100]!r} in the model's files: give a token, or a list of them")
    return frozenset(several)
