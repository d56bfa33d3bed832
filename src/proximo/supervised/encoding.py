"""Texts encoded as rows of tokens. Only the tokenizer is needed, so bad data is found before a model loads."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor

from proximo.data import DataFile, Example, Mistakes, Prompt, Ranking, read_splits
from proximo.data.splits import ReadsItems, refuse_empty
from proximo.models import micro_batches, prompt_tokens
from proximo.models.context_length import reach_of
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.tokens.templates import rendered
from proximo.models.tokens.thoughts import Thought, opened_thought
from proximo.models.tokens.tokenizing import asked_text, reply_tokens
from proximo.runs.log import RunLog
from proximo.system.safe_text import counted
from proximo.types.tensor_types import Bool, Int

Item = TypeVar("Item", Example, Ranking)
SHOWN = "what is replied"
"""Text that stands for a reply, to see what a template writes behind it."""


@dataclass(frozen=True)
class Encoded:
    location: str
    prompt: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    """Completion tokens: one for an example, all of a ranking with the best first."""
    margin: float | None = None
    """Margin of a ranked pair."""
    closed: int = 0
    """Completions before which the empty thought was closed that the prompt opens."""


@dataclass
class Limit:
    """Limit of a row's length, and what becomes of longer ones."""

    max_tokens: int
    too_long: Literal["leave_out", "cut"] | None = None
    left_out: int = 0
    cut: int = 0

    @property
    def line(self) -> str:
        """Number of rows that were too long, for a person; empty where none was."""
        words = ((self.left_out, "left out"), (self.cut, "cut"))
        return "".join(f", {count} {what} at {self.max_tokens} tokens" for count, what in words if count)


@dataclass(frozen=True)
class Prepared:
    """A data file, encoded and ready to train on."""

    train: list[Encoded]
    held_out: list[Encoded]
    mistakes: Mistakes
    """Bad rows that were skipped; empty unless skip_bad was set."""
    limit: "Limit | None" = None
    """Limit of their length, with the number of rows that were too long."""

    def check_room(self, model: PreTrainedModel) -> None:
        """Refuse rows that are longer than the model's context."""
        items = [*self.train, *self.held_out]
        longest = max(len(item.prompt) + len(text) for item in items for text in item.completions)
        if (reach := reach_of(model.config)) is not None and longest > reach.tokens:
            raise ValueError(f"data.max_tokens allows {longest} tokens, but {reach.why}: set it to {reach.tokens}")

    @property
    def counts(self) -> str:
        """Number of rows to train on, held out and left out, for a person."""
        left_out = f", {counted(len(self.mistakes), 'bad row')} left out" if self.mistakes else ""
        too_long = "" if self.limit is None else self.limit.line
        return f"{len(self.train)} to train on, {len(self.held_out)} held out{left_out}{too_long}"

    def report(self, log: RunLog, say: Callable[[str], None]) -> None:
        """Report what became of rows that are not trained on as they are."""
        items = [*self.train, *self.held_out]
        if closed := sum(item.closed for item in items):
            whole = sum(len(item.completions) for item in items)
            line = (
                "the chat template opens a thought in its prompt, which "
                f"{closed} of {whole} completions do not have: it is closed, empty, before them"
            )
            log.event(0, "closed_thoughts", line)
            say(line)
        if self.mistakes:
            log.event(0, "skipped_rows", f"{counted(len(self.mistakes), 'bad row')} left out:\n{self.mistakes}")


