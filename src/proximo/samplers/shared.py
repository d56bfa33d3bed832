"""Keys and values of prompts, kept once for all of their samples, beside those of each row's own tokens.

Where prompts are long, their keys are also read once for several samples: rows are gathered in units of one prompt.
A unit of one row is plain decoding.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.samplers.cache import KeyShape
from proximo.samplers.table import DecodeTable
from proximo.tensor_types import Float, Int

Prompt = tuple[int, ...]
Layers = list[tuple[Tensor, Tensor]]
"""Keys and values [rows, heads, tokens, width] of each layer, every one in memory of its own: compiled code that is
handed two parts of one tensor, and told that it changes them, takes one for the other."""
MAX_LANES = 64
"""Queries that one unit holds for each key-value head: what a matrix unit likes."""


@dataclass(frozen=True)
class SharedReader:
    """One new token for each of the first R slots."""

    prefixes: "Layers"
    own: "Layers"
    prefix_lengths: Int[Tensor, " Q"]
    places: Int[Tensor, " R"]
    unit_prefix: Int[Tensor, " U"]
    unit_rows: Int[Tensor, "U M"]
    attend: Callable[..., Tensor]

    def layer(self, number: int) -> "SharedLayer":
        prefix_keys, prefix_values = self.prefixes[number]
        keys, values = self.own[number]
        rows = len(self.places)
        return SharedLayer(
            prefix_keys,
            prefix_values,
            self.prefix_lengths,
            keys[:rows],
            values[:rows],
            self.places,
            self.unit_prefix,
            self.unit_rows,
            self.attend,
        )


@dataclass(frozen=True)
class SharedLayer:
    prefix_keys: Float[Tensor, "Q K P D"]
    prefix_values: Float[Tensor, "Q K P D"]
    prefix_lengths: Int[Tensor, " Q"]
    keys: Float[Tensor, "R K S D"]
    values: Float[Tensor, "R K S D"]
    places: Int[Tensor, " R"]
    """Where each row's new token stands among its own."""
    unit_prefix: Int[Tensor, " U"]
    """The prompt of a unit; -1: there is none."""
    unit_rows: Int[Tensor, "U M"]
    """Its rows; -1: there is none."""
    attend: Callable[..., Tensor]
    """`plain_attention`, or the kernel that computes the same."""

    def read(
        self,
        query: Float[Tensor, "R H 1 D"],
        key: Float[Tensor, "R K 1 D"],
        value: Float[Tensor, "R K 1 D"],
        scale: float,
    ) -> Float[Tensor, "R 1 H D"]:
        return self.attend(
            query.squeeze(2),
            key.squeeze(2),
            value.squeeze(2),
            self.prefix_keys,
            self.prefix_values,
            self.prefix_lengths,
            self.keys,
            self.values,
            self.places,
            self.unit_prefix,
            self.unit_rows,
            scale,
        ).unsqueeze(1)


