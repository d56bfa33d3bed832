"""Memory in which a call decodes: a table of rows, their keys and values, and on a GPU the captured steps.

A GPU's room is kept for the next call.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec

import torch
from torch import Tensor

from proximo.models import free_bytes
from proximo.models.model_types import PreTrainedModel
from proximo.samplers.embedded.attention import PAGE, pages_for
from proximo.samplers.embedded.cache import KeyShape, SlotCache, aligned, key_shape
from proximo.samplers.embedded.cuda_graphs import CapturedSteps
from proximo.samplers.embedded.paged import MAX_LANES, PagedCache
from proximo.samplers.embedded.row_state import DecodeTable, empty_table

MEMORY_SHARE = 0.6
"""Share of a GPU's free memory for keys and values at most: what is left is for the learner."""
TRAINING_BYTES = 12
"""Bytes for each weight that is trained: a gradient and two moments in float32, which come with the first update."""
SPARE_PAGES = 1.25
"""Pages that are kept for each page that a call needed at most."""
LARGE = 2**30
"""Bytes of pages below which none are given back."""
MAX_WIDTH = 256
"""Head width up to which our decode attention fits into a multiprocessor's memory."""


@dataclass(frozen=True)
class BufferPlan:
    """Room that a call asks for."""

    slots: int
    prompts: int
    """Prompts whose samples live at the same time."""
    max_prompt_tokens: int
    max_tokens: int
    siblings: int
    """Samples of a prompt."""

    @property
    def pages(self) -> int:
        """Pages that all rows need at their longest, with each prompt once."""
        return self.prompts * pages_for(self.max_prompt_tokens) + self.slots * pages_for(self.max_tokens)

    def joined(self, other: "BufferPlan") -> "BufferPlan":
        """Large enough for both."""
        return BufferPlan(*(max(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)))


def plan_for(rows: Counter[tuple[int, ...]], max_tokens: int, slots: int) -> BufferPlan:
    """`rows` counts the samples of each prompt."""
    return plan_of(len(rows), rows.total(), max(map(len, rows)), max_tokens, slots)


