"""Examples for fine-tuning: a prompt and its completion."""

from dataclasses import dataclass
from typing import Any

from proximo.data.rows import Mistakes, Prompt, Row, read_completion, read_prompt, read_rows, shortened
from proximo.data.splits import prompt_key
from proximo.types import Message


@dataclass(frozen=True)
class Example:
    location: str
    """File and row it comes from, for error messages."""
    prompt: Prompt
    completion: str
    opening: Prompt | None = None
    """First prompt of a conversation with several replies, so that all stay on one side of a split."""

    @property
    def key(self) -> str:
        return prompt_key(self.prompt if self.opening is None else self.opening)


@dataclass(frozen=True)
class Columns:
    """The columns of a prompt and its completion, where a person names them."""

    prompt: str
    completion: str


QUESTIONS = ("question", "instruction", "problem", "query", "input")
"""Columns that hold a question, a user's message where there is a chat template; `prompt` is asked as it is."""
REPLIES = ("completion", "response", "output", "answer", "solution")
"""Columns that may hold what to learn."""
CHOOSE = "choose with `prompt_column=NAME` `completion_column=NAME`"
SPEAKERS = {
    "system": ("system",),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "model", "bot"),
    "tool": ("tool", "function", "function_response", "observation"),
}
"""Roles, and who speaks in ShareGPT's conversations."""


def read_examples(
    path: str,
    mistakes: Mistakes,
    *,
    field: str = "data.path",
    columns: Columns | None = None,
    chat: bool = False,
) -> list[Example]:
    """Read rows of {prompt, completion}; of {messages} or ShareGPT's {conversations}, where every assistant reply
    becomes an example; of a question and its answer, as in Alpaca's {instruction, input, output}.

    The prompt of a reply is exactly the turns that a sampler would see before it, whatever the chat template. `chat`:
    whether there is one, so that a question is a user's message.
    """
    examples = []
    for row in read_rows(path, mistakes, field=field):
        try:
            examples += _examples(row, columns, chat)
        except ValueError as error:
            mistakes.add(row.location, str(error))
    return examples


def _examples(row: Row, columns: Columns | None, chat: bool) -> list[Example]:
    if columns is not None:
        asked = read_prompt(row[columns.prompt], columns.prompt)
        return [_answered(row, asked, columns.completion, chat and columns.prompt in QUESTIONS)]
    if row.has("prompt") and row.has("completion"):
        return [_answered(row, read_prompt(row["prompt"]), "completion", chat=False)]
    for name in ("messages", "conversations", "conversation"):
        if row.has(name):
            return _conversation(row, name)
    question = next((name for name in ("prompt", *QUESTIONS) if row.has(name)), None)
    if question is None:
        raise ValueError(f"no column 'prompt' or 'messages', only {', '.join(row.values)}: {CHOOSE}")
    return [_answered(row, _question(row, question, chat), _reply(row), chat=False)]


def _reply(row: Row) -> str:
    """The column with what to learn."""
    known = [name for name in REPLIES if row.has(name)]
    if not known:
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
    return Example(row.location, _in_chat(row, prompt, chat), read_completion(row[column], column))


def _in_chat(row: Row, prompt: Prompt, chat: bool) -> Prompt:
    """A text as a user's message after the row's system prompt, where there is a chat template."""
    return (*_system(row), {"role": "user", "content": prompt}) if chat and isinstance(prompt, str) else prompt


def _system(row: Row) -> tuple[Message, ...]:
    """The system prompt in a column of its own."""
    text = row["system"] if row.has("system") else None
    return ({"role": "system", "content": text},) if isinstance(text, str) and text.strip() else ()


def _conversation(row: Row, column: str) -> list[Example]:
    messages = _messages(row[column], column)
    if messages[0]["role"] != "system":
        messages = (*_system(row), *messages)
    replies = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies:
        raise ValueError("no turn of the conversation is the assistant's: there is nothing to learn")
    if replies[0] == 0:
        raise ValueError("the conversation begins with the assistant's turn: give what it replies to")
    opening = messages[: replies[0]] if len(replies) > 1 else None
    return [
        Example(
            row.location if opening is None else f"{row.location}, turn {number + 1}",
            messages[:number],
            read_completion(messages[number]["content"], f"turn {number + 1}"),
            opening,
        )
        for number in replies
    ]


def _messages(value: Any, column: str) -> tuple[Message, ...]:
    spoken = [_message(turn) for turn in value] if isinstance(value, list) else value
    messages = read_prompt(spoken, column)
    if isinstance(messages, str):
        raise ValueError(f"{column} is a text: give a list of messages with role and content, or prompt and completion")
    return messages


def _message(value: Any) -> Any:
    """A turn as ShareGPT has it, {from, value}, with role and content; any other as it is."""
    if not isinstance(value, dict) or not {"from", "value"} <= value.keys():
        return value
    role = next((role for role, names in SPEAKERS.items() if value["from"] in names), None)
    if role is None:
        known = ", ".join(name for names in SPEAKERS.values() for name in names)
        raise ValueError(f"a turn is from {shortened(value['from'])}: give one of {known}")
    return {"role": role, "content": value["value"]}