def prepare(
    data: DataFile, read: ReadsItems[Item], tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = ()
) -> Prepared:
    """Read, split and encode a file; a ValueError lists everything that is wrong with it. `ends` are as in
    `completion_tokens`.

    Example: prepare(DataFile("pairs.jsonl"), read_rankings, tokenizer)
    """
    mistakes = Mistakes()
    items, kept = read_splits(read, data.path, data.held_out, mistakes)
    limit = Limit(data.max_tokens, data.too_long)
    train, held_out = (encode(tokenizer, part, limit, mistakes, ends) for part in (items, kept))
    if not data.skip_bad:
        mistakes.refuse(f"data.path is {data.path!r}, with bad rows (`data.skip_bad=True` leaves them out):")
    refuse_empty(len(train), len(held_out), data.path, data.held_out, remedy="a larger share, a file, or 0 for none")
    return Prepared(train, held_out, mistakes, limit)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Example | Ranking],
    limit: Limit,
    mistakes: Mistakes,
    ends: Collection[int] = (),
) -> list[Encoded]:
    """Encode every item that fits; one that is too long, unless the limit says what becomes of it, or that the chat
    template refuses is a mistake. `ends` are as in `completion_tokens`."""
    end_of(tokenizer)  # a missing end token is not the fault of any item, so check it first
    encoded = []
    for item in items:
        try:
            if (row := _encoded(tokenizer, item, limit, ends)) is not None:
                encoded.append(row)
        except ValueError as error:
            mistakes.add(item.location, str(error))
    return encoded


def _encoded(
    tokenizer: PreTrainedTokenizerBase, item: Example | Ranking, limit: Limit, ends: Collection[int]
) -> Encoded | None:
    """The tokens of an item; None where it is too long and left out."""
    prompt = prompt_tokens(tokenizer, item.prompt)
    texts = (item.completion,) if isinstance(item, Example) else item.completions
    replies = [_reply(tokenizer, item.prompt, text, ends) for text in texts]
    completions = tuple(tokens for tokens, _ in replies)
    room = limit.max_tokens - len(prompt)
    if max(map(len, completions)) > room:
        if limit.too_long == "leave_out":
            limit.left_out += 1
            return None
        if limit.too_long is None or room < 1:
            _refuse_long(len(prompt), max(map(len, completions)), limit.max_tokens)
        limit.cut += 1
        completions = tuple(tokens[:room] for tokens in completions)
    if len(set(completions)) < len(completions):
        raise ValueError("two of its completions are the same tokens: there is no preference to learn")
    margin = item.margin if isinstance(item, Ranking) else None
    return Encoded(item.location, prompt, completions, margin, sum(is_closed for _, is_closed in replies))


def _refuse_long(prompt: int, longest: int, max_tokens: int) -> NoReturn:
    if prompt >= max_tokens:
        raise ValueError(
            f"the prompt alone has {prompt} tokens, and data.max_tokens is {max_tokens}: shorten it, or give more"
        )
    raise ValueError(
        f"prompt and completion have {prompt + longest} tokens, and data.max_tokens is {max_tokens}: shorten them, "
        "give more, or say what becomes of them, `data.too_long=cut`"
    )


def completion_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    text: str,
    ends: Collection[int] = (),
    *,
    arguments: Mapping[str, Any] | None = None,
    sampled: bool = False,
) -> tuple[int, ...]:
    """The tokens that a sampler would have to generate after `prompt_tokens`: the text and one end token.

    After a conversation these are the chat template's rendering of the reply, up to its first end token: the
    tokenizer's, or one of `ends`, which the model's own files name. If the template writes none, the tokenizer's
    follows what it writes up to the reply's last word; if it does not continue its own generation prompt, the reply
    itself. Where that prompt opens a thought, a text without one gets its end first, unless it was `sampled` there.
    `arguments` are those of the chat template.
    """
    tokens, _ = _reply(tokenizer, prompt, text, ends, arguments, sampled=sampled)
    return tokens


def _reply(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    text: str,
    ends: Collection[int] = (),
    arguments: Mapping[str, Any] | None = None,
    *,
    sampled: bool = False,
) -> tuple[tuple[int, ...], bool]:
    """Tokens of a reply, and whether an empty thought was closed before the text."""
    end, word = end_of(tokenizer)
    text, every = text.removesuffix(word), {end, *ends}
    check_ends(tokenizer, text, ends)
    asked = asked_text(tokenizer, prompt, arguments)
    if isinstance(prompt, str):
        return (*reply_tokens(tokenizer, asked, text), end), False
    whole = [*prompt, {"role": "assistant", "content": text}]
    written = rendered(tokenizer, whole, for_answer=False, arguments=arguments)
    rest = written.removeprefix(asked) if written.startswith(asked) else ""
    thought = None if sampled else opened_thought(asked)
    if thought is not None and not thought.is_rendered(text, rest):
        rest = _behind_thought(thought, asked, written, text)
    reply = reply_tokens(tokenizer, asked, rest) if rest else ()
    is_closed = thought is not None and not thought.is_in(text)
    end_index = next((index for index, token in enumerate(reply) if token in every), None)
    if end_index is not None:
        return reply[: end_index + 1], is_closed
    shown = [*prompt, {"role": "assistant", "content": SHOWN}]
    _, is_shown, behind = rendered(tokenizer, shown, for_answer=False, arguments=arguments).rpartition(SHOWN)
    body = rest.removesuffix(behind) if is_shown else text
    return (*reply_tokens(tokenizer, asked, body or text), end), is_closed


