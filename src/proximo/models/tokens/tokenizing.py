"""Prompts and replies as tokens: what a model is asked, and what it has to say behind that."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from proximo.models.tokens.templates import rendered
from proximo.types import Message

_ANCHORS = ("\n", "|", "a", "0", "é", " ")
"""Texts to put before a reply; the first with which it does not merge shows how it is spelled inside a text."""

_SPELLED = ("a", "0", "é", "|", " ", "\n")
"""Texts of which a vocabulary, however small, most likely has one."""


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Message]) -> tuple[int, ...]:
    """The prompt as the tokenizer gives it to a model, left open for a completion.

    A text begins with the tokenizer's own special tokens, such as one BOS, and never ends with those that some append
    (EOS, SEP). A conversation is exactly what the chat template writes, up to where the assistant begins to speak.
    """
    text = asked_text(tokenizer, prompt)
    tokens = _encoded(tokenizer, text)
    if isinstance(prompt, str):
        first = special_prefix(tokenizer, text)
        if tokens[: len(first)] != first:  # who writes the BOS into the text gets no second one
            tokens = first + tokens
    if not tokens:
        raise ValueError(f"prompt {prompt!r} has no tokens: give at least one")
    return tokens


def asked_text(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Message]) -> str:
    """The prompt as text: itself, or the conversation in the chat template, ready for an answer."""
    if isinstance(prompt, str):
        return prompt
    if tokenizer.chat_template is None:
        raise ValueError("prompt is a conversation, but the tokenizer has no chat template: give the prompt as text")
    return rendered(tokenizer, prompt, for_answer=True)


def special_prefix(tokenizer: PreTrainedTokenizerBase, text: str = "") -> tuple[int, ...]:
    """What the tokenizer itself puts before every text: a BOS, several tokens, or nothing. It shows with any text that
    has tokens: `text`, or another where the vocabulary has none for it."""
    shown = next((each for each in (text, *_SPELLED) if _encoded(tokenizer, each)), "")
    bare, framed = _encoded(tokenizer, shown), tuple(tokenizer.encode(shown))
    if not bare:
        return ()
    starts = range(len(framed) - len(bare) + 1)
    return framed[: next((start for start in starts if framed[start : start + len(bare)] == bare), 0)]


def reply_tokens(tokenizer: PreTrainedTokenizerBase, asked: str, reply: str) -> tuple[int, ...]:
    """What a sampler has to say behind the tokens of `asked` so that both together read as `asked + reply`.

    These are the tokens that follow where both are encoded together. Where the last characters of `asked` and the first
    of `reply` share a token there, no sampler could say that token any more: then the reply is encoded behind another
    text. It is never encoded alone if that can be helped: tokenizers in the manner of SentencePiece put a space before
    a text, which the reply does not have.

    Example: reply_tokens(tokenizer, "12+7=", "19")
    """
    before, whole = _encoded(tokenizer, asked), _encoded(tokenizer, asked + reply)
    if whole[: len(before)] == before:
        return whole[len(before) :]
    wanted = _decoded(tokenizer, before) + reply
    found = list(filter(None, (_behind(tokenizer, anchor, reply) for anchor in _ANCHORS)))
    faithful = (tokens for tokens in found if _decoded(tokenizer, before + tokens) == wanted)
    return next(faithful, found[0] if found else _encoded(tokenizer, reply))


class ReplyReader:
    """Gives the text of sampled tokens as it reads behind their prompt, without special tokens.

    Decoded alone, a reply would lose the space that it begins with to tokenizers that put one before every text. Behind
    a special token, where such tokenizers put one too, it is rightly lost.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.special = frozenset(tokenizer.all_special_ids)
        self._anchor = next(filter(None, (_encoded(tokenizer, each)[-1:] for each in _SPELLED)), ())
        self._start = self._decoded(self._anchor)

    def __call__(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        if prompt and prompt[-1] not in self.special:
            text = self._decoded((*self._anchor, *tokens))
            if text.startswith(self._start):
                return text.removeprefix(self._start)
        return self._decoded(tokens)

    def _decoded(self, tokens: Sequence[int]) -> str:
        return _decoded(self._tokenizer, tokens, without_special=True)


def _behind(tokenizer: PreTrainedTokenizerBase, anchor: str, reply: str) -> tuple[int, ...]:
    """The reply's tokens behind a text, or nothing where the two share a token."""
    before, whole = _encoded(tokenizer, anchor), _encoded(tokenizer, anchor + reply)
    return whole[len(before) :] if whole[: len(before)] == before else ()


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], *, without_special: bool = False) -> str:
    text = tokenizer.decode(list(tokens), skip_special_tokens=without_special, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
