"""Decode attention over pages: what is read for one new token of each row, and the plain computation of it.

Keys and values lie in pages of `PAGE` tokens. A row reads the pages of its prompt, which all samples of the prompt
share, and then its own. Rows of one prompt are put into units, so that the prompt's keys are read once for all rows of
a unit; a unit of one row is plain decoding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.types.tensor_types import Bool, Float, Int

PAGE = 64
"""Tokens in a page: what a kernel reads at a time, and on average half of it is wasted for each row."""
MIN_CHUNK = 128
"""Keys that one program reads, at least: below that, merging costs more than it saves."""
PROGRAMS = 1584
"""Programs that a step's keys are divided among, about: twelve for each multiprocessor of a large GPU. With fewer, the
last ones leave it half idle; with more, merging takes longer."""

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values [pages, heads, PAGE, width] of each layer, each in memory of its own: compiled code that changes two
parts of one tensor in place mistakes one for the other."""


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


@dataclass(frozen=True)
class Spans:
    """Keys that each row reads in a step, the same for all layers: U units of M rows, R rows, I items of work."""

    prompt_pages: Int[Tensor, "Q PP"]
    """Pages of each prompt."""
    prompt_lengths: Int[Tensor, " Q"]
    row_pages: Int[Tensor, "R RP"]
    """Pages of each row's own tokens."""
    places: Int[Tensor, " R"]
    """Position of each row's new token among its own."""
    lengths: Int[Tensor, " R"]
    """Own tokens that each row reads, its new one included."""
    unit_prompt: Int[Tensor, " U"]
    """The prompt of each unit; -1: the unit is empty."""
    unit_rows: Int[Tensor, "U M"]
    """The rows of each unit; -1: none."""
    row_seats: Int[Tensor, " R"]
    """The place of each row in `unit_rows`, flattened; -1: none."""
    items: Int[Tensor, " I"]
    """The span of each item of work: a unit's prompt (0 to U − 1) or a row's own tokens (U to U + R − 1). Entries
    beyond the number of items mean nothing."""
    first: Int[Tensor, " UR1"]
    """The first item of each span, and behind the last one the number of items."""
    chunk: Int[Tensor, " 1"]
    """Tokens in an item."""


@dataclass(frozen=True)
class PagedReader:
    """One new token for each of the first R slots."""

    layers: Layers
    spans: Spans
    kernels: "Kernels"

    def layer(self, number: int) -> "PagedLayer":
        keys, values = self.layers[number]
        return PagedLayer(keys, values, self.spans, self.kernels)


@dataclass(frozen=True)
class Kernels:
    """Functions that compute a step on a device."""

    plan: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]
    """`plan_spans`, or the kernel that computes the same."""
    attend: Callable[..., Tensor]
    """`plain_attention`, or the kernels that compute the same."""
    attend_joined: Callable[..., Tensor] | None
    """Attention that takes a layer's joined projections; None: there is none."""


@dataclass(frozen=True)
class PagedLayer:
    keys: Float[Tensor, "N K S D"]
    values: Float[Tensor, "N K S D"]
    spans: Spans
    kernels: Kernels

    def read(
        self,
        query: Float[Tensor, "R H 1 D"],
        key: Float[Tensor, "R K 1 D"],
        value: Float[Tensor, "R K 1 D"],
        scale: float,
    ) -> Float[Tensor, "R 1 H D"]:
        rows = query.squeeze(2), key.squeeze(2), value.squeeze(2)
        return self.kernels.attend(*rows, self.keys, self.values, *self._spans(), scale).unsqueeze(1)

    def read_joined(
        self,
        states: Float[Tensor, "R 1 HKK D"],
        norms: tuple[Float[Tensor, " D"], Float[Tensor, " D"]] | tuple[None, None],
        epsilon: float,
        angles: tuple[Tensor, Tensor] | tuple[None, None],
        scale: float,
    ) -> Float[Tensor, "R 1 H D"]:
        """The same from queries, keys and values side by side, before their norms and rotations."""
        assert self.kernels.attend_joined is not None
        seen = self.kernels.attend_joined(
            states.squeeze(1), *norms, *angles, epsilon, self.keys, self.values, *self._spans(), scale
        )
        return seen.unsqueeze(1)

    def _spans(self) -> tuple[Tensor, ...]:
        spans = self.spans
        return (
            spans.prompt_pages,
            spans.prompt_lengths,
            spans.row_pages,
            spans.places,
            spans.lengths,
            spans.unit_prompt,
            spans.unit_rows,
            spans.row_seats,
            spans.items,
            spans.first,
            spans.chunk,
        )


