"""Texts encoded as rows of tokens. Only the tokenizer is needed, so bad data is found before a model loads."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from proximo.data import DataFile, Example, Mistakes, Prompt, Ranking, read_rankings, read_splits
from proximo.data.rankings import RankedColumns
from proximo.data.splits import AGAIN, ReadsItems, chosen_again, refuse_empty
from proximo.models import micro_batches, prompt_tokens
from proximo.models.context_length import reach_of
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.tokens.keys import SECONDS
from proximo.models.tokens.templates import rendered
from proximo.models.tokens.thoughts import Thought, opened_thought
from proximo.models.tokens.tokenizing import asked_text, encoded_texts, reply_tokens, special_prefix
from proximo.runs.log import RunLog
from proximo.supervised.kept_rows import KeptRows, keep, read_kept, rows_key
from proximo.supervised.limits import Encoded, Limit
from proximo.system.safe_text import counted
from proximo.system.slow_work import told_while_slow
from proximo.types.tensor_types import Bool, Int

Item = TypeVar("Item", Example, Ranking)
TOGETHER = 512
"""Number of rows whose texts reach the tokenizer at once."""
SHOWN = "what is replied"
"""Text that stands for a reply, to see what a template writes behind it."""


@dataclass(frozen=True)
class Prepared:
    """A data file, encoded and ready to train on."""

    train: list[Encoded]
    held_out: list[Encoded]
    mistakes: Mistakes
    """Bad rows that were skipped; empty unless skip_bad was set."""
    limit: "Limit | None" = None
    """Limit of their length, with the number of rows that were too long."""
    held_out_again: bool = False
    """True if the held-out rows were chosen by the second hash."""

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
        again = f" ({AGAIN})" if self.held_out_again else ""
        return f"{len(self.train)} to train on, {len(self.held_out)} held out{again}{left_out}{too_long}"

    def report(self, log: RunLog, say: Callable[[str], None]) -> None:
        """Report what became of rows that are not trained on as they are."""
        items = [*self.train, *self.held_out]
        if apart := sum(item.is_apart for item in items):
            line = (
                f"{apart} replies are trained as rows of their own, each after the turns before it: this model's chat "
                "template shortens or changes earlier replies of a conversation, so one row cannot hold them all"
            )
            log.event(0, "replies_apart", line)
            say(line)
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
    `completion_tokens`. What takes long is kept in the user's cache, for the next start.

    Example: prepare(DataFile("pairs.jsonl"), read_rankings, tokenizer)
    """
    key, start = rows_key(data, read, tokenizer, ends), time.monotonic()
    if key is not None and (kept := read_kept(key)) is not None:
        return _as_kept(kept, data)
    prepared = _prepared(data, read, tokenizer, ends)
    took_long = time.monotonic() - start > SECONDS
    if key is not None and took_long and key == rows_key(data, read, tokenizer, ends):  # not changed meanwhile
        assert prepared.limit is not None
        limit, noted = prepared.limit, prepared.mistakes.noted
        rows = KeptRows(prepared.train, prepared.held_out, noted, limit.left_out, limit.cut, prepared.held_out_again)
        keep(key, rows)
    return prepared


def _as_kept(rows: KeptRows, data: DataFile) -> Prepared:
    mistakes = Mistakes()
    for location, what in rows.mistakes:
        mistakes.add(location, what)
    limit = Limit(data.max_tokens, data.too_long, rows.left_out, rows.cut)
    return Prepared(rows.train, rows.held_out, mistakes, limit, rows.again)


def _prepared(
    data: DataFile, read: ReadsItems[Item], tokenizer: PreTrainedTokenizerBase, ends: Collection[int]
) -> Prepared:
    mistakes = Mistakes()
    items, kept = read_splits(read, data.path, data.held_out, mistakes)
    if not items and not kept and not mistakes:
        raise ValueError(f"data.path is {data.path!r}: it has no rows")
    limit = Limit(data.max_tokens, data.too_long)
    train, held_out = (encode(tokenizer, part, limit, mistakes, ends) for part in (items, kept))
    if not data.skip_bad:
        mistakes.refuse(f"data.path is {data.path!r}, with bad rows (`data.skip_bad=True` leaves them out):")
    limit.refuse_most(len(items) + len(kept))
    refuse_empty(len(train), len(held_out), data.path, data.held_out, remedy="a larger share, a file, or 0 for none")
    return Prepared(train, held_out, mistakes, limit, chosen_again(kept, data.held_out))


