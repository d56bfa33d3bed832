"""Answers in OpenAI's form: whole, or as the chunks of a stream."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from secrets import token_hex
from typing import Any

from proximo.models.tokens.spelling import Spelling
from proximo.serving.logprobs import TokenLogprob
from proximo.serving.queue import Finish
from proximo.serving.requests import CompletionQuery

PARTS = 6
"""Depth to which an answer is written in parts: down to each token of a conversation with its alternatives."""


def in_pieces(value: object, depth: int = PARTS) -> Iterator[str]:
    """A value's JSON, part by part: other threads have their turn in between, which they have not while `json` writes
    all of it."""
    if depth and isinstance(value, dict):
        for number, (name, each) in enumerate(value.items()):
            yield f"{', ' if number else '{'}{json.dumps(name)}: "
            yield from in_pieces(each, depth - 1)
        yield "}" if value else "{}"
    elif depth and isinstance(value, list):
        for number, each in enumerate(value):
            yield ", " if number else "["
            yield from in_pieces(each, depth - 1)
        yield "]" if value else "[]"
    else:
        yield json.dumps(value)


@dataclass
class Choice:
    """One completion, as far as it has arrived."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None


@dataclass(frozen=True)
class Replies:
    """Writes the answers to one request."""

    query: CompletionQuery
    model: str
    spelling: Spelling
    id: str = field(default_factory=lambda: token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice], tokens: int) -> dict[str, Any]:
        """The answer, with all choices; `tokens` is their length together."""
        return self._head() | {
            "choices": [self._choice(number, choice) for number, choice in enumerate(choices)],
            "usage": self._usage(tokens),
        }

    def first(self, number: int) -> dict[str, Any]:
        """The chunk with which a choice of a conversation begins."""
        return self._chunk(number, {"role": "assistant", "content": ""}, None, None)

    def part(self, number: int, text: str, logprobs: Sequence[TokenLogprob], finish: Finish | None) -> dict[str, Any]:
        """A chunk of a choice."""
        written = self._logprobs(logprobs) if logprobs else None
        return self._chunk(number, {"content": text} if text or logprobs else {}, written, finish)

    def end(self, tokens: int) -> dict[str, Any]:
        """The chunk with the number of tokens, which ends a stream that asked for it."""
        return self._head(chunk=True) | {"choices": [], "usage": self._usage(tokens)}

    def _head(self, *, chunk: bool = False) -> dict[str, Any]:
        kind = f"chat.completion{'.chunk' * chunk}" if self.query.is_chat else "text_completion"
        prefix = "chatcmpl" if self.query.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _chunk(
        self, number: int, delta: Mapping[str, Any], logprobs: dict[str, Any] | None, finish: Finish | None
    ) -> dict[str, Any]:
        content = {"delta": dict(delta)} if self.query.is_chat else {"text": delta.get("content", "")}
        choice = {"index": number, **content, "logprobs": logprobs, "finish_reason": finish}
        return self._head(chunk=True) | {"choices": [choice]}

    def _choice(self, number: int, choice: Choice) -> dict[str, Any]:
        asked = self.query.requests[number]
        before = "".join(self.spelling(asked.prompt)) if self.query.echo else ""
        text = before + choice.text
        content = {"message": {"role": "assistant", "content": text}} if self.query.is_chat else {"text": text}
        logprobs = None if asked.top is None else self._logprobs(choice.logprobs)
        return {"index": number, **content, "logprobs": logprobs, "finish_reason": choice.finish}

    def _usage(self, tokens: int) -> dict[str, int]:
        asked = self.query.prompt_tokens
        return {"prompt_tokens": asked, "completion_tokens": tokens, "total_tokens": asked + tokens}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        texts = self.spelling([each.token for each in tokens])
        if self.query.is_chat:
            content = [
                self._token(text, each.logprob)
                | {"top_logprobs": [self._token(self._text(token), logprob) for token, logprob in each.top]}
                for text, each in zip(texts, tokens, strict=True)
            ]
            return {"content": content, "refusal": None}
        ends = list(accumulate(map(len, texts)))
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [
                None if each.logprob is None else {self._text(token): logprob for token, logprob in each.top}
                for each in tokens
            ],
            "text_offset": [0, *ends[:-1]],
        }

    @staticmethod
    def _token(text: str, logprob: float | None) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        [text] = self.spelling([token])
        return text
