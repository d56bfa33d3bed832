"""One call of the embedded sampler: rows wait, decode in a slot, and leave it."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from proximo.models.compiling import compiles
from proximo.models.model_types import PreTrainedModel
from proximo.samplers.embedded.buffers import DecodeBuffers
from proximo.samplers.embedded.cuda_graphs import CapturedSteps, compiled_draw, size_for
from proximo.samplers.embedded.fused import decode_states
from proximo.samplers.embedded.paged import PagedCache, StoredRow
from proximo.samplers.embedded.prefill import ModelPasses, Prefills, Prompt
from proximo.samplers.partial import DIVERGED, PartialCompletion, TokenWriter
from proximo.samplers.rng import draw
from proximo.system.phases import is_watched, phase, phased

LOOK_EVERY = 16
"""Decode steps on a GPU between two checks by the host for rows that have ended."""


@dataclass(frozen=True)
class Paused:
    """A row that had to leave its slot because pages ran out."""

    partial: PartialCompletion
    count: int
    """Tokens drawn so far."""
    keys: StoredRow
    columns: list[Tensor]
    """Row of the decode table."""


class Decoding:
    def __init__(
        self,
        model: PreTrainedModel,
        writer: TokenWriter,
        partials: Sequence[PartialCompletion],
        buffers: DecodeBuffers,
        record_routes: bool,
        compiled: Callable[..., Tensor] | None,
    ) -> None:
        self._writer, self._record_routes = writer, record_routes
        self._waiting = deque(partials)
        self._waiting_for = Counter(partial.prompt for partial in partials)
        self._paused: deque[Paused] = deque()
        self._live: list[PartialCompletion] = []
        """The partial in each of the first slots."""
        self._counts: list[int] = []
        """Tokens that each of them has drawn."""
        self._buffers = buffers
        self._passes = ModelPasses(model, record_routes)
        by_hand = decode_states(model)
        self._prefills = Prefills(self._passes, by_hand)
        self._states = compiled or by_hand
        self._draw = compiled_draw() if compiles(model) else draw

    @property
    def done(self) -> bool:
        return not (self._live or self._waiting or self._paused)

    def until_some_end(self) -> list[PartialCompletion]:
        """Decode until partials have ended, and return those."""
        ended: list[PartialCompletion] = []
        while not ended and not self.done:
            self._put_back()
            while self._admit():
                ended += self._look()  # a first token may be the last
            if self._live:
                self._decode()
                ended += self._look()
        return ended

    # Rows that enter

    def add(self, partials: Sequence[PartialCompletion]) -> None:
        """Let more rows wait, behind those that do."""
        self._waiting.extend(partials)
        self._waiting_for.update(partial.prompt for partial in partials)

    @phased("admission")
    def _put_back(self) -> None:
        """Paused rows first: they have waited longest and keep their prompts in memory."""
        buffers = self._buffers
        while self._paused and len(self._live) < buffers.plan.slots:
            assert isinstance(buffers.cache, PagedCache)
            if not buffers.cache.fits(self._paused[0].keys):
                break
            row = self._paused.popleft()
            buffers.cache.restore(row.keys)
            buffers.table.restore(len(self._live), row.columns)
            self._live.append(row.partial)
            self._counts.append(row.count)
            buffers.cache.settle()

    @phased("admission")
    def _admit(self) -> bool:
        """Fill the free slots and draw the first token of the rows that entered; False where none did."""
        buffers, first = self._buffers, len(self._live)
        entering: dict[Prompt, list[PartialCompletion]] = {}
        for number in range(0 if self._paused else buffers.plan.slots - first):
            if not self._waiting or not buffers.cache.reserve(self._waiting[0].prompt, number):
                break
            partial = self._waiting.popleft()
            entering.setdefault(partial.prompt, []).append(partial)
        if not entering:
            return False
        logits = []
        # One batch of prompts after the other: each is in the cache before the next is read.
        for prompt, prefix in self._prefills.read(entering.keys()):
            siblings = entering[prompt]
            buffers.cache.enter(prompt, prefix.memory, count=len(siblings))
            for partial in siblings:
                partial.prompt_routes = prefix.routes
            self._live += siblings
            logits.append(prefix.logits.expand(len(siblings), -1))
            self._waiting_for[prompt] -= len(siblings)
            self._prefills.keep(prompt, prefix if self._waiting_for[prompt] else None)
        buffers.table.enter(self._live[first:], first)
        buffers.table.advance(first, torch.cat(logits), self._writer.options, buffers.ends)
        buffers.cache.settle()
        return True

    # Rows that decode

    def _decode(self) -> None:
        """Feed each live row its newest token, several times where the host need not look in between."""
        buffers, options = self._buffers, self._writer.options
        looks_later = self._passes.on_gpu and not self._record_routes
        steps = min(LOOK_EVERY, options.max_tokens - min(self._counts)) if looks_later else 1
        while not buffers.cache.grow([min(count - 1 + steps, options.max_tokens) for count in self._counts]):
            self._pause()
        longest = max(len(partial.prompt) for partial in self._live) + max(self._counts)
        for number in range(steps):
            if buffers.captured is None:
                self._step(len(self._live), longest + number)
            else:
                self._captured_step(buffers.captured, size_for(len(self._live), buffers.plan.slots))

    def _captured_step(self, captured: CapturedSteps, size: int) -> None:
        kind = size, replace(self._writer.options, stop=())  # strings are the host's business
        if not is_watched():
            captured.run(kind, partial(self._step, size, 0))
            return
        # The same kernels in two captured parts, so that a profile can tell them apart.
        with phase("decoding"):
            states = captured.run(size, partial(self._read, size, 0))
        with phase("head and draw"):
            captured.run((states.data_ptr(), *kind), partial(self._advance, states))

    def _step(self, rows: int, longest: int) -> None:
        with phase("decoding"):
            states = self._read(rows, longest)
        with phase("head and draw"):
            self._advance(states)

    def _read(self, rows: int, longest: int) -> Tensor:
        """Hidden states that the next tokens are drawn from."""
        buffers, table = self._buffers, self._buffers.table
        reader = buffers.cache.reader(rows, table, longest)
        tokens, positions = table.tokens[:rows].unsqueeze(1), table.positions(rows).unsqueeze(1)
        states, routes = self._passes.run(self._states, tokens, positions, reader)
        if routes is not None:
            for partial, route in zip(self._live, routes[:, 0], strict=True):
                partial.routes.append(route)
        return states

    def _advance(self, states: Tensor) -> None:
        logits = self._passes.logits(states[:, 0])
        self._buffers.table.advance(0, logits, self._writer.options, self._buffers.ends, self._draw)

    def _pause(self) -> None:
        """Store the row that has drawn least: it is the cheapest to move, and the last live row is never moved."""
        buffers = self._buffers
        assert isinstance(buffers.cache, PagedCache)
        assert len(self._live) > 1
        slot = min(range(len(self._live)), key=lambda slot: (self._counts[slot], -slot))
        self._paused.append(
            Paused(self._live[slot], self._counts[slot], buffers.cache.store(slot), buffers.table.store(slot))
        )
        self._release([slot])

    # Rows that leave

    @phased("looks at the host")
    def _look(self) -> list[PartialCompletion]:
        """See what has happened on the device; rows that have ended leave.

        The last live rows move into the holes, so that the first slots are all live.
        """
        buffers = self._buffers
        self._counts, unfinished, broken = buffers.table.look(len(self._live))
        if broken:
            raise ValueError(DIVERGED)
        reads = self._writer.reads  # only the host can
        due = [slot for slot, live in enumerate(unfinished) if reads or not live]
        if due:
            texts = zip(due, *buffers.table.texts(due, max(self._counts[slot] for slot in due)), strict=True)
            for slot, tokens, logprobs, entropies in texts:
                count = self._counts[slot]
                self._writer.take(self._live[slot], tokens[:count], logprobs[:count], entropies[:count])
        gone = [slot for slot, partial in enumerate(self._live) if partial.finish is not None]
        ended = [self._live[slot] for slot in gone]
        if gone:
            self._release(gone)
        return ended

    def _release(self, gone: list[int]) -> None:
        buffers = self._buffers
        left = len(self._live) - len(gone)
        leaving = set(gone)
        holes = [slot for slot in gone if slot < left]
        movers = [slot for slot in range(left, len(self._live)) if slot not in leaving]
        buffers.cache.release(gone, movers, holes, max((self._counts[slot] for slot in movers), default=0), left)
        buffers.table.release(movers, holes, left)
        for mover, hole in zip(movers, holes, strict=True):
            self._live[hole], self._counts[hole] = self._live[mover], self._counts[mover]
        del self._live[left:], self._counts[left:]
        buffers.cache.settle()
