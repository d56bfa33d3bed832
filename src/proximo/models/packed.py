"""Attention over a packed row: prompts once each, completions that see their own prompt and themselves."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from proximo.shapes import Bool, Float, Int
from proximo.types import sent


@dataclass(frozen=True)
class PackedReader:
    """Two batched calls of torch's attention per layer: all prompts, then all completions over [prompt; completion].

    The grids hold places in the packed row of N positions. Where a grid is padded it holds place 0, which the
    mask hides from every real query; outputs of padded queries are never read, so no gradient flows there either.
    """

    prompts: Int[Tensor, "P Sp"]
    completions: Int[Tensor, "R Sc"]
    seen: Int[Tensor, "R Sk"]
    """What a completion may look at: its prompt's places, then its own."""
    mask: Bool[Tensor, "R 1 Sc Sk"]
    source: Int[Tensor, " N"]
    """Where each place of the packed row finds its output among those of the two calls."""

    def layer(self, number: int) -> "PackedReader":
        return self

    def to(self, device: torch.device) -> "PackedReader":
        return PackedReader(**{name: sent(tensor, device) for name, tensor in vars(self).items()})

    def read(
        self,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "1 K N D"],
        value: Float[Tensor, "1 K N D"],
        scale: float,
    ) -> Float[Tensor, "1 N H D"]:
        prompts = F.scaled_dot_product_attention(
            _gather(query, self.prompts),
            _gather(key, self.prompts),
            _gather(value, self.prompts),
            is_causal=True,  # padding stands to the right, so it is causally hidden
            scale=scale,
            enable_gqa=True,
        )
        outputs = prompts.transpose(1, 2).flatten(0, 1)
        if len(self.completions):
            completions = F.scaled_dot_product_attention(
                _gather(query, self.completions),
                _gather(key, self.seen),
                _gather(value, self.seen),
                attn_mask=self.mask,
                scale=scale,
                enable_gqa=True,
            )
            outputs = torch.cat((outputs, completions.transpose(1, 2).flatten(0, 1)))
        return outputs.index_select(0, self.source)[None]


def packed_reader(
    prompt_starts: Int[Tensor, " P"],
    prompt_lengths: Int[Tensor, " P"],
    starts: Int[Tensor, " R"],
    lengths: Int[Tensor, " R"],
    member: Int[Tensor, " R"],
) -> PackedReader:
    """The reader of spans in a packed row; completion r belongs to prompt `member[r]`."""
    nonempty = lengths > 0
    starts, lengths, member = starts[nonempty], lengths[nonempty], member[nonempty]
    prompts, prompt_real = _grid(prompt_starts, prompt_lengths)
    completions, real = _grid(starts, lengths)
    width = completions.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    to_prompt = prompt_real[member][:, None, None, :].expand(-1, 1, width, -1)
    to_itself = (causal & real[:, None, :])[:, None]

    places = torch.cat((prompts[prompt_real], completions[real]))
    found = torch.cat((prompt_real.flatten(), real.flatten())).nonzero()[:, 0]
    return PackedReader(
        prompts=prompts,
        completions=completions,
        seen=torch.cat((prompts[member], completions), dim=1),
        mask=torch.cat((to_prompt, to_itself), dim=3),
        source=torch.empty_like(places).scatter_(0, places, found),
    )


def _grid(starts: Int[Tensor, " R"], lengths: Int[Tensor, " R"]) -> tuple[Int[Tensor, "R S"], Bool[Tensor, "R S"]]:
    """Spans as rows of equal width, and which entries are real."""
    width = int(lengths.max()) if len(lengths) else 0
    steps = torch.arange(width)
    real = steps < lengths[:, None]
    return torch.where(real, starts[:, None] + steps, 0), real


def _gather(heads: Float[Tensor, "1 H N D"], grid: Int[Tensor, "R S"]) -> Float[Tensor, "R H S D"]:
    # Heads are gathered as one flat row: torch's backward of index_select is faster on a matrix.
    rows = heads[0].transpose(0, 1).flatten(1).index_select(0, grid.flatten())
    return rows.unflatten(0, grid.shape).unflatten(2, (heads.shape[1], -1)).transpose(1, 2)