def max_items(spans: int, heads: int) -> int:
    """Largest number of items that can occur, whatever the lengths."""
    return spans + -(-PROGRAMS // heads)


def plan_spans(
    counts: Int[Tensor, " R"],
    live: Bool[Tensor, " R"],
    unit_prompt: Int[Tensor, " U"],
    prompt_lengths: Int[Tensor, " Q"],
    heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Places where the rows write, numbers of their own tokens that they read, and the items of work.

    A row that has ended, and a slot without one, read one token instead of all.
    """
    places = (counts - 1).clamp(min=0)  # an empty slot has no token
    lengths = torch.where(live, places + 1, 1)
    shared = torch.where(unit_prompt >= 0, prompt_lengths[unit_prompt.clamp(min=0)], 0)
    return places, lengths, *work_items(torch.cat((shared.long(), lengths)), heads)


def work_items(lengths: Int[Tensor, " N"], heads: int) -> tuple[Int[Tensor, " I"], Int[Tensor, " N1"], Tensor]:
    """Cut spans into items of equal length, so that a few long rows keep a GPU as busy as many short ones.

    The number of items has a bound that does not depend on lengths, and all is computed on the device: a captured graph
    serves every length. Returns the span of each item, the first item of each span, and the length of an item.
    """
    share = (lengths.sum(dim=0, keepdim=True) * heads + PROGRAMS - 1) // PROGRAMS
    chunk = ((share + PAGE - 1) // PAGE * PAGE).clamp(min=MIN_CHUNK)
    ends = ((lengths + chunk - 1) // chunk).cumsum(dim=0)
    item = torch.arange(max_items(len(lengths), heads), device=lengths.device)
    items = torch.searchsorted(ends, item, right=True)
    first = torch.cat((torch.zeros_like(ends[:1]), ends))
    return items.int(), first.int(), chunk.int()


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    prompt_pages: Tensor,
    prompt_lengths: Tensor,
    row_pages: Tensor,
    places: Tensor,
    lengths: Tensor,
    unit_prompt: Tensor,
    unit_rows: Tensor,
    row_seats: Tensor,
    items: Tensor,
    first: Tensor,
    chunk: Tensor,
    scale: float,
) -> Tensor:
    """Compute what the GPU's kernel does, in plain operations and without items of work."""
    kv_heads = key.shape[1]
    rows = torch.arange(len(query), device=query.device)
    page, offset = row_pages[rows, places // PAGE].long(), places % PAGE
    keys[page, :, offset], values[page, :, offset] = key, value
    folded = query.unflatten(1, (kv_heads, -1))  # [R, K, H / K, D]

    seats = row_seats.long()
    prompt = torch.where(seats >= 0, unit_prompt.long()[seats.clamp(min=0) // unit_rows.shape[1]], -1)
    shown = torch.where(prompt >= 0, prompt_lengths[prompt.clamp(min=0)], 0)
    far = _part(folded, keys, values, prompt_pages[prompt.clamp(min=0)], shown, scale)
    near = _part(folded, keys, values, row_pages, lengths, scale)
    share = torch.sigmoid(far[1] - near[1]).unsqueeze(-1)
    return torch.where(share > 0, share * far[0] + (1 - share) * near[0], near[0]).flatten(1, 2)


def _part(
    query: Float[Tensor, "R K L D"],
    keys: Tensor,
    values: Tensor,
    pages: Int[Tensor, "R P"],
    shown: Tensor,
    scale: float,
) -> tuple[Float[Tensor, "R K L D"], Float[Tensor, "R K L"]]:
    """Attention over the first `shown` tokens of each row's pages, and the logarithm of its normaliser."""
    key, value = (side[pages.long()].transpose(1, 2).flatten(2, 3) for side in (keys, values))
    hidden = torch.arange(key.shape[2], device=query.device) >= shown.unsqueeze(1)
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(hidden[:, None, None], -torch.inf)
    weight = scores.logsumexp(-1)
    return (scores - weight.unsqueeze(-1)).exp() @ value, weight
