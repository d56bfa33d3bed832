"""Chat templates: programs by the model's authors, run in Jinja's sandbox, for a bounded time."""

import ctypes
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from transformers import PreTrainedTokenizerBase

from proximo.types import Message

SECONDS = 10.0
"""For one conversation, which takes a real template about a millisecond."""


class TemplateTooSlow(Exception):
    """Raised inside a template that has run too long."""


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], *, for_answer: bool) -> str:
    """The conversation as text; `for_answer`, up to where the assistant begins to speak.

    Whatever goes wrong in the template is a ValueError: it is not our program.
    """
    try:
        with _bounded(SECONDS):
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=for_answer, tokenize=False
            )
    except Exception as error:
        raise ValueError(_what_happened(error)) from error
    assert isinstance(text, str)
    return text


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Message]) -> tuple[int, ...]:
    """Text is encoded as it is, nothing added; a conversation goes through the chat template, ready for an answer."""
    if isinstance(prompt, str):
        text = prompt
    elif tokenizer.chat_template is None:
        raise ValueError("prompt is a conversation, but the tokenizer has no chat template: give the prompt as text")
    else:
        text = rendered(tokenizer, prompt, for_answer=True)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if not tokens:
        raise ValueError(f"prompt {prompt!r} has no tokens: give at least one")
    return tuple(tokens)


def check_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Refuses a template that reaches out of the sandbox, never ends or is no Jinja, before anything depends on it.

    One that only dislikes this conversation is left to its own.
    """
    templates = tokenizer.chat_template
    for template in templates.values() if isinstance(templates, dict) else [templates] if templates else []:
        try:
            tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_without_generation(template))
        except TemplateSyntaxError as error:
            raise ValueError(f"path {path!r}: the chat template is not Jinja, line {error.lineno}: {error}") from None
        if tree.find(nodes.Pow) is not None:
            # Computed inside one instruction, which no time limit could stop.
            raise ValueError(f"path {path!r}: the chat template computes a power, which none needs; remove it")
    if templates:
        try:
            rendered(tokenizer, [{"role": "user", "content": "Hello"}], for_answer=True)
        except ValueError as error:
            if isinstance(error.__cause__, SecurityError | OverflowError | MemoryError | TemplateTooSlow):
                raise ValueError(f"path {path!r}: {error}") from error


def _without_generation(template: str) -> str:
    """transformers' own block, which Jinja does not know and which changes nothing about the rest."""
    return re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)


def _what_happened(error: Exception) -> str:
    match error:
        case SecurityError():
            return f"the chat template reaches for what it must not have: {error}; use another"
        case TemplateTooSlow():
            return f"the chat template ran for {SECONDS:g} s without an end: use another"
        case OverflowError() | MemoryError():
            return f"the chat template asks for too much: {error or 'memory'}; use another"
        case TemplateError():
            return f"the chat template refuses it: {error}"
        case ValueError():
            return str(error)
        case _:
            return f"the chat template fails with {type(error).__name__}: {error}"


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Raises TemplateTooSlow in this thread when the time is over; a signal would reach the main thread alone."""
    thread, lock, over, fired = threading.get_ident(), threading.Lock(), False, False

    def fire() -> None:
        nonlocal fired
        with lock:
            if not over:
                fired = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TemplateTooSlow))

    timer = threading.Timer(seconds, fire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            over = True
        timer.cancel()
        if fired:  # at the last moment: it must not arrive later
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
