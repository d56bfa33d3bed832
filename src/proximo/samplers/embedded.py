"""The embedded engine: the learner's own module decodes, so there are no weights to synchronise.

Each distinct prompt is read once. All live rows are decoded in one batch; a row that ends leaves its slot to one that
waits. On a GPU the steps are replayed as graphs, tokens are drawn and ends are seen there, and the host looks every
few steps.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.models.compiling import compiles
from proximo.models.packing.attention import uses_our_attention
from proximo.models.positions import check_requests
from proximo.models.routing import needed_routers
from proximo.samplers import RunSamplers, SamplingOptions, Stream, gathered
from proximo.samplers.buffers import BufferPool, DecodeBuffers, plan_for
from proximo.samplers.captured import compiled_draw, compiled_states, size_for
from proximo.samplers.drawing import draw
from proximo.samplers.fused import decode_states
from proximo.samplers.partial import DIVERGED, PartialCompletion, TokenWriter, end_tokens, evaluating, partials_of
from proximo.samplers.plain import PlainSampler
from proximo.samplers.prefill import ModelPasses, Prefills, Prompt
from proximo.types import Completion, Request

LOOK_EVERY = 16
"""Decode steps on a GPU between two checks by the host for rows that have ended."""


@dataclass(frozen=True)
class Embedded:
    """The policy's own module samples, in this process: there are no weights to keep in step."""

    copies: ClassVar[int] = 0

    def build(
        self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, slots: int, record_routes: bool
    ) -> RunSamplers:
        """One sampler for training and evaluation, so that they share buffers and captured steps; two where routes are
        recorded, which evaluation has no use for."""
        evaluation = local_sampler(policy, tokenizer, slots=slots)
        training = local_sampler(policy, tokenizer, slots=slots, record_routes=True) if record_routes else evaluation
        return RunSamplers(training, evaluation)