def plan_of(prompts: int, rows: int, max_prompt_tokens: int, max_tokens: int, slots: int) -> BufferPlan:
    """Plan for `rows` samples of `prompts` different prompts, in at most `slots` slots."""
    slots, siblings = min(slots, rows), max(1, rows // prompts)
    # Siblings end at different times: room for twice the prompts that fill the slots, so that few wait for the last.
    held = min(prompts, slots, 2 * -(-slots // siblings))
    return BufferPlan(slots, held, max_prompt_tokens, max_tokens, siblings)


def roomy(plan: BufferPlan, slots: int) -> BufferPlan:
    """The plan with all slots, and room for prompts that are somewhat longer, for requests that come later."""
    prompt = aligned(plan.max_prompt_tokens * 5 // 4)
    prompts = -(-2 * slots // plan.siblings)
    return plan.joined(plan_of(prompts, prompts * plan.siblings, prompt, plan.max_tokens, slots))


@dataclass(frozen=True)
class DecodeBuffers:
    plan: BufferPlan
    table: DecodeTable
    cache: SlotCache | PagedCache
    ends: Tensor
    """The tokens that end a completion."""
    captured: CapturedSteps | None


class BufferPool:
    """Makes rooms for one model's calls; on a GPU the last one is used again where it fits."""

    def __init__(
        self, model: PreTrainedModel, ends: frozenset[int], *, shared_prefix: bool | None, graphs: bool
    ) -> None:
        self._model, self._ends = model, sorted(ends)
        self._shared_prefix, self._graphs = shared_prefix, graphs
        self._kept: tuple[DecodeBuffers, BufferPlan, tuple[int, ...]] | None = None
        """With what was asked for, of which memory may have left less, and where the weights lay."""
        self._lent = False
        self._needs: dict[BufferPlan, int] = {}
        """Pages that calls of a plan turned out to need."""

    @contextmanager
    def borrow(self, plan: BufferPlan, seed: int, step: int) -> Iterator[DecodeBuffers]:
        """Buffers for one call until it ends; a second call in between gets others."""
        keeps = self._keeps and not self._lent
        with torch.inference_mode():
            room = self._kept_room(plan) if keeps else self._made(plan)
            room.table.begin(seed, step)
            room.cache.clear()
        self._lent = self._lent or keeps
        learns = keeps
        try:
            yield room
        except GeneratorExit:  # the caller has enough: what was needed is known all the same
            raise
        except BaseException:
            learns = False
            raise
        finally:
            if keeps:
                self._lent = False
            if learns:
                self._learn(room.cache)

    @property
    def pages(self) -> int:
        """Pages kept for the next call; 0 where none are."""
        cache = None if self._kept is None else self._kept[0].cache
        return cache.pages if isinstance(cache, PagedCache) else 0

    def _learn(self, cache: SlotCache | PagedCache) -> None:
        """Keep as many pages as a call needed, with some to spare: rows are rarely all at their longest, and what is
        left is the learner's. The change is made at once, so that the learner's plan of its own memory counts on it."""
        assert self._kept is not None
        _, asked, addresses = self._kept
        if not isinstance(cache, PagedCache):
            return
        if cache.has_stored:
            wanted = 2 * cache.pages
            if wanted <= self._needs.get(asked, 0):  # there was no memory for more
                return
        else:
            wanted = fewer_pages(cache.pages, cache.pages - cache.least_free, cache.bytes)
            if wanted is None:
                return
        self._needs[asked], self._kept = wanted, None
        cache.free()  # the caller still holds the cache; its memory is for the new one
        with torch.inference_mode():
            self._kept = self._made(asked), asked, addresses

    @property
    def _keeps(self) -> bool:
        return is_gpu(self._model.device)

    def _kept_room(self, plan: BufferPlan) -> DecodeBuffers:
        # Captured steps read the weights where they lay.
        addresses = tuple(parameter.data_ptr() for parameter in self._model.parameters())
        if self._kept is not None:
            room, asked, lay = self._kept
            # Evaluation with its many prompts would make training's steps slower: they do not share.
            if asked.siblings == plan.siblings:
                plan = plan.joined(asked)
            if lay == addresses and plan == asked:
                return room
            self._kept = None  # before the new one takes its memory
            del room
        self._kept = self._made(plan), plan, addresses
        return self._kept[0]

    def _made(self, plan: BufferPlan) -> DecodeBuffers:
        shape = key_shape(self._model)
        on_gpu = is_gpu(shape.device)
        paged = (on_gpu and has_kernels(shape)) or bool(self._shared_prefix)
        room = self._room(shape) if on_gpu else None
        if paged:
            plan, pages = with_pages(plan, None if room is None else room // PAGE, self._needs.get(plan))
            cache = PagedCache(
                shape,
                pages,
                plan.prompts,
                plan.max_prompt_tokens,
                plan.slots,
                plan.max_tokens,
                self._members(plan, shape),
            )
        else:
            plan = plan if room is None else with_slots(plan, room)
            cache = SlotCache(shape, plan.max_prompt_tokens, plan.slots, plan.max_tokens)
        return DecodeBuffers(
            plan=plan,
            table=empty_table(plan.slots, plan.max_tokens, shape.device),
            cache=cache,
            ends=torch.tensor(self._ends, dtype=torch.long, device=shape.device),
            captured=CapturedSteps() if self._graphs and on_gpu and paged else None,
        )

    def _room(self, shape: KeyShape) -> int:
        """Tokens whose keys and values there is memory for, after what training the model has not taken yet."""
        trained = sum(each.numel() for each in self._model.parameters() if each.requires_grad and each.grad is None)
        return room_for_keys(free_bytes(shape.device), trained) // shape.bytes_per_token

    def _members(self, plan: BufferPlan, shape: KeyShape) -> int:
        """Number of rows that share a read of their prompt: a power of two."""
        if self._shared_prefix is False:
            return 1
        repeats = self._model.config.num_attention_heads // shape.heads
        limit = 1 << (max(1, MAX_LANES // repeats).bit_length() - 1)
        return min(limit, 1 << (plan.siblings - 1).bit_length())


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def has_kernels(shape: KeyShape) -> bool:
    """True if our decode attention runs there: it is written in triton."""
    return find_spec("triton") is not None and shape.width <= MAX_WIDTH and shape.dtype != torch.float64


def room_for_keys(free: int, trained: int) -> int:
    """Bytes for keys and values out of `free` ones, where `trained` weights have no gradient and moments yet."""
    # With no room for the training either, that run ends where it trains, and with a better message.
    return int(max(free - TRAINING_BYTES * trained, free // 4) * MEMORY_SHARE)


def fewer_pages(pages: int, needed: int, size: int) -> int | None:
    """Number of pages to keep of those that take `size` bytes, after a call that needed so many at most; None: all."""
    wanted = int(SPARE_PAGES * needed) + 1
    return wanted if pages > 2 * wanted and size > LARGE else None


def with_pages(plan: BufferPlan, room: int | None, needed: int | None = None) -> tuple[BufferPlan, int]:
    """The plan, and its number of pages: at most `room` and about `needed`, where these are given.

    Rows take pages as they grow, so that fewer pages than all rows need at their longest do not mean fewer slots. One
    row at its longest must fit together with the prompts that are in memory.
    """
    prompt, row = pages_for(plan.max_prompt_tokens), pages_for(plan.max_tokens)
    pages = plan.pages if needed is None else min(plan.pages, max(needed, plan.prompts * prompt + row))
    if room is None or pages <= room:
        return plan, pages
    prompts = min(plan.prompts, (room - row) // prompt)
    if prompts < 1:
        raise _too_little(plan, room * PAGE)
    return replace(plan, prompts=prompts), room


def with_slots(plan: BufferPlan, room: int) -> BufferPlan:
    """The plan with no more slots than `room` tokens are enough for, each slot with room for the longest row."""
    slots = room // (plan.max_prompt_tokens + plan.max_tokens)
    if slots < 1:
        raise _too_little(plan, room)
    return replace(plan, slots=min(plan.slots, slots), prompts=min(plan.prompts, slots))


def _too_little(plan: BufferPlan, room: int) -> ValueError:
    return ValueError(
        f"sampling.max_tokens is {plan.max_tokens} and prompts have up to {plan.max_prompt_tokens} tokens: the "
        f"keys of one completion do not fit into this GPU's free memory ({room} tokens); shorten one of the two"
    )
