"""Prompts and replies as tokens."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.tokens.marks import marks_of
from proximo.models.tokens.templates import rendered
from proximo.types import Message, Problem

_ANCHORS = ("\n", "|", "a", "0", "é", " ")
"""Texts to put before a reply; the first that does not merge with it shows the reply's tokens within a text."""

_SPELLED = ("a", "0", "é", "|", " ", "\n")
"""Texts of which even a small vocabulary most likely has one."""

_TOGETHER = 1024
"""Number of texts that a tokenizer gets at once."""


def problem_tokens(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> tuple[int, ...]:
    """The tokens of a problem's prompt, with the problem's own arguments of the chat template."""
    return prompt_tokens(tokenizer, problem.prompt, problem.chat_template_kwargs)


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Message], arguments: Mapping[str, Any] | None = None
) -> tuple[int, ...]:
    """The tokens of a prompt, ready for a completion.

    A text begins with the tokenizer's own special tokens, such as one BOS, and never ends with those that some append
    (EOS, SEP). A conversation is exactly what the chat template writes, up to the start of the assistant's reply;
    `arguments` are those of the chat template.
    """
    text = asked_text(tokenizer, prompt, arguments)
    tokens = _encoded(tokenizer, text)
    if isinstance(prompt, str):
        tokens = _begun(tokenizer, text, tokens, tuple(tokenizer.encode(text)))
    if not tokens:
        raise _without_tokens(prompt)
    return tokens


def each_prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, problems: Iterable[Problem], prepare: Callable[[Problem], Problem] | None = None
) -> Iterator[tuple[int, ...] | ValueError]:
    """The tokens of each problem's prompt, or what is wrong with it; `prepare` makes of it what is asked. The tokenizer
    gets many texts at once, which it splits on all cores."""
    remaining = iter(problems)
    while part := list(islice(remaining, _TOGETHER)):
        asked = [_asked(tokenizer, problem, prepare) for problem in part]
        texts = [each for each in asked if not isinstance(each, ValueError)]
        bare = iter(encoded_texts(tokenizer, [text for text, _ in texts]))
        framed = iter(encoded_texts(tokenizer, [text for text, is_plain in texts if is_plain], framed=True))
        for problem, each in zip(part, asked, strict=True):
            if isinstance(each, ValueError):
                yield each
                continue
            (text, is_plain), tokens = each, next(bare)
            tokens = _begun(tokenizer, text, tokens, next(framed)) if is_plain else tokens
            yield tokens or _without_tokens(problem.prompt)


def _asked(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, prepare: Callable[[Problem], Problem] | None
) -> tuple[str, bool] | ValueError:
    """The text that is asked, and whether it is without a chat template."""
    try:
        problem = problem if prepare is None else prepare(problem)
        text = asked_text(tokenizer, problem.prompt, problem.chat_template_kwargs)
        return text, isinstance(problem.prompt, str)
    except ValueError as error:
        return error


def encoded_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, framed: bool = False
) -> list[tuple[int, ...]]:
    """Tokens of each text, found together; `framed`: with the special tokens that the tokenizer puts around a text."""
    marks = None if framed or not all(texts) else marks_of(tokenizer)
    if marks is None:
        return _together(tokenizer, texts, framed)
    divided = [marks.parts(text) for text in texts]
    between = list(dict.fromkeys(part for parts in divided for part in parts[::2] if part))
    tokens = {"": (), **marks.tokens, **dict(zip(between, _together(tokenizer, between), strict=True))}
    return [tuple(chain.from_iterable(map(tokens.__getitem__, parts))) for parts in divided]


def _together(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], framed: bool = False) -> list[tuple[int, ...]]:
    if not texts:
        return []
    rows = tokenizer(list(texts), add_special_tokens=framed, return_attention_mask=False, verbose=False)["input_ids"]
    assert isinstance(rows, list)
    return [tuple(row) for row in rows]


