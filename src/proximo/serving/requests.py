"""Requests of clients in OpenAI's form, as jobs for the engine."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from proximo.models import prompt_tokens
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.samplers.sampler import SamplingOptions
from proximo.serving.errors import Refusal
from proximo.serving.queue import CompletionRequest
from proximo.serving.schemas import Body, parsed
from proximo.system.safe_text import quoted, visible
from proximo.types import Message

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "n", "stop", "stream", "stream_options", "seed")
CHAT = ("model", "messages", "max_completion_tokens", "logprobs", "top_logprobs", *SAMPLING)
TEXT = ("model", "prompt", "logprobs", "echo", *SAMPLING)
MAX_CHOICES = 128
"""Maximum completions of one request."""
MAX_TOP = 20
"""Maximum alternatives of a token with log-probs."""
MAX_STOP = 16
"""Maximum stop strings of a request."""
MAX_LOGPROBS = 1 << 21
"""Maximum log-probs of a request: each takes some hundred bytes until its answer is written."""
TEXT_TOKENS = 16
"""Length limit of a text completion that names none, as in OpenAI's API."""
PROBED = 16
"""Characters of a prompt for each token of the context: of a longer one, so many are encoded first."""


@dataclass(frozen=True)
class CompletionQuery:
    """A request: the completions that it asks for, and how they are sent."""

    requests: tuple[CompletionRequest, ...]
    """One for each choice, in order."""
    is_chat: bool
    stream: bool
    with_usage: bool
    """True if a stream ends with the number of tokens."""
    echo: bool = False
    """True if the text of a choice begins with its prompt."""

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once."""
        return sum(len(request.prompt) for request in self.requests if request.sample == 0)


@dataclass(frozen=True)
class Asking:
    """Reads requests to one model: JSON becomes prompts of tokens and checked options.

    Whatever a client can make expensive happens here (long texts, chat templates, JSON), so that it can be done in
    another process.

    Example: Asking(tokenizer, context=4096, model="a", max_tokens=512).text(b'{"model": "a", "prompt": "1+2="}')
    """

    tokenizer: PreTrainedTokenizerBase
    context: int | None
    """Maximum tokens of prompt and completion together; None: no limit."""
    model: str
    """Name that clients give."""
    max_tokens: int
    """Length limit of a message whose request names none."""

    def chat(self, data: bytes) -> CompletionQuery:
        """A request for a conversation's next message."""
        body = self._body(data, CHAT)
        if body.value("max_tokens") is not None and body.value("max_completion_tokens") is not None:
            raise Refusal("max_tokens and max_completion_tokens are both given: give one", "max_tokens")
        name = "max_completion_tokens" if body.value("max_completion_tokens") is not None else "max_tokens"
        top = body.integer("top_logprobs", None, 0, MAX_TOP)
        if top is not None and not body.switch("logprobs"):
            raise Refusal("top_logprobs needs logprobs to be true", "top_logprobs")
        base = CompletionRequest(
            (),
            _options(body),
            body.integer(name, None, 1, 1 << 31) or 0,
            _key(body),
            top=(top or 0) if body.switch("logprobs") else None,
        )
        count = _count(body, 1)
        prompt = self._encoded(_messages(body.value("messages")), "messages")
        room = self.max_tokens if self.context is None else min(self.max_tokens, max(1, self.context - len(prompt)))
        base = replace(base, prompt=prompt, max_tokens=base.max_tokens or room)
        self._check_length(base, name)
        return CompletionQuery(self._choices(body, [base], count), True, *_sending(body))

    def text(self, data: bytes) -> CompletionQuery:
        """A request to continue one or more texts."""
        body = self._body(data, TEXT)
        echo, top = body.switch("echo"), body.integer("logprobs", None, 0, MAX_TOP)
        limit = body.integer("max_tokens", TEXT_TOKENS, 0 if echo else 1, 1 << 31)
        assert limit is not None
        base = CompletionRequest(
            (), _options(body), limit, _key(body), top=top, prompt_logprobs=echo and top is not None
        )
        prompts = _prompts(body.value("prompt"))
        count = _count(body, len(prompts))
        stream, with_usage = _sending(body)
        if stream and echo:
            raise Refusal("echo is not supported with stream: leave one of the two out", "echo")
        bases = [replace(base, prompt=self._tokens(each)) for each in prompts]
        for each in bases:
            self._check_length(each, "max_tokens")
        return CompletionQuery(self._choices(body, bases, count), False, stream, with_usage, echo)

    def _body(self, data: bytes, known: Sequence[str]) -> Body:
        body = Body(parsed(data), known)
        if body.value("model") != self.model:
            shown = quoted(body.value("model"))
            raise Refusal(f"model is {shown}: this server has {self.model!r}", "model", "model_not_found", 404)
        return body

    def _choices(self, body: Body, bases: Sequence[CompletionRequest], count: int) -> tuple[CompletionRequest, ...]:
        """All choices of a request, out of the first of each prompt."""
        self._check_logprobs(bases, count)
        strings = body.strings("stop", MAX_STOP)
        special = set(self.tokenizer.all_special_tokens)
        ends = frozenset(self.tokenizer.convert_tokens_to_ids(each) for each in strings if each in special)
        stop = tuple(each for each in strings if each not in special)  # special tokens are no part of the text
        return tuple(
            replace(base, sample=number, stop=stop, end_tokens=ends, key=base.key + index)
            for index, base in enumerate(bases)
            for number in range(count)
        )

    def _check_logprobs(self, bases: Sequence[CompletionRequest], count: int) -> None:
        """Refuse more log-probs than there is room for: those of the tokens, and of what might have been there."""
        number = sum(
            (base.max_tokens + len(base.prompt) * base.prompt_logprobs) * (1 + base.top)
            for base in bases
            if base.top is not None
        )
        if number * count > MAX_LOGPROBS:
            raise Refusal(
                f"that is up to {number * count:,} log-probs, more than {MAX_LOGPROBS:,}: ask for fewer alternatives, "
                "tokens or completions",
                "logprobs",
            )

    def _check_length(self, asked: CompletionRequest, limit: str) -> None:
        if self.context is not None and len(asked.prompt) + asked.max_tokens > self.context:
            raise Refusal(
                f"the prompt has {len(asked.prompt)} tokens and {limit} is {asked.max_tokens}, but the model's context "
                f"is {self.context}: shorten one of the two",
                limit,
                "context_length_exceeded",
            )

    def _tokens(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._encoded(prompt, "prompt")
        if not all(0 <= token < len(self.tokenizer) for token in prompt):
            raise Refusal(f"prompt: give tokens of the model, from 0 to {len(self.tokenizer) - 1}", "prompt")
        return tuple(prompt)

    def _encoded(self, prompt: str | list[Message], field: str) -> tuple[int, ...]:
        texts = (
            [prompt]
            if isinstance(prompt, str)
            else [text for each in prompt for text in (each["role"], each["content"])]
        )
        self._check_characters(texts, field)
        return _refusing(lambda: prompt_tokens(self.tokenizer, prompt), field)

    def _check_characters(self, texts: Sequence[str], field: str) -> None:
        """Refuse a prompt that is too long before all of it is encoded."""
        number = sum(map(len, texts))
        if self.context is None or number <= PROBED * self.context:
            return
        beginning = "".join(texts)[: PROBED * self.context]
        if (
            number > self.context * self._longest
            or len(self.tokenizer.encode(beginning, add_special_tokens=False)) > 2 * self.context
        ):
            raise Refusal(
                f"the prompt has {number} characters, more than the model's context of {self.context} tokens holds: "
                "shorten it",
                field,
                "context_length_exceeded",
            )

    @cached_property
    def _longest(self) -> int:
        """Maximum characters of a token."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)


def _count(body: Body, prompts: int) -> int:
    """Choices of each prompt."""
    count = body.integer("n", 1, 1, MAX_CHOICES)
    assert count is not None
    if prompts * count > MAX_CHOICES:
        raise Refusal(f"{prompts} prompts with n = {count}: ask for {MAX_CHOICES} completions at most", "n")
    return count


def _sending(body: Body) -> tuple[bool, bool]:
    """True if the answer is a stream, and True if that ends with the number of tokens."""
    stream = body.switch("stream")
    return stream, _with_usage(body, stream)


def _with_usage(body: Body, stream: bool) -> bool:
    given = body.value("stream_options")
    if given is None:
        return False
    if not stream:
        raise Refusal("stream_options needs stream to be true", "stream_options")
    return Body(given, ("include_usage",)).switch("include_usage")


def _options(body: Body) -> SamplingOptions:
    temperature = body.number("temperature", 1.0, 0.0, 100.0)
    given: dict[str, Any] = {
        "top_p": body.number("top_p", 1.0, 0.0, 1.0),
        "top_k": body.integer("top_k", None, 1, 1 << 31),
        "min_p": body.number("min_p", 0.0, 0.0, 1.0),
    }
    if temperature == 0:
        return SamplingOptions(temperature=0.0)  # the rest has no effect on the most likely token
    for name, value in {"temperature": temperature, **given}.items():
        _refusing(lambda name=name, value=value: SamplingOptions(**{name: value}), name)
    return SamplingOptions(temperature=temperature, **given)


def _key(body: Body) -> int:
    """Key of the random numbers: the seed where there is one, so that the same request gives the same completion."""
    seed = body.integer("seed", None, -(2**63), 2**63 - 1)
    return secrets.randbits(62) if seed is None else seed


def _messages(given: object) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise Refusal("messages: give a list with at least one message", "messages")
    return [_message(each, f"messages[{number}]") for number, each in enumerate(given)]


def _message(given: object, field_path: str) -> Message:
    if not isinstance(given, dict) or not isinstance(role := given.get("role"), str):
        raise Refusal(f"{field_path}: give an object with role and content", field_path)
    if unknown := [name for name, value in given.items() if name not in ("role", "content") and value]:
        field = f"{field_path}.{visible(unknown[0], 100)}"
        raise Refusal(f"{field} is not supported by this server: leave it out", field)
    return {"role": role, "content": _content(given, field_path)}


def _content(given: Mapping[str, Any], field_path: str) -> str:
    content = given.get("content")
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
        if kinds != ["text"] * len(content) or not all(isinstance(part.get("text"), str) for part in content):
            raise Refusal(f"{field_path}.content: only parts of type text are supported", f"{field_path}.content")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Refusal(f"{field_path}.content is {quoted(content)}: give a text", f"{field_path}.content")
    return content


def _prompts(given: object) -> list[str | list[int]]:
    """A text, several, the tokens of one, or those of several."""
    many: list[Any] = given if isinstance(given, list) and not _is_tokens(given) else [given]
    if not many:
        raise Refusal("prompt is empty: give a text or tokens", "prompt")
    if not all(isinstance(each, str) or _is_tokens(each) for each in many):
        raise Refusal("prompt: give a text, a list of texts, tokens of the model, or a list of those", "prompt")
    return many


def _is_tokens(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(type(each) is int for each in given)


def _refusing(make: Callable[[], Any], field: str) -> Any:
    try:
        return make()
    except ValueError as error:
        raise Refusal(visible(str(error), 500), field) from error
