"""Layout of prompts and completions for a forward pass, and which hidden state predicts which token.

Packed: one row without padding; each prompt once, followed by its completions, whose positions continue the
prompt's. Padded: one row per completion, its prompt repeated; the reference. `predictors` is the only place in
the project where anything is shifted by one.

All of it is index arithmetic on the CPU, where the batch is; only the result goes to a device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from proximo.models.packing.packed import PackedReader, packed_reader
from proximo.models.packing.tiles import BLOCK, Tiles, padded_length, tiles
from proximo.types.batches import to_device
from proximo.types.tensor_types import Bool, Int

Key = TypeVar("Key", int, tuple[int, int])


@dataclass(frozen=True)
class Places:
    """Flattened positions of the tokens from which something is predicted."""

    prompts: Int[Tensor, " S"]
    """Prompt of each prompt span: packed, each prompt once; padded, one for every row."""
    prompt_tokens: Int[Tensor, " M"]
    """Positions of the prompt tokens, span by span."""
    completion_tokens: Int[Tensor, " D"]
    """Positions of the completion tokens, row by row."""
    consumed: Bool[Tensor, "B T"]
    """True at those D tokens: all but the last of each row."""


@dataclass(frozen=True)
class Packed:
    tokens: Int[Tensor, "R S"]
    """Token ids, [1, N], or R blocks of S for attention by tiles. A completion's last token is left out: nothing is
    predicted from it."""
    positions: Int[Tensor, "R S"]
    predictors: Int[Tensor, " C"]
    """Position among the R · S whose state predicts each completion token, row by row."""
    places: Places
    reader: PackedReader | Tiles

    def to(self, device: torch.device) -> "Packed":
        """The same with what a pass reads on a device; the places stay where they are."""
        return replace(
            self,
            tokens=to_device(self.tokens, device),
            positions=to_device(self.positions, device),
            predictors=to_device(self.predictors, device),
            reader=self.reader.to(device),
        )


@dataclass(frozen=True)
class Padded:
    tokens: Int[Tensor, "B S"]
    mask: Bool[Tensor, "B S"]
    predictors: Int[Tensor, " C"]
    """Position among the flattened B·S whose state predicts each completion token, row by row."""
    places: Places

    def to(self, device: torch.device) -> "Padded":
        """The same with what a pass reads on a device; the places stay where they are."""
        return replace(
            self,
            tokens=to_device(self.tokens, device),
            mask=to_device(self.mask, device),
            predictors=to_device(self.predictors, device),
        )


def pack(
    prompts: Sequence[Sequence[int]],
    tokens: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    group: Int[Tensor, " B"],
    *,
    in_blocks: bool = False,
) -> Packed:
    """Pack rows: each prompt once, followed by the rows of its group in the given order. Unused prompts are left out.

    With `in_blocks` the row is padded to whole blocks, for attention by tiles.
    """
    used, member = group.unique(return_inverse=True)
    flat_prompts, prompt_lengths = _prompts(prompts, used)
    read_lengths = (lengths - 1).clamp(min=0)
    totals = prompt_lengths.index_add(0, member, read_lengths)
    prompt_starts = _before(totals)
    # A completion comes after the prompts up to its own and the completions of earlier rows.
    order = member.argsort(stable=True)
    starts = torch.empty_like(read_lengths)
    starts[order] = prompt_lengths.cumsum(0)[member[order]] + _before(read_lengths[order])

    prompt_places, places = _ranges(prompt_starts, prompt_lengths), _ranges(starts, read_lengths)
    consumed = torch.arange(tokens.shape[1]) < read_lengths[:, None]
    size = int(totals.sum())
    packed = torch.zeros(padded_length(size) if in_blocks else size, dtype=torch.long)
    packed[prompt_places] = flat_prompts
    packed[places] = tokens[consumed]
    positions = torch.zeros_like(packed)
    positions[prompt_places] = _ranges(torch.zeros_like(prompt_lengths), prompt_lengths)
    positions[places] = _ranges(prompt_lengths[member], read_lengths)
    shape = (-1, BLOCK) if in_blocks else (1, -1)
    reader = tiles if in_blocks else packed_reader
    return Packed(
        tokens=packed.reshape(shape),
        positions=positions.reshape(shape),
        predictors=predictors((prompt_starts + prompt_lengths - 1)[member], starts, lengths),
        places=Places(used, prompt_places, places, consumed),
        reader=reader(prompt_starts, prompt_lengths, starts, read_lengths, member),
    )


def pad(
    prompts: Sequence[Sequence[int]], tokens: Int[Tensor, "B T"], lengths: Int[Tensor, " B"], group: Int[Tensor, " B"]
) -> Padded:
    """Rows [prompt; completion], padded on the right."""
    rows = [
        torch.cat((torch.tensor(prompts[number]), row[:length]))
        for number, row, length in zip(group.tolist(), tokens, lengths.tolist(), strict=True)
    ]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    sizes = torch.tensor([len(row) for row in rows])
    width = padded.shape[1]
    first = torch.arange(len(rows)) * width
    starts, read_lengths = first + sizes - lengths, (lengths - 1).clamp(min=0)
    return Padded(
        tokens=padded,
        mask=torch.arange(width) < sizes[:, None],
        predictors=predictors(starts - 1, starts, lengths),
        places=Places(
            prompts=group,
            prompt_tokens=_ranges(first, sizes - lengths),
            completion_tokens=_ranges(starts, read_lengths),
            consumed=torch.arange(tokens.shape[1]) < read_lengths[:, None],
        ),
    )


def predictors(
    prompt_ends: Int[Tensor, " B"], starts: Int[Tensor, " B"], lengths: Int[Tensor, " B"]
) -> Int[Tensor, " C"]:
    """The shift: a completion's first token is predicted at its prompt's end, token t at the completion's t − 1."""
    places = _ranges(starts - 1, lengths)
    nonempty = lengths > 0
    places[_before(lengths)[nonempty]] = prompt_ends[nonempty]
    return places


