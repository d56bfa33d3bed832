"""Examples for fine-tuning: a prompt and its completion."""

from dataclasses import dataclass
from typing import Any

from proximo.data.rows import Mistakes, Prompt, Row, read_completion, read_prompt, read_rows
from proximo.data.splits import prompt_key
from proximo.types import Message


@dataclass(frozen=True)
class Example:
    place: str
    """File and row it comes from, for error messages."""
    prompt: Prompt
    completion: str
    opening: Prompt | None = None
    """For a conversation with several replies: the prompt of the first, so that all stay on one side of a split."""

    @property
    def key(self) -> str:
        return prompt_key(self.prompt if self.opening is None else self.opening)


def read_examples(path: str, mistakes: Mistakes, *, field: str = "data.path") -> list[Example]:
    """Read rows of {prompt, completion}, or of {messages}, where every assistant reply becomes an example.

    The prompt of a reply is exactly the turns that a sampler would see before it, whatever the chat template.
    """
    examples = []
    for row in read_rows(path, mistakes, field=field):
        try:
            examples += _conversation(row) if row.has("messages") and not row.has("prompt") else [_pair(row)]
        except ValueError as error:
            mistakes.add(row.place, str(error))
    return examples


def _pair(row: Row) -> Example:
    if not row.has("prompt") and "messages" not in row.values:
        raise ValueError(f"no column 'prompt' or 'messages', only {', '.join(row.values)}")
    return Example(row.place, read_prompt(row["prompt"]), read_completion(row["completion"], "completion"))


def _conversation(row: Row) -> list[Example]:
    messages = _messages(row["messages"])
    replies = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies:
        raise ValueError("no turn of the conversation is the assistant's: there is nothing to learn")
    if replies[0] == 0:
        raise ValueError("the conversation begins with the assistant's turn: give what it replies to")
    opening = messages[: replies[0]] if len(replies) > 1 else None
    return [
        Example(
            row.place if opening is None else f"{row.place}, turn {number + 1}",
            messages[:number],
            read_completion(messages[number]["content"], f"turn {number + 1}"),
            opening,
        )
        for number in replies
    ]


def _messages(value: Any) -> tuple[Message, ...]:
    messages = read_prompt(value, "messages")
    if isinstance(messages, str):
        raise ValueError("messages is a text: give a list of messages with role and content, or prompt and completion")
    return messages
