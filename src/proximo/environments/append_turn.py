"""Tokens of an environment's answer, behind those that the policy sampled.

A conversation is written by the chat template, but never a second time: the template is asked once what it writes
between a reply and the next one, with placeholders, and that is put around each answer. So no earlier token can change,
and nothing in an answer is read as the template's own marks or as a special token.
"""

import json
import re
import string
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from proximo.models.model_types import AddedToken, PreTrainedTokenizerBase
from proximo.models.tokens.templates import rendered
from proximo.models.tokens.tokenizing import asked_text, following_tokens
from proximo.types import Completion, Message, Problem

REPLY, ANSWER = 'the reply "0"', 'the answer "{}"'
"""Placeholders. Quotes show whether a template writes JSON."""
CUT = " ... (cut)"
MAX_CHARACTERS = 16
"""Characters of an answer that are read for each of its tokens at most."""
NEVER = "\uffff{}\uffff"
"""Spelling of a mark that is not to be found; no text has this character."""
SHOWN = 60


class RewrittenTurns(UserWarning):
    """Warning of a chat template that writes an earlier reply differently once more follows."""


@dataclass(frozen=True)
class Ending:
    """The end of a reply's tokens."""

    space: str = ""
    """White space behind its last word."""
    mark: str = ""
    """End tokens or stop string that stopped it. Empty: it was cut."""


@dataclass(frozen=True)
class Frame:
    """Text of a chat template after a reply, around its answers, up to the start of the next reply."""

    parts: tuple[str, ...]
    """Texts before each answer, and after the last."""
    is_json: bool
    """True where answers are written as JSON strings."""
    strips_reply: bool
    """True where white space at the end of a reply is left out."""
    stripped: tuple[str, str]
    """Characters that are left out at the start and at the end of an answer."""

    def written(self, answer: str) -> str:
        """An answer as the template writes it."""
        start, end = self.stripped
        text = answer.lstrip(start) if start else answer
        text = text.rstrip(end) if end else text
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.is_json else text