def _begun(
    tokenizer: PreTrainedTokenizerBase, text: str, tokens: tuple[int, ...], framed: tuple[int, ...]
) -> tuple[int, ...]:
    """The tokens of a text behind the special tokens that the tokenizer puts before it, as `framed` has them."""
    prefixes = _within(framed, tokens) if tokens else []
    # Nearly always the text itself shows what stands before it, without encoding others.
    first = prefixes[0] if len(prefixes) == 1 else special_prefix(tokenizer, text)
    return tokens if tokens[: len(first)] == first else first + tokens  # a text that has the BOS gets no second one


def _without_tokens(prompt: str | Sequence[Message]) -> ValueError:
    return ValueError(f"prompt {prompt!r} has no tokens: give at least one")


def asked_text(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Message], arguments: Mapping[str, Any] | None = None
) -> str:
    """The prompt as text: itself, or the conversation in the chat template, ready for a reply."""
    if isinstance(prompt, str):
        return prompt
    if tokenizer.chat_template is None:
        raise ValueError("prompt is a conversation, but the tokenizer has no chat template: give the prompt as text")
    return rendered(tokenizer, prompt, for_answer=True, arguments=arguments)


def special_prefix(tokenizer: PreTrainedTokenizerBase, text: str = "") -> tuple[int, ...]:
    """The tokens that the tokenizer puts before every text: a BOS, several tokens, or none. Found with any text that
    has tokens: a short one, or `text` if the vocabulary spells none of them."""
    shown = next((each for each in (*_SPELLED, text) if _encoded(tokenizer, each)), "")
    bare = _encoded(tokenizer, shown)
    return next(iter(_prefixes(tokenizer, shown, bare)), ()) if bare else ()


def _prefixes(tokenizer: PreTrainedTokenizerBase, text: str, bare: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Tokens before a text's own in what the tokenizer makes of it; several choices if those occur there again."""
    return _within(tuple(tokenizer.encode(text)), bare)


def _within(framed: tuple[int, ...], bare: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Tokens before each place where others stand in these."""
    starts = range(len(framed) - len(bare) + 1)
    return [framed[:start] for start in starts if framed[start : start + len(bare)] == bare]


def reply_tokens(
    tokenizer: PreTrainedTokenizerBase, asked: str, reply: str, known: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[int, ...]:
    """The tokens that a sampler has to generate after the tokens of `asked` so that both decode to `asked + reply`.

    These are the tokens that follow when both are encoded together. If the last characters of `asked` and the first of
    `reply` share a token, no sampler could generate it: then the reply is encoded after another text. It is not
    encoded alone if that can be avoided: SentencePiece-like tokenizers put a space before a text. `known` may have the
    tokens of `asked` and of both together.

    Example: reply_tokens(tokenizer, "12+7=", "19")
    """
    known = known or {}
    before, whole = (known[text] if text in known else _encoded(tokenizer, text) for text in (asked, asked + reply))
    if whole[: len(before)] == before:
        return whole[len(before) :]
    wanted = _decoded(tokenizer, before) + reply
    replies = list(filter(None, (_behind(tokenizer, anchor, reply) for anchor in _ANCHORS)))
    faithful = (tokens for tokens in replies if _decoded(tokenizer, before + tokens) == wanted)
    return next(faithful, replies[0] if replies else _encoded(tokenizer, reply))


def following_tokens(tokenizer: PreTrainedTokenizerBase, text: str, *, after: str = "") -> tuple[int, ...]:
    """The tokens of a text that stands after others, as far as that can be known without them: without the space that
    SentencePiece-like tokenizers put before a text. Special tokens that are spelled in it become such. `after`: the
    special token that it follows, if it does."""
    for anchor in (after, *_ANCHORS) if after else _ANCHORS:
        if text and (tokens := _behind(tokenizer, anchor, text)):
            return tokens
    return _encoded(tokenizer, text)


class ReplyReader:
    """Decodes sampled tokens in the context of their prompt, without special tokens.

    Decoded alone, a reply would lose its leading space with tokenizers that put one before every text. After a special
    token, where such tokenizers put one too, dropping it is right.
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
    """The reply's tokens after a text; empty if the two share a token."""
    before, whole = _encoded(tokenizer, anchor), _encoded(tokenizer, anchor + reply)
    return whole[len(before) :] if whole[: len(before)] == before else ()


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], *, without_special: bool = False) -> str:
    text = tokenizer.decode(list(tokens), skip_special_tokens=without_special, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
