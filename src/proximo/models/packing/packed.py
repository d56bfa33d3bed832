"""Attention over a packed row: each prompt once; completions attend to their own prompt and to themselves."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from proximo.types.batches import to_device
from proximo.types.tensor_types import Bool, Float, Int

SHORT = 64
"""Length below which spans of all lengths share a call: padding costs less than a separate call."""


@dataclass(frozen=True)
class Bucket:
    """Spans of similar length that share a call of torch's attention, whose cost is rows × longest².

    The grids hold positions in the packed row of N. Padding of a grid is position 0, which the mask hides from every
    real query; outputs of padded queries are never read, so no gradient flows there either.
    """

    places: Int[Tensor, "R Sq"]
    seen: Int[Tensor, "R Sk"]
    """Positions that a span may attend to: its own, for a completion after its prompt's."""
    mask: Bool[Tensor, "R 1 Sq Sk"] | None
    """Mask. None for prompts, which are causal: padding is on the right and thus hidden."""

    def to(self, device: torch.device) -> "Bucket":
        mask = None if self.mask is None else to_device(self.mask, device)
        return Bucket(to_device(self.places, device), to_device(self.seen, device), mask)

    def read(
        self,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "1 K N D"],
        value: Float[Tensor, "1 K N D"],
        scale: float,
    ) -> Float[Tensor, "M H D"]:
        """Outputs of all entries of the grid, row by row."""
        output = F.scaled_dot_product_attention(
            _gather(query, self.places),
            _gather(key, self.seen),
            _gather(value, self.seen),
            attn_mask=self.mask,
            is_causal=self.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        return output.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class PackedReader:
    """A few batched attention calls per layer: first prompts, then completions over [prompt; completion]."""

    buckets: tuple[Bucket, ...]
    source: Int[Tensor, " N"]
    """Index of each packed position's output among those of all calls."""

    def layer(self, number: int) -> "PackedReader":
        return self

    def to(self, device: torch.device) -> "PackedReader":
        return PackedReader(tuple(bucket.to(device) for bucket in self.buckets), to_device(self.source, device))

    def read(
        self,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "1 K N D"],
        value: Float[Tensor, "1 K N D"],
        scale: float,
    ) -> Float[Tensor, "1 N H D"]:
        outputs = torch.cat([bucket.read(query, key, value, scale) for bucket in self.buckets])
        return outputs.index_select(0, self.source)[None]


def packed_reader(
    prompt_starts: Int[Tensor, " P"],
    prompt_lengths: Int[Tensor, " P"],
    starts: Int[Tensor, " R"],
    lengths: Int[Tensor, " R"],
    member: Int[Tensor, " R"],
) -> PackedReader:
    """The reader of spans in a packed row; completion r belongs to prompt `member[r]`."""
    buckets, reals = [], []
    for index in similar(prompt_lengths):
        places, real = _grid(prompt_starts[index], prompt_lengths[index])
        buckets.append(Bucket(places, places, None))
        reals.append(real)
    for index in similar(lengths):
        places, real = _grid(starts[index], lengths[index])
        prompts, prompt_real = _grid(prompt_starts[member[index]], prompt_lengths[member[index]])
        width = places.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        to_prompt = prompt_real[:, None, None, :].expand(-1, 1, width, -1)
        to_itself = (causal & real[:, None, :])[:, None]
        seen, mask = torch.cat((prompts, places), dim=1), torch.cat((to_prompt, to_itself), dim=3)
        buckets.append(Bucket(places, seen, mask))
        reals.append(real)
    places = torch.cat([bucket.places[real] for bucket, real in zip(buckets, reals, strict=True)])
    entries = torch.cat([real.flatten() for real in reals]).nonzero()[:, 0]
    return PackedReader(tuple(buckets), torch.empty_like(places).scatter_(0, places, entries))


def similar(lengths: Int[Tensor, " R"], short: int = SHORT) -> list[Int[Tensor, " M"]]:
    """Indices of spans that share a padded width, in order: each is at least half as long as the longest of its bucket,
    unless all are short. Empty spans are left out."""
    longest_first = sorted((length, number) for number, length in enumerate(lengths.tolist()) if length)[::-1]
    buckets: list[list[int]] = []
    width = 0
    for length, number in longest_first:
        if not buckets or (width > short and 2 * length < width):
            buckets.append([])
            width = length
        buckets[-1].append(number)
    return [torch.tensor(sorted(bucket)) for bucket in buckets]


def _grid(starts: Int[Tensor, " R"], lengths: Int[Tensor, " R"]) -> tuple[Int[Tensor, "R S"], Bool[Tensor, "R S"]]:
    """Spans as rows of equal width, and which entries are real."""
    width = int(lengths.max()) if len(lengths) else 0
    steps = torch.arange(width)
    real = steps < lengths[:, None]
    return torch.where(real, starts[:, None] + steps, 0), real


def _gather(heads: Float[Tensor, "1 H N D"], grid: Int[Tensor, "R S"]) -> Float[Tensor, "R H S D"]:
    # Gather heads as one flat row: the backward of index_select is faster on a matrix.
    rows = heads[0].transpose(0, 1).flatten(1).index_select(0, grid.flatten())
    return rows.unflatten(0, grid.shape).unflatten(2, (heads.shape[1], -1)).transpose(1, 2)