class SharedCache:
    """Buffers for Q prompts of P tokens and S rows of R tokens of their own."""

    def __init__(
        self, shape: KeyShape, prompts: int, max_prompt_tokens: int, slots: int, room: int, members: int
    ) -> None:
        """`members` is how many rows share a read of their prompt, 1 for none."""
        self._prefixes, self._own = _layers(shape, prompts, max_prompt_tokens), _layers(shape, slots, room)
        self._prefix_lengths = torch.zeros(prompts, dtype=torch.int32, device=shape.device)
        units = self._units(slots, prompts, members)
        self._unit_prefix = torch.full((units,), -1, dtype=torch.int32, device=shape.device)
        self._unit_rows = torch.full((units, members), -1, dtype=torch.int32, device=shape.device)
        self._members, self._prompts = members, prompts
        self._attend = _attention(shape.device)
        self._row_of: dict[Prompt, int] = {}
        self._users: Counter[Prompt] = Counter()
        self._slots: list[Prompt] = []
        """The prompt of each live slot."""

    def clear(self) -> None:
        """No rows."""
        self._row_of.clear()
        self._users.clear()
        self._slots.clear()

    def reserve(self, prompt: Prompt) -> bool:
        """Whether there is room for a prompt; it is then the prompt's."""
        if prompt not in self._row_of and len(self._row_of) < self._prompts:
            self._row_of[prompt] = min(set(range(self._prompts)) - set(self._row_of.values()))
        return prompt in self._row_of

    def enter(self, prompt: Prompt, prefix: Float[Tensor, "N 2 K T D"], *, count: int) -> None:
        """Rows of a prompt, behind those that are there."""
        row = self._row_of[prompt]
        if not self._users[prompt]:
            for layer, read in zip(self._prefixes, prefix, strict=True):
                for side, its in zip(layer, read, strict=True):
                    side[row, :, : len(prompt)] = its
            self._prefix_lengths[row] = len(prompt)
        self._users[prompt] += count
        self._slots += [prompt] * count

    def release(self, gone: Sequence[int], sources: Sequence[int], targets: Sequence[int], own: int, left: int) -> None:
        """Rows leave; others, of at most `own` own tokens, move into holes; the first `left` slots stay."""
        for slot in gone:
            prompt = self._slots[slot]
            self._users[prompt] -= 1
            if not self._users[prompt]:
                del self._users[prompt], self._row_of[prompt]
        assert not set(sources) & set(targets)
        if sources:
            for side in (side for layer in self._own for side in layer):
                side[targets, :, :own] = side[sources, :, :own]
        for source, target in zip(sources, targets, strict=True):
            self._slots[target] = self._slots[source]
        del self._slots[left:]

    def settle(self) -> None:
        """Write down which rows share a prompt; once after rows came or went."""
        units: list[tuple[int, list[int]]] = []
        siblings: dict[int, list[int]] = {}
        for slot, prompt in enumerate(self._slots):
            siblings.setdefault(self._row_of[prompt], []).append(slot)
        for row, slots in siblings.items():
            units += [(row, slots[start : start + self._members]) for start in range(0, len(slots), self._members)]
        lines = [[row, *slots, *[-1] * (self._members - len(slots))] for row, slots in units]
        lines += [[-1] * (self._members + 1)] * (len(self._unit_prefix) - len(lines))
        table = torch.tensor(lines, dtype=torch.int32).to(self._unit_prefix.device)
        self._unit_prefix.copy_(table[:, 0])
        self._unit_rows.copy_(table[:, 1:])

    def reader(self, rows: int, table: DecodeTable, longest: int) -> SharedReader:
        """Lengths are known to the device, `longest` is of no interest."""
        units = self._units(rows, self._prompts, self._members)
        return SharedReader(
            prefixes=self._prefixes,
            own=self._own,
            prefix_lengths=self._prefix_lengths,
            places=(table.counts[:rows] - 1).clamp(min=0),  # a slot that nobody has taken has said nothing
            unit_prefix=self._unit_prefix[:units],
            unit_rows=self._unit_rows[:units],
            attend=self._attend,
        )

    @staticmethod
    def _units(rows: int, prompts: int, members: int) -> int:
        """Enough for any distribution of so many rows over prompts: each prompt may leave one unit unfilled."""
        return min(rows, rows // members + prompts)


def _layers(shape: KeyShape, rows: int, tokens: int) -> Layers:
    return [(shape.side(rows, tokens), shape.side(rows, tokens)) for _ in range(shape.layers)]


def _attention(device: torch.device) -> Callable[..., Tensor]:
    if device.type != "cuda":
        return plain_attention
    from proximo.samplers.kernels import decode_attention  # needs triton, which comes with torch for GPUs

    return decode_attention


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    prefix_lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    unit_prefix: Tensor,
    unit_rows: Tensor,
    scale: float,
) -> Tensor:
    """What the GPU's kernel computes, in plain operations."""
    kv_heads = key.shape[1]
    everyone = torch.arange(len(query), device=query.device)
    keys[everyone, :, places], values[everyone, :, places] = key, value

    used = unit_prefix >= 0
    prefix, members = unit_prefix[used].long(), unit_rows[used].long()
    taken = members >= 0
    folded = query.unflatten(1, (kv_heads, -1))
    asked = folded[members].permute(0, 2, 1, 3, 4).flatten(2, 3)  # [U, K, M · repeats, D]
    hidden = torch.arange(prefix_keys.shape[2], device=query.device) >= prefix_lengths[prefix].unsqueeze(1)
    far, far_weight = _piece(asked, prefix_keys[prefix], prefix_values[prefix], hidden, scale)
    far, far_weight = (
        each.unflatten(2, (members.shape[1], -1)).transpose(1, 2)[taken] for each in (far, far_weight.unsqueeze(-1))
    )
    whose = members[taken]
    from_prompt = torch.zeros_like(folded).index_copy_(0, whose, far)
    prompt_weight = torch.full_like(folded[..., :1], -torch.inf).index_copy_(0, whose, far_weight)

    hidden = torch.arange(keys.shape[2], device=query.device) > places.unsqueeze(1)
    from_own, own_weight = _piece(folded, keys, values, hidden, scale)
    share = torch.sigmoid(prompt_weight - own_weight.unsqueeze(-1))
    return (share * from_prompt + (1 - share) * from_own).flatten(1, 2)


def _piece(
    query: Float[Tensor, "U K L D"],
    keys: Float[Tensor, "U K S D"],
    values: Float[Tensor, "U K S D"],
    hidden: Tensor,
    scale: float,
) -> tuple[Float[Tensor, "U K L D"], Float[Tensor, "U K L"]]:
    """Attention over one part of what is seen, and the logarithm of its normaliser."""
    scores = (query @ keys.transpose(2, 3) * scale).masked_fill(hidden[:, None, None], -torch.inf)
    weight = scores.logsumexp(-1)
    return (scores - weight.unsqueeze(-1)).exp() @ values, weight
