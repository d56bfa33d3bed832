"""What an environment answers, as tokens behind those that the policy sampled.

A conversation is written by the chat template, but never a second time: the template is asked once what it writes
between a reply and the next one, with placeholders, and that is put around each answer. So no earlier token can change,
and nothing in an answer is read as the template's own marks or as a special token.
"""

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer

from proximo.models.model_types import AddedToken, PreTrainedTokenizerBase
from proximo.models.tokens.templates import rendered
from proximo.models.tokens.tokenizing import asked_text, following_tokens
from proximo.types import Problem

REPLY, ANSWER = 'the reply "0"', 'the answer "{}"'
"""Placeholders. Quotes show whether a template writes JSON."""
CUT = " ... (cut)"
MAX_CHARACTERS = 16
"""Characters of an answer that are read for each of its tokens at most."""
NEVER = "\uffff{}\uffff"
"""Spelling of a mark that is not to be found; no text has this character."""
SHOWN = 60


class RewrittenTurns(UserWarning):
    """A chat template that writes an earlier reply differently once more follows."""


@dataclass(frozen=True)
class Frame:
    """What a chat template writes after a reply, around its answers, up to the start of the next reply."""

    parts: tuple[str, ...]
    """Before each answer, and after the last."""
    is_json: bool
    """Whether answers are written as JSON strings."""


class Extender:
    """Writes answers behind a reply, for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        """`max_tokens`: length to which each answer is cut."""
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._frames: dict[Any, Frame] = {}
        self._added = frozenset(tokenizer.added_tokens_decoder)
        marks = {token: str(its.content) for token, its in tokenizer.added_tokens_decoder.items() if _is_mark(its)}
        self._mark_ids = frozenset(marks)
        longest = sorted(marks.values(), key=len, reverse=True)
        self._marks = re.compile("|".join(f"(?={re.escape(mark)})" for mark in longest if len(mark) > 1) or "(?!)")

    def __call__(
        self, problem: Problem, last_token: int, answers: Sequence[tuple[str, str]]
    ) -> tuple[tuple[int, ...], list[str]]:
        """The tokens of answers, each a role and a text, behind a reply that ended with `last_token`, and their texts
        as the policy reads them."""
        texts = [self._cut(text) for _, text in answers]
        if isinstance(problem.prompt, str):
            return tuple(token for text in texts for token in self._plain(text)), texts
        frame = self._frame(problem, tuple(role for role, _ in answers))
        written = [json.dumps(text, ensure_ascii=False)[1:-1] for text in texts] if frame.is_json else texts
        first, *others = frame.parts
        end = self._tokenizer.decode([last_token], skip_special_tokens=False)
        assert isinstance(end, str)
        if last_token in self._added:  # the reply has ended itself
            first = first.removeprefix(end)
        whole = first + "".join(text + part for text, part in zip(written, others, strict=True))
        if not any(self._marks.search(text) for text in written):
            return following_tokens(self._tokenizer, whole), texts
        tokens = following_tokens(self._tokenizer, first)
        for text, part in zip(written, others, strict=True):
            tokens += self._plain(text) + following_tokens(self._tokenizer, part)
        return tokens, texts

    def _plain(self, text: str) -> tuple[int, ...]:
        """The tokens of a text in which nothing is a special token, whatever it spells."""
        if not self._marks.search(text):
            tokens = following_tokens(self._tokenizer, text)
        else:
            tokens = following_tokens(without_marks(self._tokenizer), text)
        return self._in_pieces(text) if self._mark_ids.intersection(tokens) else tokens

    def _in_pieces(self, text: str) -> tuple[int, ...]:
        """For a tokenizer that finds marks without being told of them, as some of SentencePiece's do: each is cut."""
        places = [0, *(found.start() + 1 for found in self._marks.finditer(text)), len(text)]
        pieces = [text[start:end] for start, end in pairwise(places) if start < end]
        tokens = [token for piece in pieces for token in following_tokens(self._tokenizer, piece)]
        return tuple(token for token in tokens if token not in self._mark_ids)  # found in another spelling

    def _cut(self, text: str) -> str:
        """The text up to the limit."""
        text = text.encode(errors="replace").decode()  # lone surrogates
        short = text[: MAX_CHARACTERS * self._max_tokens]
        tokens = self._plain(short)
        if len(tokens) > self._max_tokens:
            decoded = self._tokenizer.decode(list(tokens[: self._max_tokens]), clean_up_tokenization_spaces=False)
            assert isinstance(decoded, str)
            short = decoded.rstrip("\N{REPLACEMENT CHARACTER}")
        return text if short == text else short + CUT

    def _frame(self, problem: Problem, roles: tuple[str, ...]) -> Frame:
        """Asked once for each kind of conversation."""
        assert not isinstance(problem.prompt, str)
        arguments = json.dumps(dict(problem.chat_template_kwargs), sort_keys=True, default=str)
        key = (tuple(message["role"] for message in problem.prompt), arguments, roles)
        if key not in self._frames:
            self._frames[key] = frame_of(self._tokenizer, problem, roles)
        return self._frames[key]


