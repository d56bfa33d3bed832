"""Marks of chat templates, such as <|im_end|>. A tokenizer encodes what stands between two of them by itself, so what
many texts share, as a conversation and its beginning do, is encoded once."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from proximo.models.model_types import PreTrainedTokenizerBase

MAX_MARKS = 1024
"""Added tokens that are looked for in each text; tokenizers with more of them get whole texts."""
FIRST = b'"prepend_scheme":"first"'
"""Setting of a pre-tokenizer that treats the beginning of a text otherwise than what follows a mark."""


@dataclass(frozen=True)
class Marks:
    """The added tokens of a tokenizer, which split a text before anything else looks at it."""

    tokens: Mapping[str, tuple[int, ...]]
    """The token of each."""
    pattern: re.Pattern[str]

    def parts(self, text: str) -> list[str]:
        """Texts between the marks, and at odd places the marks; joined they are the text."""
        return self.pattern.split(text)


def marks_of(tokenizer: PreTrainedTokenizerBase) -> Marks | None:
    """The marks of a tokenizer; None where it is not certain that each part of a text is encoded by itself."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not _encodes_as_usual(tokenizer) or _looks_at_beginnings(backend):
        return None
    raw = [(number, each) for number, each in backend.get_added_tokens_decoder().items() if not each.normalized]
    takes_more = any(each.lstrip or each.rstrip or each.single_word for _, each in raw)
    if not 0 < len(raw) <= MAX_MARKS or takes_more:
        return None
    return _marks(tuple(sorted((each.content, number) for number, each in raw)))


@lru_cache(maxsize=8)
def _marks(tokens: tuple[tuple[str, int], ...]) -> Marks:
    longest_first = sorted((text for text, _ in tokens), key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
    return Marks({text: (number,) for text, number in tokens}, pattern)


def _encodes_as_usual(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether texts reach the backend as they are, and it splits them at special tokens."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    is_plain = all(
        getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in ("__call__", "_encode_plus")
    )
    return is_plain and not tokenizer.split_special_tokens


def _looks_at_beginnings(backend: Any) -> bool:
    if backend.pre_tokenizer is None:
        return False
    try:
        return FIRST in backend.pre_tokenizer.__getstate__()
    except Exception:  # one that is written in Python, which is not known
        return True
