"""The text of each single token, so that a completion can be read token by token."""

from collections.abc import Sequence
from functools import lru_cache

from proximo.models.model_types import PreTrainedTokenizerBase

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
MAX_TOGETHER = 8
"""Maximum tokens that form text only together: a character has up to four bytes, and tokens may hold parts of two."""


class Spelling:
    """Texts of a tokenizer's tokens; joined, the pieces are the text with its special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._together = lru_cache(maxsize=1 << 16)(self._after)
        """Cache for short token sequences: a collapsed policy repeats them."""
        ids = tokenizer.encode("a", add_special_tokens=False)
        self._before = ids[-1:] or [0]
        """Context before each token: some tokenizers drop a space at the start of a text."""
        self._start = self._decoded(self._before)

    def __call__(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token; a character made of several tokens is at the last of them, the others are empty."""
        pieces = [self._piece(token) for token in tokens]
        start = 0
        for index, piece in enumerate(pieces):
            if UNKNOWN not in piece:
                start = index + 1
                continue
            for first in range(index - 1, max(start, index - MAX_TOGETHER + 1) - 1, -1):
                text = self._together(tuple(tokens[first : index + 1]))
                if UNKNOWN not in text:
                    pieces[first : index + 1] = [*[""] * (index - first), text]
                    start = index + 1
                    break
        return pieces

    def _piece(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._after([token])
        return self._known[token]

    def _after(self, tokens: Sequence[int]) -> str:
        text = self._decoded([*self._before, *tokens])
        return text[len(self._start) :] if text.startswith(self._start) else self._decoded(tokens)

    def _decoded(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