def _is_mark(added: AddedToken) -> bool:
    """Whether a token is more than a text that stands for itself, as runs of spaces are in some vocabularies."""
    return bool(added.special or added.content.strip())


@lru_cache(maxsize=2)
def without_marks(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer that reads every mark as the text that it is; the same one where there is no other."""
    from transformers import PreTrainedTokenizerFast

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer
    its, known = json.loads(backend.to_str()), backend.get_vocab(with_added_tokens=False)
    added: list[dict[str, Any]] = []
    for each in its["added_tokens"]:
        if not each["special"] and not each["content"].strip():
            added.append(each)
        elif each["content"] not in known:  # its place gives those behind it their ids, so it stays
            added.append({**each, "content": NEVER.format(each["id"])})
    its["added_tokens"] = added
    its["post_processor"] = None  # which may name special tokens
    bare = Tokenizer.from_str(json.dumps(its))
    moved = [each for each in added if bare.token_to_id(each["content"]) != each["id"]]
    return tokenizer if moved else PreTrainedTokenizerFast(tokenizer_object=bare)


def frame_of(tokenizer: PreTrainedTokenizerBase, problem: Problem, roles: Sequence[str]) -> Frame:
    """What the chat template writes around answers with these roles; ValueError names what it does to what is there."""
    assert not isinstance(problem.prompt, str)
    arguments = problem.chat_template_kwargs
    marks = [ANSWER.format(number) for number in range(len(roles))]
    replied = [*problem.prompt, {"role": "assistant", "content": REPLY}]
    answered = [*replied, *({"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True))]
    closed = _after_reply(rendered(tokenizer, replied, for_answer=False, arguments=arguments))
    text = rendered(tokenizer, answered, for_answer=True, arguments=arguments)
    whole = _after_reply(text)
    if not whole.startswith(closed):
        raise ValueError(
            f"the chat template ends a reply with {closed[:SHOWN]!r}, and with {whole[:SHOWN]!r} once "
            f"{'/'.join(roles)} answers: tokens that were sampled would change; use a template that only adds"
        )
    is_json = marks[0] not in whole
    parts, rest = [], whole
    for mark in marks:
        part, found, rest = rest.partition(json.dumps(mark)[1:-1] if is_json else mark)
        if not found:
            raise ValueError(
                f"the chat template leaves out the answer of a {roles[0]}, it writes {whole[:SHOWN]!r}: use another "
                "template, or answer as user"
            )
        parts.append(part)
    asked = asked_text(tokenizer, problem.prompt, arguments)
    if not text.startswith(asked + REPLY):
        warnings.warn(_rewritten(asked, text.partition(REPLY)[0]), RewrittenTurns, stacklevel=2)
    return Frame((*parts, rest), is_json)


def _after_reply(text: str) -> str:
    if text.count(REPLY) != 1:
        raise ValueError(
            f"the chat template writes a reply {text.count(REPLY)} times, in {text[-SHOWN:]!r}: use a template that "
            "writes each message once"
        )
    return text.partition(REPLY)[2]


def _rewritten(asked: str, now: str) -> str:
    """What differs before a reply, once it is no longer the last."""
    same = next((place for place, both in enumerate(zip(asked, now, strict=False)) if both[0] != both[1]), None)
    same = min(len(asked), len(now)) if same is None else same
    return (
        f"the chat template writes {now[same : same + SHOWN]!r} before an earlier reply, where the policy was asked "
        f"with {asked[same : same + SHOWN]!r}: this run keeps what was sampled; a server that renders conversations "
        "anew shows the model something else"
    )
