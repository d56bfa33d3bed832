"""The embedded engine: the learner's own module decodes, so there are no weights to synchronise.

Each distinct prompt is read once and its keys and values copied to the slots of its samples. All live rows
are decoded in one batch; a row that ends leaves its slot to one that waits.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.models.attention import Reader, hidden_states, uses_our_attention
from proximo.models.logprobs import project
from proximo.models.routing import needed_routers, recording
from proximo.samplers import Sampler, SamplingOptions
from proximo.samplers.cache import Cache, PrefillReader, decode_reader
from proximo.samplers.drafts import Draft, Pen, drafts_of, end_tokens, evaluating
from proximo.samplers.plain import PlainSampler
from proximo.shapes import Float, Int
from proximo.types import Completion, Request

PREFILL_TOKENS = 8192
"""Prompts are read in batches of about this many tokens, padding included: enough to keep a device busy."""

Prompt = tuple[int, ...]


def local_sampler(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, slots: int = 128, record_routes: bool = False
) -> Sampler:
    """The engine of this process that fits the model."""
    fits = EmbeddedSampler if uses_our_attention(model) else PlainSampler
    return fits(model, tokenizer, slots=slots, record_routes=record_routes)


class EmbeddedSampler:
    """Samples from a model of this process, which may be in training.

    Equal calls give bit-equal tokens. A row among other rows draws the same random numbers, and its logits
    differ only by the rounding of a matrix product of another size.

    Example:
        sampler = EmbeddedSampler(model, tokenizer)
        [completions] = sampler.sample([Request(0, (17, 12), 8)], SamplingOptions(max_tokens=64), seed=0, step=0)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        slots: int = 128,
        record_routes: bool = False,
    ) -> None:
        """`slots` is the most rows decoded at a time; each holds keys and values of the longest prompt + max_tokens.

        With `record_routes` completions say which experts each token went to, for a learner that replays them.
        """
        if not uses_our_attention(model):
            raise ValueError(f"model is a {type(model).__name__} outside the fast path: sample with PlainSampler")
        if slots < 1:
            raise ValueError(f"slots is {slots}: give at least 1")
        if record_routes:
            needed_routers(model, "record_routes is on")
        self._record_routes = record_routes
        self._model = model
        self._tokenizer = tokenizer
        self._slots = slots

    def sample(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> list[tuple[Completion, ...]]:
        drafts = drafts_of(requests)
        self._check_room(requests, options)
        pen = Pen(self._tokenizer, end_tokens(self._model, self._tokenizer), options, seed, step)
        with evaluating(self._model):
            rows = [draft for siblings in drafts for draft in siblings]
            _Decoding(self._model, pen, rows, self._slots, self._record_routes).run()
        return [tuple(pen.completion(draft, version) for draft in siblings) for siblings in drafts]

    def _check_room(self, requests: Sequence[Request], options: SamplingOptions) -> None:
        room = self._model.config.max_position_embeddings
        for number, request in enumerate(requests):
            if len(request.prompt_tokens) + options.max_tokens > room:
                raise ValueError(
                    f"requests[{number}] has {len(request.prompt_tokens)} prompt tokens, and max_tokens is "
                    f"{options.max_tokens}: the model has {room} positions, shorten one of the two"
                )


@dataclass(frozen=True)
class _Prefix:
    """A prompt that has been read."""

    memory: Float[Tensor, "N 2 K S D"]
    logits: Float[Tensor, " V"]
    """Of the first token after it."""
    routes: Int[Tensor, "S L C"] | None
    """The C experts of each of L layers that its tokens went to, where that is recorded."""


class _Decoding:
    """One call: rows wait, live in a slot and leave it."""

    def __init__(
        self, model: PreTrainedModel, pen: Pen, drafts: Sequence[Draft], slots: int, record_routes: bool
    ) -> None:
        self._model = model
        self._record_routes = record_routes
        self._pen = pen
        self._slots = min(slots, len(drafts))
        # The last token drawn is never read back, so it needs no room.
        self._length = max((len(draft.prompt) for draft in drafts), default=0) + pen.options.max_tokens - 1
        self._waiting = deque(drafts)
        self._waiting_for = Counter(draft.prompt for draft in drafts)
        self._live: list[Draft] = []
        """The draft in slot i, for the first slots."""
        self._prefixes: dict[Prompt, _Prefix] = {}
        """Prompts of which samples still wait."""
        self._cache: Cache | None = None
        head = model.get_output_embeddings()
        assert isinstance(head, torch.nn.Linear)
        # The models of the fast path have none, and the learner's log-probs know of none.
        assert head.bias is None
        self._head = head.weight

    def run(self) -> None:
        while self._live or self._waiting:
            logits = self._admit(self._decode())
            self._pen.write(self._live, logits)
            self._release()

    def _decode(self) -> Float[Tensor, "R V"]:
        """Feed each live row its newest token."""
        if not self._live:
            return torch.empty(0, len(self._head), device=self._head.device, dtype=torch.float32)
        assert self._cache is not None
        newest = [[draft.tokens[-1], draft.length - 1] for draft in self._live]
        tokens, positions = torch.tensor(newest, device=self._head.device).unbind(dim=1)
        reader = decode_reader(self._cache, positions, longest=max(draft.length for draft in self._live))
        states, routes = self._pass(tokens.unsqueeze(1), positions.unsqueeze(1), reader)
        if routes is not None:
            for draft, route in zip(self._live, routes[:, 0], strict=True):
                draft.routes.append(route)
        return self._logits(states[:, 0])

    def _pass(
        self, tokens: Int[Tensor, "R S"], positions: Int[Tensor, "R S"], reader: Reader
    ) -> tuple[Float[Tensor, "R S E"], Int[Tensor, "R S L K"] | None]:
        """Hidden states and, where they are recorded, the experts that each token went to."""
        if not self._record_routes:
            return hidden_states(self._model, tokens, positions, reader), None
        with recording(self._model) as recorder:
            states = hidden_states(self._model, tokens, positions, reader)
        return states, recorder.chosen.cpu().unflatten(0, tuple(tokens.shape))

    def _admit(self, logits: Float[Tensor, "R V"]) -> Float[Tensor, "S V"]:
        """Fill the free slots; the logits of the rows that entered come last."""
        free = min(self._slots - len(self._live), len(self._waiting))
        if free == 0:
            return logits
        entering = [self._waiting.popleft() for _ in range(free)]
        self._prefill({draft.prompt for draft in entering} - self._prefixes.keys())
        rows = [logits]
        for prompt, neighbours in groupby(entering, key=lambda draft: draft.prompt):
            prefix, siblings = self._prefixes[prompt], list(neighbours)
            if self._cache is None:
                self._cache = Cache(prefix.memory, self._slots, self._length)
            self._cache.enter(prefix.memory, first=len(self._live), count=len(siblings))
            for draft in siblings:
                draft.prompt_routes = prefix.routes
            self._live += siblings
            rows.append(prefix.logits.expand(len(siblings), -1))
            self._waiting_for[prompt] -= len(siblings)
            if not self._waiting_for[prompt]:
                del self._prefixes[prompt]
        return torch.cat(rows)

    def _prefill(self, prompts: set[Prompt]) -> None:
        """Read each prompt once."""
        for batch in _batches(prompts):
            lengths = torch.tensor([len(prompt) for prompt in batch])
            tokens = torch.zeros(len(batch), int(lengths.max()), dtype=torch.int64)
            for row, prompt in zip(tokens, batch, strict=True):
                row[: len(prompt)] = torch.tensor(prompt)
            tokens = tokens.to(self._head.device)
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            reader = PrefillReader()
            states, routes = self._pass(tokens, positions, reader)
            logits = self._logits(states[torch.arange(len(batch)), lengths - 1])
            memory = reader.memory
            for row, prompt in enumerate(batch):
                known = None if routes is None else routes[row, : len(prompt)]
                self._prefixes[prompt] = _Prefix(memory[:, :, row, :, : len(prompt)], logits[row], known)

    def _logits(self, states: Float[Tensor, "R E"]) -> Float[Tensor, "R V"]:
        # The learner's own product: the same float32 logits, whatever the model's precision.
        return project(states, self._head.T)

    def _release(self) -> None:
        """Finished rows leave; the last live rows move into the holes, so that the first slots are all live."""
        live = [draft.finish is None for draft in self._live]
        left = sum(live)
        if left == len(live):
            return
        assert self._cache is not None
        holes = [slot for slot in range(left) if not live[slot]]
        movers = [slot for slot in range(left, len(live)) if live[slot]]
        self._cache.move(movers, holes, max((self._live[slot].length for slot in movers), default=0))
        for mover, hole in zip(movers, holes, strict=True):
            self._live[hole] = self._live[mover]
        del self._live[left:]


def _batches(prompts: set[Prompt]) -> Iterator[list[Prompt]]:
    """Prompts of similar length together, padded to at most about `PREFILL_TOKENS`."""
    batch: list[Prompt] = []
    # The prompt itself breaks ties: a set has no order, and equal calls must batch alike.
    for prompt in sorted(prompts, key=lambda prompt: (len(prompt), prompt)):
        if batch and (len(batch) + 1) * len(prompt) > PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch
