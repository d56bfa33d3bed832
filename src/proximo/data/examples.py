"""Examples for fine-tuning: a prompt and its completion, the replies of a conversation, or a plain text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from proximo.data.messages import read_messages, read_tools
from proximo.data.rows import Mistakes, Prompt, Row, read_completion, read_prompt, read_rows
from proximo.data.splits import prompt_key
from proximo.types import Message


@dataclass(frozen=True)
class Example:
    location: str
    """File and row it comes from, for error messages."""
    prompt: Prompt
    """Text or conversation before the completion. Empty: the completion is a plain text, learned whole."""
    completion: str
    earlier: tuple["Example", ...] = ()
    """Earlier replies of the same conversation, each with the turns before it."""
    calls: tuple[Mapping[str, Any], ...] = ()
    """Tool calls that the completion makes behind its text."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template: the tools that are offered."""

    @property
    def key(self) -> str:
        """Key of the first prompt, so that all replies stay on one side of a split."""
        return prompt_key((self.earlier[0] if self.earlier else self).prompt or self.completion)


@dataclass(frozen=True)
class Columns:
    """The columns that a person names: of a prompt and its completion, of messages, or of a plain text."""

    prompt: str = ""
    completion: str = ""
    messages: str = ""
    text: str = ""


QUESTIONS = ("question", "instruction", "problem", "query", "input")
"""Columns that hold a question, a user's message where there is a chat template; `prompt` is asked as it is."""
REPLIES = ("completion", "response", "output", "answer", "solution")
"""Columns that may hold what to learn."""
CHOOSE = "choose with `prompt_column=NAME` `completion_column=NAME`, `messages_column=NAME` or `text_column=NAME`"


def read_examples(
    path: str,
    mistakes: Mistakes,
    *,
    field: str = "data.path",
    columns: Columns | None = None,
    chat: bool = False,
) -> list[Example]:
    """Read rows of {prompt, completion}; of {messages} or ShareGPT's {conversations}, all of whose replies are learned;
    of a question and its answer, as in Alpaca's {instruction, input, output}; of a plain {text}.

    The prompt of a reply is exactly the turns that a sampler would see before it, whatever the chat template. `chat`:
    whether there is one, so that a question is a user's message.
    """
    examples = []
    for row in read_rows(path, mistakes, field=field):
        try:
            examples.append(_example(row, columns or Columns(), chat))
        except ValueError as error:
            mistakes.add(row.location, str(error))
    return examples


def _example(row: Row, columns: Columns, chat: bool) -> Example:
    if columns.text:
        return _plain(row, columns.text)
    if columns.messages:
        return _conversation(row, columns.messages)
    if columns.prompt:
        asked = read_prompt(row[columns.prompt], columns.prompt)
        return _answered(row, asked, columns.completion, chat and columns.prompt in QUESTIONS)
    if row.has("prompt") and row.has("completion"):
        return _answered(row, read_prompt(row["prompt"]), "completion", chat=False)
    for name in ("messages", "conversations", "conversation"):
        if row.has(name):
            return _conversation(row, name)
    question = next((name for name in ("prompt", *QUESTIONS) if row.has(name)), None)
    if question is None and row.has("text"):
        return _plain(row, "text")
    if question is None:
        _refuse_null(row, ("prompt", "messages", "conversations", *QUESTIONS, "text"))
        raise ValueError(f"no column 'prompt' or 'messages', only {', '.join(row.values)}: {CHOOSE}")
    return _answered(row, _question(row, question, chat), _reply(row), chat=False)


def _refuse_null(row: Row, columns: Sequence[str]) -> None:
    """Refuse a row whose column is there and holds nothing."""
    for name in columns:
        if name in row.values:
            raise ValueError(f"{name} is null: give a text, or leave the row out")


def _plain(row: Row, column: str) -> Example:
    return Example(row.location, "", read_completion(row[column], column))


def _reply(row: Row) -> str:
    """The column with what to learn."""
    known = [name for name in REPLIES if row.has(name)]
    if not known:
        _refuse_null(row, REPLIES)
        raise ValueError(f"no column 'completion', only {', '.join(row.values)}: {CHOOSE}")
    if len(known) > 1:
        raise ValueError(f"the completion may be in {' or '.join(known)}: {CHOOSE}")
    return known[0]


def _question(row: Row, column: str, chat: bool) -> Prompt:
    """Question in this column; an instruction comes with the text that it is about."""
    asked = read_prompt(row[column], column)
    about = next((row[name] for name in ("input", "context") if row.has(name) and row[name] and name != column), "")
    if column != "instruction" or not isinstance(asked, str):
        return _in_chat(row, asked, chat and column != "prompt")
    about = read_prompt(about, "the instruction's input") if about else ""
    if not isinstance(about, str):
        raise ValueError("the instruction's input is a list of messages: give a text")
    if chat:
        return _in_chat(row, f"{asked}\n\n{about}" if about else asked, chat)
    parts = {"Instruction": asked, **({"Input": about} if about else {}), "Response": ""}
    return "\n\n".join(f"### {name}:\n{text}" for name, text in parts.items())


def _answered(row: Row, prompt: Prompt, column: str, chat: bool) -> Example:
    """An example of a prompt and its completion: a text, or one message, which may call tools."""
    asked, value = _in_chat(row, prompt, chat), row[column]
    if not isinstance(asked, str) and isinstance(value, list) and len(value) == 1:
        [message] = read_messages(value, column)
        if message["role"] == "assistant":
            return _spoken(row.location, asked, message, column, _arguments(row))
    return Example(row.location, asked, read_completion(value, column), arguments=_arguments(row))


def _arguments(row: Row) -> dict[str, Any]:
    tools = read_tools(row["tools"]) if row.has("tools") else []
    return {"tools": tools} if tools else {}


def _spoken(location: str, prompt: Prompt, message: Message, name: str, arguments: Mapping[str, Any]) -> Example:
    """An example of what a message of the assistant says, or calls."""
    calls: Any = message.get("tool_calls", ())
    text = "" if calls and not message["content"].strip() else read_completion(message["content"], name)
    return Example(location, prompt, text, calls=tuple(calls), arguments=arguments)


def _in_chat(row: Row, prompt: Prompt, chat: bool) -> Prompt:
    """A text as a user's message after the row's system prompt, where there is a chat template."""
    return (*_system(row), {"role": "user", "content": prompt}) if chat and isinstance(prompt, str) else prompt


def _system(row: Row) -> tuple[Message, ...]:
    """The system prompt in a column of its own."""
    text = row["system"] if row.has("system") else None
    return ({"role": "system", "content": text},) if isinstance(text, str) and text.strip() else ()


def _conversation(row: Row, column: str) -> Example:
    messages = read_messages(row[column], column)
    if messages[0]["role"] != "system":
        messages = (*_system(row), *messages)
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not numbers:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise ValueError(
            f"no turn of the conversation is the assistant's: there is nothing to learn, the roles are {roles}"
        )
    if numbers[0] == 0:
        raise ValueError("the conversation begins with the assistant's turn: give what it replies to")
    arguments = _arguments(row)
    *earlier, last = (
        _spoken(
            f"{row.location}, turn {number + 1}", messages[:number], messages[number], f"turn {number + 1}", arguments
        )
        for number in numbers
    )
    return replace(last, location=row.location, earlier=tuple(earlier))
