"""Where a call decodes: a table of rows, their keys and values, and on a GPU the captured steps.

A GPU's room is kept for the next call.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec

import torch
from torch import Tensor
from transformers import PreTrainedModel

from proximo.models import free_bytes
from proximo.samplers.cache import KeyShape, SlotCache, key_shape
from proximo.samplers.captured import CapturedSteps
from proximo.samplers.shared import MAX_LANES, SharedCache
from proximo.samplers.table import DecodeTable, empty_table

MEMORY_SHARE = 0.6
"""Of a GPU's free memory, for keys and values at most: what is left is for the learner."""


@dataclass(frozen=True)
class BufferPlan:
    """How much room a call asks for."""

    slots: int
    prompts: int
    """Prompts whose samples live at the same time."""
    max_prompt_tokens: int
    max_tokens: int
    siblings: int
    """Samples of a prompt."""

    def tokens(self, *, shared: bool) -> int:
        """Whose keys are kept, prompts once or in every slot. The last token drawn is never read back, but a row that
        has ended goes on writing in its place, until somebody looks."""
        prompts = self.prompts if shared else self.slots
        return prompts * self.max_prompt_tokens + self.slots * self.max_tokens

    def with_slots(self, slots: int) -> "BufferPlan":
        return replace(self, slots=slots, prompts=min(self.prompts, slots))

    def joined(self, other: "BufferPlan") -> "BufferPlan":
        """Large enough for both."""
        return BufferPlan(*(max(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)))


def plan_for(rows: Counter[tuple[int, ...]], max_tokens: int, slots: int) -> BufferPlan:
    """`rows` counts the samples of each prompt."""
    slots = min(slots, rows.total())
    siblings = max(1, rows.total() // len(rows))
    # Siblings end at different times: room for twice the prompts that fill the slots, so that few wait for the last.
    prompts = min(len(rows), slots, 2 * -(-slots // siblings))
    return BufferPlan(slots, prompts, max(map(len, rows)), max_tokens, siblings)


@dataclass(frozen=True)
class DecodeBuffers:
    plan: BufferPlan
    table: DecodeTable
    cache: SlotCache | SharedCache
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

    @contextmanager
    def room(self, plan: BufferPlan, seed: int, step: int) -> Iterator[DecodeBuffers]:
        """A call's own until it ends: a second call in between gets another."""
        keeps = self._keeps and not self._lent
        with torch.inference_mode():
            room = self._kept_room(plan) if keeps else self._made(plan)
            room.table.begin(seed, step)
            room.cache.clear()
        self._lent = self._lent or keeps
        try:
            yield room
        finally:
            if keeps:
                self._lent = False

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
        shares = (on_gpu and has_kernels(shape)) or bool(self._shared_prefix)
        if on_gpu:
            plan = fitted(plan, int(free_bytes(shape.device) * MEMORY_SHARE) // shape.bytes_per_token, shared=shares)
        if shares:
            cache = SharedCache(
                shape, plan.prompts, plan.max_prompt_tokens, plan.slots, plan.max_tokens, self._members(plan, shape)
            )
        else:
            cache = SlotCache(shape, plan.max_prompt_tokens, plan.slots, plan.max_tokens)
        return DecodeBuffers(
            plan=plan,
            table=empty_table(plan.slots, plan.max_tokens, shape.device),
            cache=cache,
            ends=torch.tensor(self._ends, dtype=torch.long, device=shape.device),
            captured=CapturedSteps() if self._graphs and on_gpu and shares else None,
        )

    def _members(self, plan: BufferPlan, shape: KeyShape) -> int:
        """How many rows share a read of their prompt: a power of two."""
        if self._shared_prefix is False:
            return 1
        repeats = self._model.config.num_attention_heads // shape.heads
        most = 1 << (max(1, MAX_LANES // repeats).bit_length() - 1)
        return min(most, 1 << (plan.siblings - 1).bit_length())


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def has_kernels(shape: KeyShape) -> bool:
    """Whether our decode attention runs there: it is written in triton, for heads whose width is a power of two."""
    return find_spec("triton") is not None and shape.width >= 16 and shape.width & (shape.width - 1) == 0


def fitted(plan: BufferPlan, room: int, *, shared: bool) -> BufferPlan:
    """With fewer slots where there is room for `room` tokens only; prompts without a slot wait for one."""
    if plan.tokens(shared=shared) <= room:
        return plan
    slots = max((room - plan.prompts * plan.max_prompt_tokens) // plan.max_tokens, 0)
    if slots < plan.prompts or not shared:
        slots = room // (plan.max_prompt_tokens + plan.max_tokens)
    if slots < 1:
        raise ValueError(
            f"sampling.max_tokens is {plan.max_tokens} and prompts have up to {plan.max_prompt_tokens} tokens: the "
            f"keys of one completion do not fit into this GPU's free memory ({room} tokens); shorten one of the two"
        )
    return plan.with_slots(slots)