def _behind_thought(thought: Thought, asked: str, written: str, text: str) -> str:
    """A reply in a thought that the prompt opens, where the template writes a whole conversation otherwise: the end of
    an empty thought as it writes that, where it does, and what it writes around the reply."""
    before = asked.removesuffix(f"{thought.opens}{thought.space}")
    reply = written.removeprefix(before) if written.startswith(before) else ""
    if reply and not thought.is_in(text):
        if reply.startswith(thought.closes):
            return reply
        if thought.opens not in reply and thought.closes not in reply:
            return thought.continued("") + reply
    answer = text.rpartition(thought.closes)[2].strip()
    _, is_there, behind = written.rpartition(answer) if answer else ("", "", "")
    return thought.continued(text.rstrip()) + behind if is_there else thought.continued(text)


def check_ends(tokenizer: PreTrainedTokenizerBase, text: str, ends: Collection[int] = ()) -> None:
    """Refuse a reply that spells an end token, the tokenizer's or one of `ends`."""
    end, word = end_of(tokenizer)
    for other in (word, *(str(tokenizer.convert_ids_to_tokens(token)) for token in sorted({*ends} - {end}))):
        if other and other in text:
            raise ValueError(f"a completion contains {other!r} before its end: a sampler would have stopped there")


def end_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, str]:
    """The end token's id and text."""
    number, word = tokenizer.eos_token_id, tokenizer.eos_token
    if not isinstance(number, int) or not isinstance(word, str):
        raise ValueError("the tokenizer has no end-of-sequence token: a completion could not end, set its eos_token")
    return number, word


@dataclass(frozen=True)
class EncodedRows:
    """Completions as token-aligned tensors, the input of `models.score`."""

    prompts: tuple[tuple[int, ...], ...]
    tokens: Int[Tensor, "B T"]
    """Token ids; 0 beyond a row's length."""
    lengths: Int[Tensor, " B"]
    mask: Bool[Tensor, "B T"]
    """True on completion tokens, including the end token."""
    group: Int[Tensor, " B"]
    """Index of each row's prompt; the completions of a ranking share one."""

    def at(self, index: Int[Tensor, " M"]) -> "EncodedRows":
        """The rows at `index` with their prompts, whose indices stay; other prompts are empty."""
        group = self.group[index]
        used = set(group.tolist())
        prompts = tuple(prompt if number in used else () for number, prompt in enumerate(self.prompts))
        return EncodedRows(prompts, self.tokens[index], self.lengths[index], self.mask[index], group)

    def parts(self, token_budget: int) -> list[Int[Tensor, " M"]]:
        """Row indices of each micro-batch; a group is never split."""
        lengths = [len(prompt) for prompt in self.prompts]
        parts = micro_batches(lengths, self.lengths.tolist(), self.group.tolist(), token_budget)
        return [torch.tensor(part) for part in parts]


def to_rows(items: Sequence[Encoded]) -> EncodedRows:
    """One group per item, one row per completion."""
    completions = [(number, tokens) for number, item in enumerate(items) for tokens in item.completions]
    lengths = torch.tensor([len(tokens) for _, tokens in completions])
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    tokens = torch.zeros_like(mask, dtype=torch.long)
    tokens[mask] = torch.tensor([token for _, row in completions for token in row])
    return EncodedRows(
        prompts=tuple(item.prompt for item in items),
        tokens=tokens,
        lengths=lengths,
        mask=mask,
        group=torch.tensor([number for number, _ in completions]),
    )
