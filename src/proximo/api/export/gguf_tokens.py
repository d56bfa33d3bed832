"""A tokenizer as llama.cpp reads it: byte-level BPE, by the name that its splitting rule has there."""

import json
import re
from dataclasses import dataclass
from typing import Any

from proximo.models.model_types import PreTrainedTokenizerBase

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""llama.cpp's kinds of tokens."""
SPLITS = {r"\p{N}": "qwen2", r"\p{N}{1,3}": "llama-bpe"}
"""Names of splitting rules by how they split digits; the rest of the two patterns is equal."""
PATTERN = re.compile(
    re.escape(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|")
    + r"(?P<digits>.*)"
    + re.escape(r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
)


@dataclass(frozen=True)
class Vocabulary:
    pre: str
    """llama.cpp's name of the splitting rule."""
    tokens: list[str]
    types: list[int]
    merges: list[str]


def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int) -> Vocabulary:
    """All tokens in order, filled up to the model's `size`; ValueError for a kind of tokenizer that is not written."""
    data: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())  # pyright: ignore
    model, added = data["model"], {token["id"]: token for token in data["added_tokens"]}
    spelled = {number: text for text, number in model.get("vocab", {}).items()} if _is_table(model) else {}
    if model["type"] == "WordLevel" and _is_of_characters(data, spelled, added):
        pre, merges = "gpt-2", []
        spelled = {number: _in_bytes(text) if number not in added else text for number, text in spelled.items()}
    elif model["type"] == "BPE" and not model.get("byte_fallback"):
        pre, merges = _split_name(data["pre_tokenizer"]), [_merge(each) for each in model["merges"]]
    else:
        raise ValueError(
            f"the tokenizer is {model['type']}{' with byte fallback' if model.get('byte_fallback') else ''}: "
            "gguf is written for byte-level BPE only; convert the exported folder with llama.cpp's own script"
        )
    tokens, types = [], []
    for number in range(max(size, max((*spelled, *added)) + 1)):
        if number in added:
            tokens.append(added[number]["content"])
            types.append(CONTROL if added[number]["special"] else USER_DEFINED)
        else:
            tokens.append(spelled.get(number, f"[PAD{number}]"))
            types.append(NORMAL if number in spelled else UNUSED)
    if len(tokens) > size:
        raise ValueError(f"the tokenizer has {len(tokens)} tokens and the model {size}: they do not belong together")
    return Vocabulary(pre, tokens, types, merges)


def _is_table(model: dict[str, Any]) -> bool:
    return isinstance(model.get("vocab"), dict)


def _is_of_characters(data: dict[str, Any], spelled: dict[int, str], added: dict[int, Any]) -> bool:
    """True if each token is one ASCII character, and the text is split into characters: BPE without merges does the
    same."""
    splits = data["pre_tokenizer"] or {}
    is_split = splits.get("type") == "Split" and splits.get("pattern") == {"Regex": r"[\s\S]"}
    return is_split and all(number in added or (len(text) == 1 and text.isascii()) for number, text in spelled.items())


def _split_name(rule: dict[str, Any] | None) -> str:
    """llama.cpp's name of a pre-tokenizer."""
    parts = rule.get("pretokenizers", [rule]) if rule else []
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and parts[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        match = PATTERN.fullmatch(parts[0]["pattern"].get("Regex", ""))
        if match is not None and match["digits"] in SPLITS:
            return SPLITS[match["digits"]]
    raise ValueError(
        f"the tokenizer splits text by {' and '.join(kinds) or 'nothing'}, which llama.cpp has no known name for: "
        "convert the exported folder with llama.cpp's own script"
    )


def _merge(merge: str | list[str]) -> str:
    return merge if isinstance(merge, str) else " ".join(merge)


def _in_bytes(text: str) -> str:
    """A character as byte-level BPE spells it: space and control characters are moved to letters.

    Example: _in_bytes(" ") == "Ġ"
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return "".join(bytes_to_unicode()[byte] for byte in text.encode())