class NamesRanked(Protocol):
    """A config that names the columns of its rankings."""

    @property
    def prompt_column(self) -> str | None: ...

    @property
    def chosen_column(self) -> str | None: ...

    @property
    def rejected_column(self) -> str | None: ...

    @property
    def ranking_column(self) -> str | None: ...


def rankings_reader(config: NamesRanked) -> ReadsItems[Ranking]:
    """Reader of a file's rankings, with the columns that the config names."""
    usual = RankedColumns()
    columns = RankedColumns(
        config.prompt_column or usual.prompt,
        config.chosen_column or usual.chosen,
        config.rejected_column or usual.rejected,
        config.ranking_column or usual.ranking,
    )
    return partial(read_rankings, columns=columns)


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
    encoded: list[Encoded] = []
    for item, draft, known in _drafts(tokenizer, told_while_slow(items, "rows encoded", len(items)), ends):
        try:
            if isinstance(draft, ValueError):
                raise draft
            rows = (_checked(row) for row in _rows(tokenizer, item, draft, known, ends))
            encoded += filter(None, map(limit.fitted, rows))
        except ValueError as error:
            mistakes.add(item.location, str(error))
    return encoded


Known = Mapping[str, tuple[int, ...]]
"""Tokens of texts."""


def _drafts(
    tokenizer: PreTrainedTokenizerBase, items: Iterable[Example | Ranking], ends: Collection[int]
) -> Iterator[tuple[Example | Ranking, "list[_Draft] | ValueError", Known]]:
    """Each item with its replies as texts, or what is wrong with them, and the tokens of those texts, which the
    tokenizer finds for many items at once."""
    remaining = iter(items)
    while part := list(islice(remaining, TOGETHER)):
        drafts = [_drafted(tokenizer, item, ends) for item in part]
        written = [draft for each in drafts if not isinstance(each, ValueError) for draft in each]
        texts = list(dict.fromkeys(text for draft in written for text in (draft.asked, draft.asked + draft.rest)))
        known = dict(zip(texts, encoded_texts(tokenizer, texts), strict=True))
        yield from ((item, each, known) for item, each in zip(part, drafts, strict=True))


def _drafted(
    tokenizer: PreTrainedTokenizerBase, item: Example | Ranking, ends: Collection[int]
) -> "list[_Draft] | ValueError":
    try:
        if isinstance(item, Ranking):
            first, *others = item.completions
            best = _draft(tokenizer, item.prompt, first, ends)
            return [best, *(_draft(tokenizer, item.prompt, text, ends, asked=best.asked) for text in others)]
        if not item.prompt:
            return [_Draft(item.completion, "")]
        return [
            _draft(tokenizer, each.prompt, each.completion, ends, each.arguments, calls=each.calls)
            for each in (*item.earlier, item)
        ]
    except ValueError as error:
        return error


def _rows(
    tokenizer: PreTrainedTokenizerBase,
    item: Example | Ranking,
    drafts: "Sequence[_Draft]",
    known: Known,
    ends: Collection[int],
) -> list[Encoded]:
    """The row of an item; those of a conversation's replies, where they cannot be one."""
    if isinstance(item, Example) and not item.prompt:
        return [_plain_row(tokenizer, item)]
    completions = tuple(_tokens(tokenizer, draft, ends, known) for draft in drafts)
    if isinstance(item, Ranking):
        prompt = _prompt(tokenizer, item.prompt, drafts[0], known)
        return [Encoded(item.location, prompt, completions, item.margin, sum(draft.is_closed for draft in drafts))]
    examples = (*item.earlier, item)
    rows = [
        Encoded(each.location, _prompt(tokenizer, each.prompt, draft, known), (tokens,), closed=int(draft.is_closed))
        for each, draft, tokens in zip(examples, drafts, completions, strict=True)
    ]
    return rows if len(rows) == 1 else _in_one(rows)


def _in_one(rows: Sequence[Encoded]) -> list[Encoded]:
    """The replies of a conversation in one row, in which each stands behind exactly the tokens that a sampler would
    have before it; as they are where that cannot be."""
    first, *_, last = rows
    for row, following in pairwise(rows):
        whole = row.prompt + row.completions[0]
        if following.prompt[: len(whole)] != whole:
            return [replace(row, is_apart=True) for row in rows]
    tokens, start = last.prompt + last.completions[0], len(first.prompt)
    trained = [False] * len(tokens)
    for row in rows:
        trained[len(row.prompt) : len(row.prompt) + len(row.completions[0])] = [True] * len(row.completions[0])
    closed = sum(row.closed for row in rows)
    return [Encoded(last.location, first.prompt, (tokens[start:],), closed=closed, trained=tuple(trained[start:]))]


