"""Where a call decodes: a table of rows, their keys and values, and on a GPU the captured steps.

A GPU's room is kept for the next call.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec

import torch
from torch import Tensor
from transformers import PreTrainedModel

from proximo.samplers.cache import KeyShape, SlotCache, key_shape
from proximo.samplers.graphs import Replays
from proximo.samplers.shared import MOST_LANES, SharedCache
from proximo.samplers.table import Table, empty_table

MEMORY_SHARE = 0.6
"""Of a GPU's free memory, for keys and values at most: what is left is for the learner."""


@dataclass(frozen=True)
class Plan:
    """How much room a call asks for."""

    slots: int
    prompts: int
    """Prompts whose samples live at the same time."""
    prompt_room: int
    max_tokens: int
    siblings: int
    """Samples of a prompt."""

    @property
    def own_room(self) -> int:
        """The last token drawn is never read back, so it needs no room."""
        return max(self.max_tokens - 1, 1)

    @property
    def tokens(self) -> int:
        """With keys shared by siblings."""
        return self.prompts * self.prompt_room + self.slots * self.own_room

    def joined(self, other: "Plan") -> "Plan":
        """Room enough for both."""
        return Plan(*(max(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)))


def plan_for(rows: Counter[tuple[int, ...]], max_tokens: int, slots: int) -> Plan:
    """`rows` counts the samples of each prompt."""
    slots = min(slots, rows.total())
    siblings = max(1, rows.total() // len(rows))
    # Siblings end at different times: room for twice the prompts that fill the slots, so that few wait for the last.
    prompts = min(len(rows), slots, 2 * -(-slots // siblings))
    return Plan(slots, prompts, max(map(len, rows)), max_tokens, siblings)


@dataclass(frozen=True)
class Room:
    plan: Plan
    table: Table
    cache: SlotCache | SharedCache
    ends: Tensor
    """The tokens that end a completion."""
    replays: Replays | None


class Rooms:
    """Makes rooms for one model's calls; on a GPU the last one is used again where it is large enough."""

    def __init__(
        self, model: PreTrainedModel, ends: frozenset[int], *, shared_prefix: bool | None, graphs: bool
    ) -> None:
        self._model, self._ends = model, sorted(ends)
        self._shared_prefix, self._graphs = shared_prefix, graphs
        self._kept: tuple[Room, tuple[int, ...]] | None = None
        self._asked: Plan | None = None
        """What all calls so far would have fitted into: training and evaluation take turns, and neither must make
        the other's steps be captured anew."""

    def room(self, plan: Plan, seed: int, step: int) -> Room:
        room = self._found(plan)
        room.table.begin(seed, step)
        room.cache.clear()
        return room

    def _found(self, plan: Plan) -> Room:
        shape = key_shape(self._model)
        if shape.device.type != "cuda":
            return self._made(plan, shape)
        # Captured steps read the weights where they lay.
        addresses = tuple(parameter.data_ptr() for parameter in self._model.parameters())
        asked = plan if self._asked is None else plan.joined(self._asked)
        if self._kept is None or self._kept[1] != addresses or asked != self._asked:
            self._kept = None  # before the new one takes its memory
            self._kept = self._made(_fitted(asked, shape), shape), addresses
            self._asked = asked
        return self._kept[0]

    def _made(self, plan: Plan, shape: KeyShape) -> Room:
        on_gpu = shape.device.type == "cuda"
        if (on_gpu and has_kernels(shape)) or self._shared_prefix:
            repeats = self._model.config.num_attention_heads // shape.heads
            siblings = 1 if self._shared_prefix is False else min(plan.siblings, max(1, MOST_LANES // repeats))
            members = 1 << (siblings - 1).bit_length()
            cache = SharedCache(shape, plan.prompts, plan.prompt_room, plan.slots, plan.own_room, members)
        else:
            cache = SlotCache(shape, plan.prompt_room, plan.slots, plan.own_room)
        captures = self._graphs and on_gpu and isinstance(cache, SharedCache)
        return Room(
            plan=plan,
            table=empty_table(plan.slots, plan.max_tokens, shape.device),
            cache=cache,
            ends=torch.tensor(self._ends, dtype=torch.long, device=shape.device),
            replays=Replays() if captures else None,
        )


def has_kernels(shape: KeyShape) -> bool:
    """Whether our decode attention runs there: it is written in triton, for heads whose width is a power of two."""
    return find_spec("triton") is not None and shape.width >= 16 and shape.width & (shape.width - 1) == 0


def _fitted(plan: Plan, shape: KeyShape, free: Callable[[], int] | None = None) -> Plan:
    """With fewer slots where memory asks for it."""
    room = (free or _free_memory)() * MEMORY_SHARE / shape.bytes_per_token
    for_rows = room - plan.prompts * plan.prompt_room
    slots = int(for_rows // plan.own_room)
    if slots >= plan.slots:
        return plan
    if slots < 1:
        raise ValueError(
            f"sampling.max_tokens is {plan.max_tokens} and prompts have up to {plan.prompt_room} tokens: the keys of "
            f"{plan.prompts} prompts and one completion do not fit into this GPU's free memory; shorten one of the two"
        )
    return replace(plan, slots=slots)


def _free_memory() -> int:
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
