"""Messages of conversations, as data files spell them: role and content, ShareGPT's from and value, tool calls."""

from collections.abc import Mapping
from typing import Any

from proximo.data.rows import is_text, read_prompt, shortened
from proximo.system.opening import json_value
from proximo.types import Message

SPEAKERS = {
    "system": ("system",),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "model", "bot"),
    "tool": ("tool", "function", "function_response", "observation"),
}
"""Roles, and who speaks in ShareGPT's conversations."""


def read_messages(value: Any, column: str) -> tuple[Message, ...]:
    """Read a conversation; ValueError names the message that cannot be read."""
    if isinstance(value, str):
        raise ValueError(f"{column} is a text: give a list of messages with role and content, or prompt and completion")
    if not isinstance(value, list) or not value:
        raise ValueError(f"{column} is {shortened(value)}: give a list of messages with role and content")
    messages = read_prompt([_message(turn, f"{column}[{number}]") for number, turn in enumerate(value)], column)
    assert not isinstance(messages, str)
    return messages


def _message(value: Any, name: str) -> Any:
    """A message with role, content as one text, and tool calls where it has some."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {shortened(value)}: give a message with role and content")
    if {"from", "value"} <= value.keys():
        return {"role": _role(value["from"]), "content": value["value"]}
    turn = {key: each for key, each in value.items() if each is not None}
    turn["content"] = _joined(turn.get("content", "" if turn.get("tool_calls") else None))
    if "tool_calls" in turn:
        turn["tool_calls"] = _calls(turn["tool_calls"], name)
        turn = turn if turn["tool_calls"] else {key: each for key, each in turn.items() if key != "tool_calls"}
    for key in ("role", "content"):
        if not is_text(turn.get(key)):
            raise ValueError(f"{name} has {shortened(turn.get(key))} as its {key}: give a text")
    return turn


def _role(speaker: Any) -> str:
    role = next((role for role, names in SPEAKERS.items() if speaker in names), None)
    if role is None:
        known = ", ".join(name for names in SPEAKERS.values() for name in names)
        raise ValueError(f"a turn is from {shortened(speaker)}: give one of {known}")
    return role


def _joined(content: Any) -> Any:
    """Content in parts, as OpenAI's, as one text where all parts are texts."""
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    return content


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _calls(given: Any, name: str) -> list[Any]:
    if given and not isinstance(given, list):
        raise ValueError(f"{name} has {shortened(given)} as its tool_calls: give a list of them")
    return [_call(call, name) for call in given or ()]


def _call(call: Any, name: str) -> Any:
    """A tool call with its arguments as an object, which chat templates write as JSON; OpenAI's are a text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not is_text(function.get("name")):
        raise ValueError(f"{name} has {shortened(call)} as a tool call: give a function with name and arguments")
    function = without_nothing(function) | {"arguments": _arguments(function.get("arguments"))}
    return without_nothing(
        {key: each for key, each in call.items() if key not in function} | {"type": "function", "function": function}
    )


def _arguments(given: Any) -> Any:
    if not isinstance(given, str):
        return {} if given is None else without_nothing(given)
    try:
        read = json_value(given)
    except ValueError:
        return given
    return read if isinstance(read, dict) else given


def read_tools(value: Any) -> list[Any]:
    """The tools that a row offers: a list of functions with name and parameters, or that list as JSON."""
    if isinstance(value, str):
        try:
            value = json_value(value) if value.strip() else []
        except ValueError:
            raise ValueError(f"tools is {shortened(value)}: give a list of functions, or that list as JSON") from None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise ValueError(f"tools is {shortened(value)}: give a list of functions, each with name and parameters")
    return [without_nothing(tool) for tool in value]


def without_nothing(value: Any) -> Any:
    """A value without the keys that are None: Parquet gives every object the keys of all others."""
    try:
        if isinstance(value, Mapping):
            return {key: without_nothing(each) for key, each in value.items() if each is not None}
        return [without_nothing(each) for each in value] if isinstance(value, list) else value
    except RecursionError:
        raise ValueError("a tool or its call is nested too deeply: leave the row out") from None
