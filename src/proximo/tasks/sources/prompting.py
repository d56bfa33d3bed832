"""Prompts made of rows: template, system prompt and chat."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from proximo.data import Prompt, Row, read_prompt
from proximo.data.messages import read_messages

_PLACEHOLDERS = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w.]*)\}")
"""Braces around a name, and doubled ones. Others, as in \\boxed{}, are text."""


def check_template(template: str, hidden: Collection[str]) -> None:
    """Refuse a template that names no column, or one with the answer."""
    named = template_columns(template)
    if template and not named:
        raise ValueError(f"task.template is {template!r}: put a column in braces, such as {{question}}")
    for name in sorted(named):
        if name in hidden:
            raise ValueError(
                f"task.template has {{{name}}}, which is the answer: leave it out, or write {{{{{name}}}}} for the word"
            )


def template_columns(template: str) -> set[str]:
    """The columns that it names."""
    return {name for name in _PLACEHOLDERS.findall(template) if name}


def row_prompt(
    row: Row,
    column: str,
    *,
    template: str = "",
    system: str = "",
    chat: bool | None = None,
    field: str = "task",
) -> Prompt:
    """The prompt of a row: its column, or the template with the row's values. A text becomes a conversation with a
    system prompt or `chat`; a conversation becomes its texts where `chat` is False."""
    prompt = filled(template, row) if template else _column(row, column, field)
    if isinstance(prompt, str):
        if not system and not chat:
            return prompt
        prompt = ({"role": "user", "content": prompt},)
    if column.rpartition(".")[2] == "messages" and prompt[-1]["role"] == "assistant" and len(prompt) > 1:
        prompt = prompt[:-1]  # a whole conversation, as fine-tuning has them: its last reply is what is asked for
    if system and next(iter(prompt))["role"] == "system":
        raise ValueError(f"the prompt begins with a system message, and {field}.system is given: leave one of them out")
    turns = ({"role": "system", "content": system}, *prompt) if system else prompt
    return "\n\n".join(turn["content"] for turn in turns) if chat is False else turns


def filled(template: str, row: Row) -> str:
    """The template with the row's values in the place of their names; doubled braces are single ones."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if not name:
            return match[0][0]
        held = row.find(name)
        if held is None or isinstance(held, Mapping | list):
            known = ", ".join(row.values)
            raise ValueError(f"task.template has {{{name}}}, and the row has no such text: its columns are {known}")
        return str(held)

    text = read_prompt(_PLACEHOLDERS.sub(value, template), "the template")
    assert isinstance(text, str)
    return text


def _column(row: Row, column: str, field: str) -> Prompt:
    value: Any = row.find(column)
    if value is None and column not in row.values:
        raise ValueError(f"no column {column!r}, only {', '.join(row.values)}: set {field}.prompt_column")
    return read_messages(value, column) if isinstance(value, list) else read_prompt(value, _name(column))


def _name(column: str) -> str:
    return "the prompt" if column == "prompt" else column