def local_sampler(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, slots: int = 128, record_routes: bool = False
) -> "EmbeddedSampler | PlainSampler":
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
        shared_prefix: bool | None = None,
        graphs: bool = True,
    ) -> None:
        """`slots` is the number of rows decoded at a time, at most.

        `record_routes`: whether completions carry the experts that each token went to, for a learner that replays them.
        `shared_prefix`: whether a prompt's keys are read once for several of its samples; None: where that is faster,
        which is on a GPU.
        `graphs`: whether decode steps on a GPU are captured as graphs and replayed.
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
        # Routes are collected by the host, step by step.
        self._ends = end_tokens(model, tokenizer)
        self._buffers = BufferPool(model, self._ends, shared_prefix=shared_prefix, graphs=graphs and not record_routes)

    @property
    def repeats(self) -> bool:
        return True

    def refresh(self, policy: PreTrainedModel, version: int) -> int:
        """Nothing to do: it decodes with the policy's own module."""
        assert policy is self._model, "the policy is another module than the one that is sampled"
        return version

    def sample(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> list[tuple[Completion, ...]]:
        return gathered(self.stream(requests, options, seed=seed, step=step, version=version), len(requests))

    def stream(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> Stream:
        partials = partials_of(requests)
        check_requests(self._model, requests, options.max_tokens)
        writer = TokenWriter(self._tokenizer, self._ends, options, seed, step)
        unfinished = {id(partial): number for number, siblings in enumerate(partials) for partial in siblings}
        left = Counter(unfinished.values())
        rows = [partial for siblings in partials for partial in siblings]
        if not rows:
            return
        plan = plan_for(Counter(partial.prompt for partial in rows), options.max_tokens, self._slots)
        compiled = compiled_states(self._model)  # first: weights may move, and kept buffers are for where they lie
        with self._buffers.room(plan, seed, step) as buffers:
            decoding = _Decoding(self._model, writer, rows, buffers, self._record_routes, compiled)
            while not decoding.done:
                # The caller may use the model between two groups, so it must not find it in our mode.
                with evaluating(self._model):
                    ended = decoding.go_on()
                for partial in ended:
                    number = unfinished[id(partial)]
                    left[number] -= 1
                    if not left[number]:
                        yield number, tuple(writer.completion(each, version) for each in partials[number])


class _Decoding:
    """One call: rows wait, live in a slot and leave it."""

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
        self._live: list[PartialCompletion] = []
        """The partial in slot i, for the first slots."""
        self._least = 0
        """What the live rows have drawn at least."""
        self._longest = 0
        """Prompt and completion of the longest."""
        self._buffers = buffers
        self._passes = ModelPasses(model, record_routes)
        by_hand = decode_states(model)
        self._prefills = Prefills(self._passes, by_hand)
        self._states = compiled or by_hand
        self._draw = compiled_draw() if compiles(model) else draw

    @property
    def done(self) -> bool:
        return not self._live and not self._waiting

    def go_on(self) -> list[PartialCompletion]:
        """Until partials have ended: those."""
        ended: list[PartialCompletion] = []
        while not ended and not self.done:
            while self._admit():
                ended += self._look()  # a first token may be the last
            if self._live:
                self._decode()
                ended += self._look()
        return ended

    # Rows that enter

    def _admit(self) -> bool:
        """Fill the free slots and draw the first token of who entered; False where nobody did."""
        buffers, first = self._buffers, len(self._live)
        entering: dict[Prompt, list[PartialCompletion]] = {}
        for _ in range(buffers.plan.slots - first):
            if not self._waiting or not buffers.cache.reserve(self._waiting[0].prompt):
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

    # Rows that go on

    def _decode(self) -> None:
        """Feed each live row its newest token, a few times where nobody needs to look in between."""
        buffers, options = self._buffers, self._writer.options
        left = options.max_tokens - self._least
        looks_later = self._passes.on_gpu and not self._record_routes
        for number in range(min(LOOK_EVERY, left) if looks_later else 1):
            if buffers.captured is None:
                self._step(len(self._live), self._longest + number)
            else:
                size = size_for(len(self._live), buffers.plan.slots)
                kind = size, replace(options, stop=())  # strings are the host's business
                buffers.captured.run(kind, partial(self._step, size, 0))

    def _step(self, rows: int, longest: int) -> None:
        buffers, table = self._buffers, self._buffers.table
        reader = buffers.cache.reader(rows, table, longest)
        tokens, positions = table.tokens[:rows].unsqueeze(1), table.positions(rows).unsqueeze(1)
        states, routes = self._passes.run(self._states, tokens, positions, reader)
        if routes is not None:
            for partial, route in zip(self._live, routes[:, 0], strict=True):
                partial.routes.append(route)
        table.advance(0, self._passes.logits(states[:, 0]), self._writer.options, buffers.ends, self._draw)

    # Rows that leave

    def _look(self) -> list[PartialCompletion]:
        """What has happened on the device; finished rows leave.

        The last live rows move into the holes, so that the first slots are all live.
        """
        buffers = self._buffers
        counts, goes_on, broken = buffers.table.look(len(self._live))
        if broken:
            raise ValueError(DIVERGED)
        reads = bool(self._writer.options.stop)  # only the host can read
        due = [slot for slot, on in enumerate(goes_on) if reads or not on]
        if due:
            texts = zip(due, *buffers.table.texts(due, max(counts[slot] for slot in due)), strict=True)
            for slot, tokens, logprobs, entropies in texts:
                count = counts[slot]
                self._writer.take(self._live[slot], tokens[:count], logprobs[:count], entropies[:count])
        gone = [slot for slot, partial in enumerate(self._live) if partial.finish is not None]
        ended = [self._live[slot] for slot in gone]
        if gone:
            self._release(gone, counts)
        leaves = set(gone)
        stays = [count for slot, count in enumerate(counts) if slot not in leaves]
        self._least = min(stays, default=0)
        self._longest = max((len(d.prompt) for d in self._live), default=0) + max(stays, default=0)
        return ended

    def _release(self, gone: list[int], counts: list[int]) -> None:
        buffers = self._buffers
        left = len(self._live) - len(gone)
        leaving = set(gone)
        holes = [slot for slot in gone if slot < left]
        movers = [slot for slot in range(left, len(self._live)) if slot not in leaving]
        buffers.cache.release(gone, movers, holes, max((counts[slot] for slot in movers), default=0), left)
        buffers.table.release(movers, holes, left)
        for mover, hole in zip(movers, holes, strict=True):
            self._live[hole] = self._live[mover]
        del self._live[left:]
        buffers.cache.settle()
