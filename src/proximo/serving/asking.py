"""What clients ask for in OpenAI's form, as jobs for the engine."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from proximo.models import prompt_tokens
from proximo.samplers import SamplingOptions
from proximo.serving.bodies import Body
from proximo.serving.engine import Engine
from proximo.serving.jobs import Asked
from proximo.serving.refusals import Refusal
from proximo.types import Message

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "n", "stop", "stream", "stream_options", "seed")
CHAT = ("model", "messages", "max_completion_tokens", "logprobs", "top_logprobs", *SAMPLING)
TEXT = ("model", "prompt", "logprobs", "echo", *SAMPLING)
MAX_CHOICES = 128
"""Most completions of one request."""
MAX_TOP = 20
"""Most alternatives of a token with log-probs."""
TEXT_TOKENS = 16
"""Length limit of a text completion that names none, as in OpenAI's API."""


@dataclass(frozen=True)
class Question:
    """A request: the completions that it asks for, and how they are sent."""

    asked: tuple[Asked, ...]
    """One for each choice, in order."""
    is_chat: bool
    stream: bool
    with_usage: bool
    """Whether a stream ends with the number of tokens."""
    echo: bool = False
    """Whether the text of a choice begins with its prompt."""

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once."""
        return sum(len(asked.prompt) for asked in self.asked if asked.sample == 0)


def chat_question(values: object, engine: Engine, model: str, max_tokens: int) -> Question:
    """A request for a conversation's next message. `max_tokens` is the limit where it names none."""
    body = Body(values, CHAT)
    _check_model(body, model)
    if body.value("max_tokens") is not None and body.value("max_completion_tokens") is not None:
        raise Refusal("max_tokens and max_completion_tokens are both given: give one", "max_tokens")
    prompt = _encoded(engine, _messages(body.value("messages")), "messages")
    name = "max_completion_tokens" if body.value("max_completion_tokens") is not None else "max_tokens"
    top = body.integer("top_logprobs", None, 0, MAX_TOP)
    if top is not None and not body.switch("logprobs"):
        raise Refusal("top_logprobs needs logprobs to be true", "top_logprobs")
    limit = body.integer(name, None, 1, 1 << 31)
    room = max_tokens if engine.context is None else min(max_tokens, max(1, engine.context - len(prompt)))
    asked = Asked(
        prompt,
        _options(body),
        room if limit is None else limit,
        _key(body),
        top=(top or 0) if body.switch("logprobs") else None,
    )
    return _question(body, engine, [asked], name, is_chat=True)


def text_question(values: object, engine: Engine, model: str) -> Question:
    """A request to continue one or more texts."""
    body = Body(values, TEXT)
    _check_model(body, model)
    echo, top = body.switch("echo"), body.integer("logprobs", None, 0, MAX_TOP)
    limit = body.integer("max_tokens", TEXT_TOKENS, 0 if echo else 1, 1 << 31)
    assert limit is not None
    base = Asked((), _options(body), limit, _key(body), top=top, prompt_logprobs=echo and top is not None)
    prompts = _prompts(body.value("prompt"), engine)
    return _question(body, engine, [replace(base, prompt=each) for each in prompts], "max_tokens", echo=echo)


def _question(
    body: Body, engine: Engine, bases: Sequence[Asked], limit: str, *, is_chat: bool = False, echo: bool = False
) -> Question:
    count = body.integer("n", 1, 1, MAX_CHOICES)
    assert count is not None
    if len(bases) * count > MAX_CHOICES:
        raise Refusal(f"{len(bases)} prompts with n = {count}: ask for {MAX_CHOICES} completions at most", "n")
    for base in bases:
        length = len(base.prompt) + base.max_tokens
        if engine.context is not None and length > engine.context:
            raise Refusal(
                f"the prompt has {len(base.prompt)} tokens and {limit} is {base.max_tokens}, but the model's context "
                f"is {engine.context}: shorten one of the two",
                limit,
                "context_length_exceeded",
            )
    strings = body.strings("stop", 16)
    special = set(engine.tokenizer.all_special_tokens)
    ends = [engine.tokenizer.convert_tokens_to_ids(each) for each in strings if each in special]
    stop = tuple(each for each in strings if each not in special)  # special tokens are no part of the text
    asked = [
        replace(base, sample=number, stop=stop, end_tokens=frozenset(ends), key=base.key + place)
        for place, base in enumerate(bases)
        for number in range(count)
    ]
    stream = body.switch("stream")
    if stream and echo:
        raise Refusal("echo is not supported with stream: leave one of the two out", "echo")
    return Question(tuple(asked), is_chat, stream, _with_usage(body, stream), echo)