def micro_batches(
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    group: Sequence[int],
    token_budget: int,
    *,
    may_split: bool = False,
) -> list[list[int]]:
    """Row indices of each micro-batch: whole groups, as few batches as the budget allows, of even sizes.

    Row b has `completion_lengths[b]` tokens after the prompt of `prompt_lengths[group[b]]`, which its group shares.
    A group larger than the budget gets its own batch or, with `may_split`, several: each has the prompt once more. Then
    only a single row may be larger than the budget.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget is {token_budget}: give the number of tokens that fit into memory at once")
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(group):
        rows.setdefault(number, []).append(row)
    parts: dict[tuple[int, int], list[int]] = {}
    for number, group_rows in rows.items():
        lengths = [completion_lengths[row] for row in group_rows]
        split = split_group(prompt_lengths[number], lengths, token_budget) if may_split else [[*range(len(group_rows))]]
        parts |= {(number, index): [group_rows[member] for member in part] for index, part in enumerate(split)}
    sizes = {key: prompt_lengths[key[0]] + sum(completion_lengths[row] for row in part) for key, part in parts.items()}
    return [sorted(row for key in batch for row in parts[key]) for batch in _spread(sizes, token_budget)]


def split_group(prompt_length: int, completion_lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Members of each part of a group, of which each holds the prompt: one part if the group fits into the budget, else
    as few as possible, of even sizes."""
    if prompt_length + sum(completion_lengths) <= token_budget:
        return [[*range(len(completion_lengths))]]
    return [sorted(part) for part in _spread(dict(enumerate(completion_lengths)), max(token_budget - prompt_length, 0))]


def _spread(sizes: Mapping[Key, int], budget: int) -> list[list[Key]]:
    """First-fit, largest first, gives the number of batches. Then each item goes into the emptiest batch, since a
    nearly empty last batch would cost as much time as a full one."""
    order = sorted(sizes, key=lambda key: (-sizes[key], key))
    packed: list[list[Key]] = []
    room: list[int] = []
    for key in order:
        fitting = next((index for index, left in enumerate(room) if sizes[key] <= left), len(packed))
        if fitting == len(packed):
            packed.append([])
            room.append(budget)
        packed[fitting].append(key)
        room[fitting] -= sizes[key]
    even: list[list[Key]] = [[] for _ in packed]
    filled = [0] * len(packed)
    for key in order:
        emptiest = filled.index(min(filled))
        if filled[emptiest] and filled[emptiest] + sizes[key] > budget:
            return packed  # evenly spread they do not fit
        even[emptiest].append(key)
        filled[emptiest] += sizes[key]
    return even


def _prompts(prompts: Sequence[Sequence[int]], used: Int[Tensor, " P"]) -> tuple[Int[Tensor, " M"], Int[Tensor, " P"]]:
    chosen = [prompts[number] for number in used.tolist()]
    flat = torch.tensor([token for prompt in chosen for token in prompt], dtype=torch.long)
    return flat, torch.tensor([len(prompt) for prompt in chosen])


def _before(sizes: Int[Tensor, " R"]) -> Int[Tensor, " R"]:
    """Exclusive cumulative sum."""
    return sizes.cumsum(0) - sizes


def _ranges(starts: Int[Tensor, " R"], lengths: Int[Tensor, " R"]) -> Int[Tensor, " C"]:
    """starts[0], starts[0] + 1, … (lengths[0] of them), starts[1], …"""
    shifts = (starts - _before(lengths)).repeat_interleave(lengths)
    return shifts + torch.arange(len(shifts))
