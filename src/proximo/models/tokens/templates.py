"""Chat templates: programs by the model's authors, run in Jinja's sandbox with bounds on time and on what they make."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError

from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.tokens.deadlines import within
from proximo.models.tokens.template_bounds import bind, counted_characters
from proximo.system.memory import within_memory

SECONDS = 10.0
"""Seconds per conversation; a real template takes about a millisecond."""
MEMORY = 1 << 30
"""Bytes that the first conversation may take."""
MAX_TEMPLATE = 1 << 19
"""Characters of a template: real ones have up to some ten thousand."""
_SMALL = 1000
"""Largest number or length that a template may use in a product."""
_GROWING = ("batch", "center", "indent", "slice", "tojson", "truncate", "wordwrap")
"""Filters whose output size depends on their arguments."""
_PADDING = ("center", "expandtabs", "ljust", "rjust", "zfill")
"""Text methods whose output size does, which no template needs."""
_FORMATS = ("format", "format_map")
_WIDE = re.compile(r"\*|\d{4}")
"""Format specifications with a width of many digits, or from an argument."""


class TemplateTooSlow(Exception):
    """Raised inside a template that has run too long."""


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    for_answer: bool,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as text; with `for_answer`, up to the start of the assistant's reply. `arguments` are those of
    the chat template, such as enable_thinking.

    Any error in the template is a ValueError, since it is not our program.
    """
    given = arguments or {}
    try:
        with _bounded(SECONDS), counted_characters():
            bind(tokenizer.get_chat_template(given.get("chat_template"), given.get("tools")))
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=for_answer,
                tokenize=False,
                **given,
            )
    except Exception as error:
        raise ValueError(_what_happened(error)) from error
    assert isinstance(text, str)
    return text


def check_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Refuse a template that leaves the sandbox, never ends or is not Jinja, before anything depends on it.

    One that only rejects the test conversation is accepted. The time limit applies between instructions; what a
    template makes is bounded in every conversation (template_bounds.py), and memory in the test conversation, which is
    the first that compiles it.
    """
    templates = tokenizer.chat_template
    for template in templates.values() if isinstance(templates, dict) else [templates] if templates else []:
        if not isinstance(template, str) or len(template) > MAX_TEMPLATE:
            raise ValueError(f"path {path!r}: the chat template is no text of up to {MAX_TEMPLATE:,} characters")
        try:
            tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_without_generation(template))
            what = next(_unstoppable(tree), None)
        except (RecursionError, MemoryError):
            raise ValueError(f"path {path!r}: the chat template is nested too deeply; use another") from None
        except TemplateSyntaxError as error:
            raise ValueError(f"path {path!r}: the chat template is not Jinja, line {error.lineno}: {error}") from None
        if what:
            raise ValueError(f"path {path!r}: the chat template computes {what}, which none needs; remove it")
    if templates:
        try:
            with within_memory(MEMORY):
                rendered(tokenizer, [{"role": "user", "content": "Hello"}], for_answer=True)
        except ValueError as error:
            ours = SecurityError | OverflowError | MemoryError | RecursionError | TemplateTooSlow
            if isinstance(error.__cause__, ours):
                raise ValueError(f"path {path!r}: {error}") from error


def _unstoppable(tree: nodes.Template) -> Iterator[str]:
    """Expressions that could run long inside one instruction, which no time limit can stop; only the obvious ones."""
    for _ in tree.find_all(nodes.Pow):
        yield "a power"
    for product in tree.find_all(nodes.Mul):
        if not _is_small(product.left) or not _is_small(product.right):
            yield f"a product, line {product.lineno}, of what is not a number or a text up to {_SMALL}"
    for applied in tree.find_all(nodes.Filter):
        given = [*applied.args, *(keyword.value for keyword in applied.kwargs)]
        unpacked = applied.dyn_args is not None or applied.dyn_kwargs is not None
        if applied.name in _GROWING and (unpacked or not all(map(_is_small, given))):
            yield f"{applied.name}, line {applied.lineno}, with what is not a number or a text up to {_SMALL}"
        if applied.name in _FORMATS and _may_be_wide(applied.node):
            yield f"a format, line {applied.lineno}, that may be of any width"
    for part in tree.find_all(nodes.Getattr):
        if part.attr in _PADDING:
            yield f"{part.attr}, line {part.lineno}, of any width"
    for called in tree.find_all(nodes.Call):
        part = called.node
        if isinstance(part, nodes.Getattr) and part.attr in _FORMATS and _may_be_wide(part.node):
            yield f"a format, line {part.lineno}, that may be of any width"
    for filled in tree.find_all(nodes.Mod):
        if isinstance(filled.left, nodes.Const) and _may_be_wide(filled.left):
            yield f"a format, line {filled.lineno}, that may be of any width"


def _is_small(node: nodes.Node | None) -> bool:
    match node:
        case nodes.Const(value=str() as text):
            return len(text) <= _SMALL
        case nodes.Const(value=int() | float() | None as number):
            return abs(number or 0) <= _SMALL
        case nodes.Neg():
            return _is_small(node.node)
        case nodes.Add() | nodes.Sub():
            return _is_small(node.left) and _is_small(node.right)
        case nodes.Getattr(node=nodes.Name(name="loop")):  # a loop is never long
            return True
        case _:
            return False


def _may_be_wide(node: nodes.Node | None) -> bool:
    match node:
        case nodes.Const(value=str() as text):
            return _WIDE.search(text) is not None
        case nodes.Const():
            return False
        case _:
            return True


def _without_generation(template: str) -> str:
    """The template without transformers' own block, which Jinja does not know and which does not affect the rest."""
    return re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)


def _what_happened(error: Exception) -> str:
    match error:
        case SecurityError():
            return f"the chat template reaches for what it must not have: {error}; use another"
        case TemplateTooSlow():
            return f"the chat template ran for {SECONDS:g} s without an end: use another"
        case OverflowError() | MemoryError() | RecursionError():
            return f"the chat template asks for too much: {str(error) or 'memory'}; use another"
        case TemplateError():
            return f"the chat template refuses it: {error}"
        case ValueError():
            return str(error)
        case _:
            return f"the chat template fails with {type(error).__name__}: {error}"


def _bounded(seconds: float) -> AbstractContextManager[None]:
    """Raises TemplateTooSlow in this thread when the time is over."""
    return within(seconds, TemplateTooSlow)