def _with_usage(body: Body, stream: bool) -> bool:
    given = body.value("stream_options")
    if given is None:
        return False
    if not stream:
        raise Refusal("stream_options needs stream to be true", "stream_options")
    return Body(given, ("include_usage",)).switch("include_usage")


def _options(body: Body) -> SamplingOptions:
    temperature = body.number("temperature", 1.0, 0.0, 100.0)
    if temperature == 0:
        return SamplingOptions(temperature=0.0)  # the rest has no effect on the most likely token
    return _refusing(
        lambda: SamplingOptions(
            temperature=temperature,
            top_p=body.number("top_p", 1.0, 0.0, 1.0),
            top_k=body.integer("top_k", None, 1, 1 << 31),
            min_p=body.number("min_p", 0.0, 0.0, 1.0),
        ),
        "top_p",
    )


def _key(body: Body) -> int:
    """Of the random numbers: the seed where there is one, so that the same request gives the same completion."""
    seed = body.integer("seed", None, -(2**63), 2**63 - 1)
    return secrets.randbits(62) if seed is None else seed


def _check_model(body: Body, model: str) -> None:
    asked = body.value("model")
    if asked != model:
        raise Refusal(f"model is {asked!r}: this server has {model!r}", "model", "model_not_found", 404)


def _messages(given: object) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise Refusal("messages: give a list with at least one message", "messages")
    return [_message(each, f"messages[{number}]") for number, each in enumerate(given)]


def _message(given: object, place: str) -> Message:
    if not isinstance(given, dict) or not isinstance(role := given.get("role"), str):
        raise Refusal(f"{place}: give an object with role and content", place)
    if unknown := [name for name, value in given.items() if name not in ("role", "content") and value]:
        raise Refusal(f"{place}.{unknown[0]} is not supported by this server: leave it out", f"{place}.{unknown[0]}")
    content = given.get("content")
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
        if kinds != ["text"] * len(content) or not all(isinstance(part.get("text"), str) for part in content):
            raise Refusal(f"{place}.content: only parts of type text are supported", f"{place}.content")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Refusal(f"{place}.content is {content!r}: give a text", f"{place}.content")
    return {"role": role, "content": content}


def _prompts(given: object, engine: Engine) -> list[tuple[int, ...]]:
    """A text, several, the tokens of one, or those of several."""
    many = given if isinstance(given, list) and not _is_tokens(given) else [given]
    if not many:
        raise Refusal("prompt is empty: give a text or tokens", "prompt")
    found = []
    for each in many:
        if isinstance(each, str):
            found.append(_encoded(engine, each, "prompt"))
        elif isinstance(each, list) and _is_tokens(each) and all(0 <= token < len(engine.tokenizer) for token in each):
            found.append(tuple(each))
        else:
            raise Refusal("prompt: give a text, a list of texts, tokens of the model, or a list of those", "prompt")
    return found


def _is_tokens(given: list[Any]) -> bool:
    return bool(given) and all(isinstance(each, int) and not isinstance(each, bool) for each in given)


def _encoded(engine: Engine, prompt: str | list[Message], field: str) -> tuple[int, ...]:
    return _refusing(lambda: prompt_tokens(engine.tokenizer, prompt), field)


def _refusing(make: Callable[[], Any], field: str) -> Any:
    try:
        return make()
    except ValueError as error:
        raise Refusal(str(error), field) from error