class Extender:
    """Writes answers behind a reply, for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        """`max_tokens`: length to which each answer is cut."""
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._frames: dict[Any, Frame | None] = {}
        """By kind of conversation; None: by the prompt itself."""
        self._added = frozenset(tokenizer.added_tokens_decoder)
        marks = {token: str(its.content) for token, its in tokenizer.added_tokens_decoder.items() if _is_mark(its)}
        self._mark_ids = frozenset(marks)
        longest = sorted(marks.values(), key=len, reverse=True)
        self._marks = re.compile("|".join(f"(?={re.escape(mark)})" for mark in longest if len(mark) > 1) or "(?!)")
        self._mark = re.compile("|".join(map(re.escape, longest)) or "(?!)")

    def __call__(
        self, problem: Problem, last_token: int, answers: Sequence[tuple[str, str]], ending: Ending | None = None
    ) -> tuple[tuple[int, ...], list[str]]:
        """The tokens of answers, each a role and a text, behind a reply that ended with `last_token`, and their texts
        as the policy reads them. `ending`: how the reply ends, if that is more than its last token."""
        texts = [self._cut(text) for _, text in answers]
        if isinstance(problem.prompt, str):
            return tuple(token for text in texts for token in self._plain(text)), texts
        frame = self._frame(problem, tuple(role for role, _ in answers))
        written, (first, *others) = [frame.written(text) for text in texts], frame.parts
        end = self._spelled([last_token]) if last_token in self._added else ""
        first = self._unwritten(first, ending or Ending(mark=end), end, strips=frame.strips_reply)
        whole = first + "".join(text + part for text, part in zip(written, others, strict=True))
        if not any(self._marks.search(text) for text in written):
            return following_tokens(self._tokenizer, whole, after=end), texts
        tokens = following_tokens(self._tokenizer, first, after=end)
        for text, part in zip(written, others, strict=True):
            tokens += self._plain(text) + following_tokens(self._tokenizer, part)
        return tokens, texts

    def ending(self, reply: Completion) -> Ending:
        """Find the end of a reply: what its tokens spell behind its text."""
        spelled, text = self._spelled(reply.tokens).lstrip(), reply.text.lstrip()
        if spelled.startswith(text):
            return Ending(text[len(text.rstrip()) :], spelled[len(text) :])
        return Ending(mark=self._last_marks(reply.tokens))  # its text was made otherwise

    def _last_marks(self, tokens: Sequence[int]) -> str:
        start = len(tokens)
        while start and tokens[start - 1] in self._added:
            start -= 1
        return self._spelled(tokens[start:])

    def _unwritten(self, first: str, ending: Ending, end: str, *, strips: bool) -> str:
        """Leave out of the template's text behind a reply what stands there already. A template may write white space
        or other marks before the end of a turn, where the reply has ended without."""
        if ending.mark and first.startswith(ending.mark):
            return first.removeprefix(ending.mark)
        for mark in filter(None, (ending.mark.strip(), end)):
            before, mark_found, rest = first.partition(mark)
            if mark_found and not self._mark.sub("", before).strip():
                return rest
        shared = ending.space if strips and not ending.mark else ""
        while not first.startswith(shared):
            shared = shared[1:]
        return first.removeprefix(shared)

    def _spelled(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _plain(self, text: str) -> tuple[int, ...]:
        """The tokens of a text in which nothing is a special token, whatever it spells."""
        if not self._marks.search(text):
            tokens = following_tokens(self._tokenizer, text)
        else:
            tokens = following_tokens(without_marks(self._tokenizer), text)
        return self._in_pieces(text) if self._mark_ids.intersection(tokens) else tokens

    def _in_pieces(self, text: str) -> tuple[int, ...]:
        """Tokenise around marks: some tokenizers, as of SentencePiece's, find them without being told; each is cut."""
        cuts = [0, *(match.start() + 1 for match in self._marks.finditer(text)), len(text)]
        pieces = [text[start:end] for start, end in pairwise(cuts) if start < end]
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
        """Ask the template once for each kind of conversation; for each prompt where its text is written again after a
        reply, as some templates write the system message before the last question."""
        assert not isinstance(problem.prompt, str)
        arguments = json.dumps(dict(problem.chat_template_kwargs), sort_keys=True, default=str)
        kind = (tuple((message["role"], bool(message["content"])) for message in problem.prompt), arguments, roles)
        whole = (json.dumps([dict(message) for message in problem.prompt], default=str), arguments, roles)
        if kind in self._frames and self._frames[kind] is None:
            kind = whole
        if kind not in self._frames:
            frame = frame_of(self._tokenizer, problem, roles, self._marks)
            repeats = any(text in part for part in frame.parts for text in _texts(problem.prompt))
            self._frames |= {kind: None, whole: frame} if repeats else {kind: frame}
            return frame
        frame = self._frames[kind]
        assert frame is not None
        return frame


def _texts(prompt: Sequence[Message]) -> list[str]:
    return [text for message in prompt if (text := str(message["content"]).strip())]


def _is_mark(added: AddedToken) -> bool:
    """Tell whether a token is more than a text that stands for itself, as runs of spaces are in some vocabularies."""
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
    for token in its["added_tokens"]:
        if not token["special"] and not token["content"].strip():
            added.append(token)
        elif token["content"] not in known:  # its place gives those behind it their ids, so it stays
            added.append({**token, "content": NEVER.format(token["id"])})
    its["added_tokens"] = added
    its["post_processor"] = None  # which may name special tokens
    bare = Tokenizer.from_str(json.dumps(its))
    moved = [token for token in added if bare.token_to_id(token["content"]) != token["id"]]
    return tokenizer if moved else PreTrainedTokenizerFast(tokenizer_object=bare)


