"""Texts as tokens, in the rows that a model scores. The tokenizer is enough: bad data is known before a model loads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.data import DataFile, Example, Mistakes, Prompt, Ranking, read_splits
from proximo.data.splits import Reader, refuse_empty
from proximo.models import micro_batches, prompt_tokens
from proximo.models.positions import reach_of
from proximo.models.tokens.templates import rendered
from proximo.models.tokens.tokenizing import asked_text, reply_tokens
from proximo.tensor_types import Bool, Int
from proximo.training.runfolder.log import RunLog

Item = TypeVar("Item", Example, Ranking)


@dataclass(frozen=True)
class Encoded:
    place: str
    prompt: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    """One of an example; of a ranking all, best first."""
    margin: float | None = None
    """Of a ranked pair."""


@dataclass(frozen=True)
class Prepared:
    """A data file, ready to train on."""

    train: list[Encoded]
    held_out: list[Encoded]
    mistakes: Mistakes
    """Rows that were left out; empty unless that was asked for."""

    def check_room(self, model: PreTrainedModel) -> None:
        """Every row must be within the model's reach."""
        items = [*self.train, *self.held_out]
        longest = max(len(item.prompt) + len(text) for item in items for text in item.completions)
        if (reach := reach_of(model.config)) is not None and longest > reach.tokens:
            raise ValueError(
                f"data.max_tokens lets {longest} tokens through, but {reach.why}: set it to {reach.tokens}"
            )

    def report(self, log: RunLog, say: Callable[[str], None]) -> None:
        """How much there is, and what was left out, with its places."""
        left_out = f", {len(self.mistakes)} bad rows left out" if self.mistakes else ""
        say(f"{len(self.train)} to train on, {len(self.held_out)} held out{left_out}")
        if self.mistakes:
            log.event(0, "skipped_rows", f"{len(self.mistakes)} bad rows left out:\n{self.mistakes}")


def prepare(data: DataFile, read: Reader[Item], tokenizer: PreTrainedTokenizerBase) -> Prepared:
    """Read, split and encode a file; a ValueError says all that is wrong with it.

    Example: prepare(DataFile("pairs.jsonl"), read_rankings, tokenizer)
    """
    mistakes = Mistakes()
    items, kept = read_splits(read, data.path, data.held_out, mistakes)
    train, held_out = (encode(tokenizer, part, data.max_tokens, mistakes) for part in (items, kept))
    if not data.skip_bad:
        mistakes.refuse(f"data.path is {data.path!r}, with bad rows (--skip-bad leaves them out):")
    refuse_empty(len(train), len(held_out), data.path, data.held_out, remedy="a larger share, a file, or 0 for none")
    return Prepared(train, held_out, mistakes)


def encode(
    tokenizer: PreTrainedTokenizerBase, items: Sequence[Example | Ranking], max_tokens: int, mistakes: Mistakes
) -> list[Encoded]:
    """Every item that fits; what does not, or what the chat template refuses, is a mistake."""
    _end(tokenizer)  # without one no item is at fault
    encoded = []
    for item in items:
        try:
            encoded.append(_encoded(tokenizer, item, max_tokens))
        except ValueError as error:
            mistakes.add(item.place, str(error))
    return encoded


def _encoded(tokenizer: PreTrainedTokenizerBase, item: Example | Ranking, max_tokens: int) -> Encoded:
    prompt = prompt_tokens(tokenizer, item.prompt)
    if len(prompt) >= max_tokens:
        raise ValueError(
            f"the prompt alone has {len(prompt)} tokens, and data.max_tokens is {max_tokens}: shorten it, or give more"
        )
    texts = (item.completion,) if isinstance(item, Example) else item.completions
    completions = tuple(completion_tokens(tokenizer, item.prompt, text) for text in texts)
    longest = len(prompt) + max(map(len, completions))
    if longest > max_tokens:
        raise ValueError(
            f"prompt and completion have {longest} tokens, and data.max_tokens is {max_tokens}: "
            "shorten them, or give more"
        )
    if len(set(completions)) < len(completions):
        raise ValueError("two of its completions are the same tokens: there is no preference to learn")
    return Encoded(item.place, prompt, completions, item.margin if isinstance(item, Ranking) else None)


def completion_tokens(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, text: str) -> tuple[int, ...]:
    """Exactly what a sampler would have to say after `prompt_tokens`: the text, and one end token behind it.

    After a conversation that is what the chat template makes of the reply, up to its first end token. Where it
    writes none, or does not continue what it wrote to ask for a reply, it is the reply itself and an end token.
    """
    end, word = _end(tokenizer)
    if word in text.removesuffix(word):
        raise ValueError(f"a completion says {word!r} before its end: a sampler would have stopped there")
    asked = asked_text(tokenizer, prompt)
    if not isinstance(prompt, str):
        reply = _rendered_reply(tokenizer, prompt, asked, text)
        if end in reply:
            return reply[: reply.index(end) + 1]
    return (*reply_tokens(tokenizer, asked, text.removesuffix(word)), end)


def _end(tokenizer: PreTrainedTokenizerBase) -> tuple[int, str]:
    """The end token and how it is written."""
    number, word = tokenizer.eos_token_id, tokenizer.eos_token
    if not isinstance(number, int) or not isinstance(word, str):
        raise ValueError("the tokenizer has no end-of-sequence token: a completion could not end, set its eos_token")
    return number, word


def _rendered_reply(tokenizer: PreTrainedTokenizerBase, prompt: Sequence, asked: str, text: str) -> tuple[int, ...]:
    """What the chat template writes of a reply behind its generation prompt; empty where it writes something else."""
    answered = rendered(tokenizer, [*prompt, {"role": "assistant", "content": text}], for_answer=False)
    return reply_tokens(tokenizer, asked, answered.removeprefix(asked)) if answered.startswith(asked) else ()


@dataclass(frozen=True)
class EncodedRows:
    """Completions as tensors, aligned with their tokens: what `models.score` takes."""

    prompts: tuple[tuple[int, ...], ...]
    tokens: Int[Tensor, "B T"]
    """0 beyond a row's length."""
    lengths: Int[Tensor, " B"]
    mask: Bool[Tensor, "B T"]
    """True on completion tokens, the end included."""
    group: Int[Tensor, " B"]
    """Which prompt; the completions of a ranking share one."""

    def at(self, index: Int[Tensor, " M"]) -> "EncodedRows":
        """Some of the rows; prompts are shared, so their numbers stay."""
        return EncodedRows(self.prompts, self.tokens[index], self.lengths[index], self.mask[index], self.group[index])

    def parts(self, token_budget: int) -> list[Int[Tensor, " M"]]:
        """Row numbers of each micro-batch; groups stay whole."""
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