def _plain_row(tokenizer: PreTrainedTokenizerBase, item: Example) -> Encoded:
    """A plain text and its end. All of it is learned, but for its first token, which follows nothing."""
    end, word = end_of(tokenizer)
    text = item.completion.removesuffix(word)
    tokens = (*prompt_tokens(tokenizer, text), end)
    start = max(1, len(special_prefix(tokenizer, text)))
    return Encoded(item.location, tokens[:start], (tokens[start:],))


def _prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, draft: "_Draft", known: Known) -> tuple[int, ...]:
    """The tokens of a prompt, which are those of its text where a template has written it."""
    tokens = known.get(draft.asked, ()) if not isinstance(prompt, str) else ()
    return tokens or prompt_tokens(tokenizer, prompt)


def _checked(row: Encoded) -> Encoded:
    if len(set(row.completions)) < len(row.completions):
        raise ValueError("two of its completions are the same tokens: there is no preference to learn")
    return row


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
    return _tokens(tokenizer, _draft(tokenizer, prompt, text, ends, arguments, sampled=sampled), ends)


@dataclass(frozen=True)
class _Draft:
    """A reply as text, before its tokens are looked for."""

    asked: str
    """Text of the prompt."""
    rest: str
    """Text that a template writes behind it, for this reply; of a prompt that is a text, the reply itself."""
    body: Callable[[], str] | None = None
    """The reply without what a template writes behind it, for one that writes no end. None: there is no template."""
    is_closed: bool = False
    """True where an empty thought was closed before the text."""


def _draft(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    text: str,
    ends: Collection[int] = (),
    arguments: Mapping[str, Any] | None = None,
    *,
    calls: Sequence[Mapping[str, Any]] = (),
    sampled: bool = False,
    asked: str | None = None,
) -> _Draft:
    """The draft of a reply; `asked` is the prompt's text, where it is known."""
    _, word = end_of(tokenizer)
    text = text.removesuffix(word)
    check_ends(tokenizer, text, ends)
    asked = asked_text(tokenizer, prompt, arguments) if asked is None else asked
    if isinstance(prompt, str):
        return _Draft(asked, text)
    reply = {"role": "assistant", "content": text, **({"tool_calls": [*calls]} if calls else {})}
    written = rendered(tokenizer, [*prompt, reply], for_answer=False, arguments=arguments)
    rest = written.removeprefix(asked) if written.startswith(asked) else ""
    _check_calls(calls, rest)
    thought = None if sampled else opened_thought(asked)
    if thought is not None and not calls and not thought.is_rendered(text, rest):
        rest = _behind_thought(thought, asked, written, text)

    def body() -> str:
        shown = [*prompt, {"role": "assistant", "content": SHOWN}]
        _, is_shown, behind = rendered(tokenizer, shown, for_answer=False, arguments=arguments).rpartition(SHOWN)
        return (rest.removesuffix(behind) if is_shown else text) or text

    return _Draft(asked, rest, body, thought is not None and not thought.is_in(text))


def _check_calls(calls: Sequence[Mapping[str, Any]], rest: str) -> None:
    """Refuse a template that leaves calls out, or does not write them behind its prompt."""
    for call in calls:
        if call["function"]["name"] not in rest:
            raise ValueError(
                f"the chat template does not write the call of {call['function']['name']} behind its prompt: use a "
                "template that knows tools"
            )


def _tokens(
    tokenizer: PreTrainedTokenizerBase, draft: _Draft, ends: Collection[int], known: Known | None = None
) -> tuple[int, ...]:
    """The tokens of a reply, up to its first end token."""
    end, _ = end_of(tokenizer)
    reply = reply_tokens(tokenizer, draft.asked, draft.rest, known) if draft.rest else ()
    if draft.body is None:
        return (*reply, end)
    end_index = next((index for index, token in enumerate(reply) if token == end or token in ends), None)
    if end_index is not None:
        return reply[: end_index + 1]
    return (*reply_tokens(tokenizer, draft.asked, draft.body()), end)


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
    """True on the tokens that are learned, including end tokens: those of a completion, but not turns inside it."""
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
    for row, (number, _) in enumerate(completions):
        if (trained := items[number].trained) is not None:
            mask[row, : len(trained)] = torch.tensor(trained)
    return EncodedRows(
        prompts=tuple(item.prompt for item in items),
        tokens=tokens,
        lengths=lengths,
        mask=mask,
        group=torch.tensor([number for number, _ in completions]),
    )
