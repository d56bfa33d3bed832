"""Tools: their schemas, and how a model calls them, in the format of its own chat template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from jinja2 import TemplateError

from proximo.config.plugins import load_function
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.tokens.templates import rendered
from proximo.types import Problem

NAME, KEY, VALUE = "some_tool", "some_argument", "some_value"
THOUGHT, THOUGHT_ENDS = "<think>", "</think>"
"""Marks around what a model thinks before it replies: no call in it is made."""
USER: Mapping[str, Any] = {"role": "user", "content": "Hello"}
SAYING: Mapping[str, Any] = {"role": "assistant", "content": "something else"}
CALLING: Mapping[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": NAME, "arguments": {KEY: VALUE}}}],
}


@dataclass(frozen=True)
class Call:
    """A tool that a reply asks for."""

    name: str
    arguments: Mapping[str, Any]
    mistake: str = ""
    """Mistake in how it was written; empty: none."""


@dataclass(frozen=True)
class CallFormat:
    """The format in which a family of models writes a call: a JSON object between two marks."""

    opening: str
    """Text before the object. Empty: the reply is the object itself, as with Llama 3."""
    closing: str
    arguments: str
    """Key of the arguments."""

    def calls(self, reply: str, tools: Sequence[str]) -> list[Call]:
        """The calls of a reply; those that cannot be made say why."""
        if self.opening:
            _, *bodies = reply.split(self.opening)
            texts = [body.partition(self.closing)[0] if self.closing else body for body in bodies]
        else:
            texts = [reply] if reply.lstrip().startswith(("{", "[")) else []
        return [call for text in texts for call in self._read(text.strip(), tools)]

    def _read(self, text: str, tools: Sequence[str]) -> list[Call]:
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            return [Call("", {}, f"the call is not JSON: {error}")] if self.opening else []
        return [self._call(call, tools) for call in (parsed if isinstance(parsed, list) else [parsed])]

    def _call(self, call: Any, tools: Sequence[str]) -> Call:
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get(self.arguments, {}) if isinstance(call, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return Call("", {}, f'a call is {{"name": ..., "{self.arguments}": {{...}}}}')
        if name not in tools:
            return Call(name[:100], {}, f"there is no tool {name[:100]!r}, only {', '.join(tools)}")
        return Call(name, arguments)


def spoken(reply: str, *, thinking: bool) -> str:
    """A reply without its thoughts. `thinking`: it begins inside one, which the prompt has opened."""
    closed, opened = reply.find(THOUGHT_ENDS), reply.find(THOUGHT)
    thinking, rest, parts = thinking or (closed >= 0 and not 0 <= opened < closed), reply, []
    while rest:
        part, _, rest = rest.partition(THOUGHT_ENDS if thinking else THOUGHT)
        parts += [] if thinking else [part]
        thinking = not thinking
    return "".join(parts)


HERMES = CallFormat("<tool_call>", "</tool_call>", "arguments")


def call_format(tokenizer: PreTrainedTokenizerBase) -> CallFormat:
    """The format in which the tokenizer's chat template writes a call; HERMES where it writes none."""
    try:
        asked = rendered(tokenizer, [USER, SAYING], for_answer=False).partition(SAYING["content"])[0]
        text = rendered(tokenizer, [USER, CALLING], for_answer=False)
    except ValueError as error:
        if isinstance(error.__cause__, TemplateError | TypeError):
            return HERMES  # it refuses messages without content, or calls
        raise
    if NAME not in text:
        return HERMES
    start, end = text.rfind("{", 0, text.index(NAME)), text.find("}", text.find(VALUE))
    try:
        call = json.loads(text[start : text.index("}", end + 1) + 1])
    except ValueError:
        raise ValueError(
            f"the chat template writes a call as {text[len(asked) :][:120]!r}, which is no JSON object with its "
            "arguments: such calls cannot be read; use another template"
        ) from None
    key = next((key for key, value in call.items() if value == {KEY: VALUE}), "arguments")
    before, after = text[:start], text[text.index("}", end + 1) + 1 :]
    opening = before[len(asked) :] if before.startswith(asked) else before.rpartition("\n\n")[2]
    ends = tokenizer.eos_token if isinstance(tokenizer.eos_token, str) else ""
    closing = after.partition(ends)[0] if ends else after
    return CallFormat(opening.strip().removesuffix("["), closing.strip().removeprefix("]"), key)


@cache
def schema_of(path: str) -> dict[str, Any]:
    """The JSON schema of a function: its own `schema`, as tools of servers have one, or from its signature and
    docstring; ValueError says what is missing."""
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        function = load_function(path)
        schema = getattr(function, "schema", None)
        return schema if isinstance(schema, dict) else get_json_schema(function)
    except ValueError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"environment.tools has {path!r}, {reason}: give it a docstring with an `Args:` section, and a type for "
            "each argument"
        ) from None


def with_tools(tokenizer: PreTrainedTokenizerBase, problem: Problem, schemas: Sequence[Mapping[str, Any]]) -> Problem:
    """The problem with its tools, which the chat template tells the model of; where it does not, a message does: the
    system message, a new one, or the first message if the template takes no system message."""
    assert not isinstance(problem.prompt, str)
    if _shows_tools(tokenizer, problem, schemas):
        return replace(problem, chat_template_kwargs={**problem.chat_template_kwargs, "tools": list(schemas)})
    description, (first, *others) = _described(schemas, call_format(tokenizer)), problem.prompt
    if first["role"] == "system":
        return replace(problem, prompt=({**first, "content": f"{first['content']}\n\n{description}"}, *others))
    asked = ({"role": "system", "content": description}, *problem.prompt)
    if _text(tokenizer, asked, problem.chat_template_kwargs):
        return replace(problem, prompt=asked)
    return replace(problem, prompt=({**first, "content": f"{description}\n\n{first['content']}"}, *others))


def _shows_tools(tokenizer: PreTrainedTokenizerBase, problem: Problem, schemas: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether the chat template writes more of a tool's name if it is given the tools."""
    arguments, name = problem.chat_template_kwargs, str(schemas[0]["function"]["name"])
    shown = _text(tokenizer, problem.prompt, {**arguments, "tools": [dict(schema) for schema in schemas]})
    return shown.count(name) > _text(tokenizer, problem.prompt, arguments).count(name)


def _text(tokenizer: PreTrainedTokenizerBase, prompt: Any, arguments: Mapping[str, Any]) -> str:
    """The prompt as the template writes it; empty where it refuses."""
    try:
        return rendered(tokenizer, prompt, for_answer=True, arguments=arguments)
    except ValueError:
        return ""


def _described(schemas: Sequence[Mapping[str, Any]], form: CallFormat) -> str:
    """The tools as text."""
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    example = f'{form.opening}{{"name": "the function", "{form.arguments}": {{...}}}}{form.closing}'
    return f"You may call these functions:\n{listed}\nTo call one, reply with {example}"