def frame_of(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, roles: Sequence[str], marks: re.Pattern[str]
) -> Frame:
    """Ask the chat template what it writes around answers with these roles; ValueError says which text it would change.
    `marks`: spellings of the tokenizer's own tokens."""
    assert not isinstance(problem.prompt, str)
    chat = _Chat(tokenizer, problem, tuple(roles))
    try:
        text = chat.answered()
    except ValueError as error:
        if "tool" not in roles or not isinstance(error.__cause__, TemplateError):
            raise
        chat = _Chat(tokenizer, problem, tuple(roles), in_one=True)  # it knows no tools, and wants roles in turn
        text = chat.answered()
    closed, whole = _after_reply(chat.replied(REPLY)), _after_reply(text)
    if not _is_kept(closed, whole, marks, tokenizer.eos_token):
        raise ValueError(
            f"the chat template ends a reply with {closed[:SHOWN]!r}, and with {whole[:SHOWN]!r} once "
            f"{'/'.join(roles)} answers: tokens that were sampled would change; use a template that only adds"
        )
    is_json = chat.marks[0] not in whole
    parts, rest = [], whole
    for mark in chat.marks:
        part, is_written, rest = rest.partition(json.dumps(mark)[1:-1] if is_json else mark)
        if not is_written:
            raise ValueError(
                f"the chat template leaves out the answer of a {roles[0]}, it writes {whole[:SHOWN]!r}: use another "
                "template, or answer as user"
            )
        parts.append(part)
    asked = asked_text(tokenizer, problem.prompt, problem.chat_template_kwargs)
    alone = chat.replied(REPLY)
    opened = text.removeprefix(asked) if text.startswith(asked) else ""
    if _stripped(lambda space: chat.replied(space + REPLY) == alone):
        opened = opened.lstrip()
    if not opened.startswith(REPLY):
        warnings.warn(_rewritten(asked, text.partition(REPLY)[0]), RewrittenTurns, stacklevel=2)
    return Frame(
        (*parts, rest),
        is_json,
        strips_reply=bool(_stripped(lambda space: chat.replied(REPLY + space) == alone)),
        stripped=(
            _stripped(lambda space: chat.answered(before=space) == text),
            _stripped(lambda space: chat.answered(after=space) == text),
        ),
    )


@dataclass(frozen=True)
class _Chat:
    """A conversation with placeholders, as the chat template writes it."""

    tokenizer: PreTrainedTokenizerBase
    problem: Problem
    roles: tuple[str, ...]
    in_one: bool = False
    """True where all answers are one message of the user."""

    @property
    def marks(self) -> list[str]:
        return [ANSWER.format(number) for number in range(len(self.roles))]

    def replied(self, reply: str) -> str:
        return rendered(self.tokenizer, self._asked(reply), for_answer=False, arguments=self._arguments)

    def answered(self, before: str = "", after: str = "") -> str:
        texts = [before + mark + after for mark in self.marks]
        answers = [("user", "\n".join(texts))] if self.in_one else list(zip(self.roles, texts, strict=True))
        messages = [*self._asked(REPLY), *({"role": role, "content": text} for role, text in answers)]
        return rendered(self.tokenizer, messages, for_answer=True, arguments=self._arguments)

    def _asked(self, reply: str) -> list[Message]:
        assert not isinstance(self.problem.prompt, str)
        return [*self.problem.prompt, {"role": "assistant", "content": reply}]

    @property
    def _arguments(self) -> Any:
        return self.problem.chat_template_kwargs


def _is_kept(closed: str, whole: str, marks: re.Pattern[str], end: object) -> bool:
    """Tell whether what ends a reply still ends it once more follows: all of it, or its mark where the template writes
    the end of the whole conversation behind that."""
    without = closed.removesuffix(str(end or ""))
    return (
        whole.startswith(closed)
        or bool(marks.search(whole[: _shared(closed, whole)]))
        or (bool(without.strip()) and whole.startswith(without))
    )


def _stripped(leaves_out: Callable[[str], bool]) -> str:
    """White space that is left out at one end of a text."""
    return string.whitespace if leaves_out(" ") else "\n" if leaves_out("\n") else ""


def _after_reply(text: str) -> str:
    if text.count(REPLY) != 1:
        raise ValueError(
            f"the chat template writes a reply {text.count(REPLY)} times, in {text[-SHOWN:]!r}: use a template that "
            "writes each message once"
        )
    return text.partition(REPLY)[2]


def _rewritten(asked: str, now: str) -> str:
    """Say what differs before a reply, once it is no longer the last."""
    same = _shared(asked, now)
    return (
        f"the chat template writes {now[same : same + SHOWN]!r} before an earlier reply, where the policy was asked "
        f"with {asked[same : same + SHOWN]!r}: this run keeps what was sampled; a server that renders conversations "
        "anew shows the model something else"
    )


def _shared(one: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (first, second) in pairs if first != second), min(len(one), len(other)))
