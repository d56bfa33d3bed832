"""Keys and values in pages: memory follows what rows hold, and the pages of a prompt are shared by all its samples.

A row that moves to another slot takes its pages along without copying them. Where pages run out, a row is stored in the
host's memory and put back later, with the same keys and values.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.samplers.embedded.attention import (
    PAGE,
    Kernels,
    Layers,
    PagedReader,
    Spans,
    pages_for,
    plain_attention,
    plan_spans,
)
from proximo.samplers.embedded.cache import KeyShape
from proximo.samplers.embedded.row_state import DecodeTable
from proximo.types.tensor_types import Float

Prompt = tuple[int, ...]
MAX_LANES = 64
"""Queries that one unit holds for each key-value head: what a matrix unit likes."""
SPARE_PAGE = 0
"""Page of slots without a row: captured steps write there what their last rows compute."""


@dataclass(frozen=True)
class StoredRow:
    """Keys and values of a row in the host's memory."""

    prompt: Prompt
    sides: list[Float[Tensor, "N K S D"]]
    """Pages of the row, of each layer's keys and values."""

    @property
    def pages(self) -> int:
        return len(self.sides[0])


class PagedCache:
    """Pages for Q prompts of at most P tokens and S rows of at most R tokens of their own."""

    def __init__(
        self, shape: KeyShape, pages: int, prompts: int, max_prompt_tokens: int, slots: int, room: int, members: int
    ) -> None:
        """`members` is how many rows share a read of their prompt, 1 for none."""
        assert pages >= pages_for(max_prompt_tokens) + pages_for(room), "one row at its longest must fit"
        self._shape, self.pages, self._prompts, self._members = shape, pages, prompts, members
        self._row_room = pages_for(room)
        self._layers: Layers = [(self._side(pages + 1), self._side(pages + 1)) for _ in range(shape.layers)]
        self._prompt_pages = _Mirrored(prompts, pages_for(max_prompt_tokens), shape.device)
        self._prompt_lengths = torch.zeros(prompts, dtype=torch.int32, device=shape.device)
        self._row_pages = _Mirrored(slots, pages_for(room), shape.device)
        units = self._units(slots)
        self._unit_prompt = torch.full((units,), -1, dtype=torch.int32, device=shape.device)
        self._unit_rows = torch.full((units, members), -1, dtype=torch.int32, device=shape.device)
        self._row_seats = torch.full((slots,), -1, dtype=torch.int32, device=shape.device)
        self._kernels = _kernels(shape.device)
        self.clear()

    def _side(self, pages: int) -> Float[Tensor, "N K S D"]:
        # Zeros: plain attention multiplies what lies behind a row's end by 0, so it must not be NaN.
        shape = (pages, self._shape.heads, PAGE, self._shape.width)
        return torch.zeros(shape, dtype=self._shape.dtype, device=self._shape.device)

    def clear(self) -> None:
        """Free all pages."""
        self._free = list(range(self.pages, SPARE_PAGE, -1))
        self.least_free = len(self._free)
        self.has_stored = False
        """True if a row had to be stored since then."""
        self._held: dict[Prompt, tuple[int, list[int]]] = {}
        """Row in the table of prompts, and pages, of each prompt in memory."""
        self._users: Counter[Prompt] = Counter()
        """Live and stored rows of each prompt."""
        self._slots: list[Prompt] = []
        """The prompt of each live slot."""
        self._slot_pages: list[list[int]] = []
        """The pages of each live slot."""
        self._row_pages.clear()

    def free(self) -> None:
        """Give the memory back; nothing can be read or written any more."""
        self._layers.clear()

    @property
    def bytes(self) -> int:
        return self.pages * PAGE * self._shape.bytes_per_token

    # Rows that enter

    def reserve(self, prompt: Prompt, entering: int) -> bool:
        """True if one more row of a prompt fits, with a page for each live row and for those that are entering."""
        taken = self._held.get(prompt)
        needed = 0 if taken else pages_for(len(prompt))
        if len(self._free) < needed + len(self._slots) + entering + 1 or (
            not taken and len(self._held) == self._prompts
        ):
            return False
        if not taken:
            number = min(set(range(self._prompts)) - {number for number, _ in self._held.values()})
            self._held[prompt] = number, self._take(needed)
        return True

    def enter(self, prompt: Prompt, prefix: Float[Tensor, "N 2 K T D"], *, count: int) -> None:
        """Add rows of a prompt behind the live ones."""
        number, pages = self._held[prompt]
        if not self._users[prompt]:
            whole, rest = divmod(len(prompt), PAGE)
            for layer, read in zip(self._layers, prefix, strict=True):
                for side, its in zip(layer, read, strict=True):
                    parts = its[:, : whole * PAGE].unflatten(1, (whole, PAGE)).transpose(0, 1) if whole else None
                    if parts is not None:
                        side[pages[:whole]] = parts
                    if rest:
                        side[pages[whole], :, :rest] = its[:, whole * PAGE :]
            self._prompt_pages.write(number, pages)
            self._prompt_lengths[number] = len(prompt)
        self._users[prompt] += count
        self._slots += [prompt] * count
        self._slot_pages += [[] for _ in range(count)]

    def grow(self, needs: Sequence[int]) -> bool:
        """Give live rows pages for this many own tokens each; False, and nothing given, where there are too few."""
        missing = [max(pages_for(need) - len(pages), 0) for need, pages in zip(needs, self._slot_pages, strict=True)]
        if sum(missing) > len(self._free):
            return False
        for slot, count in enumerate(missing):
            if count:
                self._slot_pages[slot] += self._take(count)
                self._row_pages.write(slot, self._slot_pages[slot])
        self._row_pages.upload()
        self._prompt_pages.upload()
        return True

    # Rows that leave, for good or for a while

    def release(
        self, gone: Sequence[int], sources: Sequence[int], targets: Sequence[int], own_tokens: int, left: int
    ) -> None:
        """Rows leave, others move into holes, and the first `left` slots stay live."""
        for slot in gone:
            prompt = self._slots[slot]
            self._free += self._slot_pages[slot]
            self._users[prompt] -= 1
            if not self._users[prompt]:
                del self._users[prompt]
                self._free += self._held.pop(prompt)[1]
        assert not set(sources) & set(targets)
        for source, target in zip(sources, targets, strict=True):
            self._slots[target], self._slot_pages[target] = self._slots[source], self._slot_pages[source]
            self._row_pages.write(target, self._slot_pages[target])
        self._row_pages.clear(left)
        del self._slots[left:], self._slot_pages[left:]

    def store(self, slot: int) -> StoredRow:
        """Copy a row to the host's memory, before it is released; its prompt stays."""
        prompt, pages = self._slots[slot], self._slot_pages[slot]
        self._users[prompt] += 1
        self.has_stored = True
        return StoredRow(prompt, [side[pages].cpu() for layer in self._layers for side in layer])

    def fits(self, row: StoredRow) -> bool:
        """True if a stored row can be put back, with a page for its next tokens and for those of each live row."""
        return len(self._free) >= min(row.pages + 1, self._row_room) + len(self._slots)

    def restore(self, row: StoredRow) -> None:
        """Put a stored row behind the live ones."""
        pages = self._take(row.pages)
        sides = iter(row.sides)
        for layer in self._layers:
            for side in layer:
                side[pages] = next(sides).to(side.device)
        self._slots.append(row.prompt)
        self._slot_pages.append(pages)
        self._row_pages.write(len(self._slot_pages) - 1, pages)

    def _take(self, count: int) -> list[int]:
        taken = [self._free.pop() for _ in range(count)]
        self.least_free = min(self.least_free, len(self._free))
        return taken

    # Reading

    def settle(self) -> None:
        """Write down which rows share a prompt; once after rows came or went."""
        siblings: dict[int, list[int]] = {}
        for slot, prompt in enumerate(self._slots):
            siblings.setdefault(self._held[prompt][0], []).append(slot)
        lines: list[list[int]] = []
        seats = [-1] * len(self._row_seats)
        for prompt, slots in siblings.items():
            for start in range(0, len(slots), self._members):
                members = slots[start : start + self._members]
                for seat, slot in enumerate(members, len(lines) * self._members):
                    seats[slot] = seat
                lines.append([prompt, *members, *[-1] * (self._members - len(members))])
        lines += [[-1] * (self._members + 1)] * (len(self._unit_prompt) - len(lines))
        table = torch.tensor(lines, dtype=torch.int32).to(self._unit_prompt.device)
        self._unit_prompt.copy_(table[:, 0])
        self._unit_rows.copy_(table[:, 1:])
        self._row_seats.copy_(torch.tensor(seats, dtype=torch.int32))

    def reader(self, rows: int, table: DecodeTable, longest: int) -> PagedReader:
        """`longest` is not used: lengths are known to the device."""
        prompt = self._unit_prompt[: self._units(rows)]
        places, lengths, items, first, chunk = self._kernels.plan(
            table.counts[:rows], table.live[:rows], prompt, self._prompt_lengths, self._shape.heads
        )
        spans = Spans(
            prompt_pages=self._prompt_pages.device,
            prompt_lengths=self._prompt_lengths,
            row_pages=self._row_pages.device[:rows],
            places=places,
            lengths=lengths,
            unit_prompt=prompt,
            unit_rows=self._unit_rows[: len(prompt)],
            row_seats=self._row_seats[:rows],
            items=items,
            first=first,
            chunk=chunk,
        )
        return PagedReader(self._layers, spans, self._kernels)

    def _units(self, rows: int) -> int:
        """Units that are enough for any distribution of rows over prompts: each prompt may leave one unfilled."""
        return min(rows, rows // self._members + self._prompts)


class _Mirrored:
    """A table of pages on the device, changed on the host."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self._host = torch.full((rows, columns), SPARE_PAGE, dtype=torch.int32)
        self.device = self._host.to(device, copy=True)
        self._changed = False

    def clear(self, first: int = 0) -> None:
        """Clear the rows from the first on."""
        self._host[first:] = SPARE_PAGE
        self._changed = True

    def write(self, row: int, pages: Sequence[int]) -> None:
        self._host[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self._host[row, len(pages) :] = SPARE_PAGE
        self._changed = True

    def upload(self) -> None:
        """Bring the device up to date; outside of captured steps, which would repeat it."""
        if self._changed:
            self.device.copy_(self._host)
            self._changed = False


def _kernels(device: torch.device) -> Kernels:
    if device.type != "cuda":
        return Kernels(plan_spans, plain_attention, None)
    from proximo.samplers.embedded import decode_prologue, kernels  # need triton, which comes with torch for GPUs

    return Kernels(decode_prologue.plan_spans, kernels.decode_attention, decode_prologue.joined_attention)
