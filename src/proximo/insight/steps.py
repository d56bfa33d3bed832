"""One step's rollouts, read back into tensors."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from proximo.models.routing import UNKNOWN
from proximo.shapes import Bool, Float, Int
from proximo.storage.opening import open_file
from proximo.storage.sealing import is_intact
from proximo.training.rollouts import FACTS, FORMAT
from proximo.types import Batch

MOST_BYTES = 4 << 30
"""Of a file of rollouts."""
MOST_ENTRIES = 1 << 24
"""Completions times tokens of the longest: about two hundred bytes each are held while a step is looked at."""
CHANGED = "its bytes are not those that were written"


@dataclass(frozen=True)
class Step:
    """Everything that was sampled for a step, a row to a completion."""

    number: int
    facts: Mapping[str, Any]
    """What concerns no single row: `updates`, one entry for each."""
    batch: Batch
    state: Sequence[str]
    """Of each row: trained, unscored or dropped."""
    sibling: Sequence[int]
    problem: Sequence[str]
    """Ids."""
    prompt: Sequence[str]
    text: Sequence[str]
    answer: Sequence[str]
    """What the problem wanted; empty where a grader needs nothing."""
    parts: Sequence[Mapping[str, float]]
    pieces: Sequence[Sequence[str]]
    """The text of each token."""
    updates: Int[Tensor, "E B"]
    """The update that each row was in, in each pass over the data; -1: in none."""
    current: Float[Tensor, "E B T"]
    """Log-probs just before that update; NaN where the row was not run."""
    entropy: Float[Tensor, "E B T"]
    """Just before that update; NaN where the row was not run."""

    @property
    def passes(self) -> int:
        return len(self.updates)

    def entropy_in(self, number: int) -> Float[Tensor, "B T"] | None:
        """Of the policy before the update of a pass; of the policy that sampled, in rows that were not run in it."""
        sampled = self.batch.rollout_entropy
        if not self.passes:
            return sampled
        found = self.entropy[number]
        return found if sampled is None else torch.where(found.isnan(), sampled.to(found.dtype), found)

    @property
    def inside(self) -> Bool[Tensor, "B T"]:
        """True at the tokens of each row, sampled ones all."""
        return torch.arange(self.batch.tokens.shape[1]) < self.batch.lengths.unsqueeze(1)

    @property
    def is_value_only(self) -> bool:
        """Whether the value model alone was trained."""
        return bool(self.facts["updates"]) and all(update["value_only"] for update in self.facts["updates"])


def read_step(path: Path, number: int) -> Step:
    """ValueError, in one line, where a file is damaged or was written by another version."""
    try:
        data = _bytes(path)
        facts = _facts(data)
        if facts.get("format") != FORMAT:
            raise ValueError("another version of Proximo wrote it: read it with that one, or run the step again")
        if not is_intact(data):
            raise ValueError(CHANGED)
        return _step(pq.read_table(pa.BufferReader(data)), number, facts)
    except KeyError as error:
        raise ValueError(f"{path}: it is damaged, {error} is missing") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from None
    except (TypeError, AttributeError, IndexError, RuntimeError):  # a column of another kind than ours
        raise ValueError(f"{path}: it is damaged, or something else than a run's rollouts") from None


def complaint(path: Path) -> str | None:
    """What is wrong with a file of rollouts, without reading it into tensors; None: nothing, or another version wrote
    it."""
    try:
        data = _bytes(path)
    except (OSError, ValueError) as error:
        return str(error)
    if is_intact(data):
        return None
    try:
        return None if _facts(data).get("format", FORMAT) != FORMAT else CHANGED
    except (OSError, ValueError, pa.ArrowException):
        return CHANGED


def _bytes(path: Path) -> bytes:
    with open_file(path) as file:
        if (size := file.seek(0, 2)) > MOST_BYTES:
            raise ValueError(f"it has {size >> 20:,} MiB, more than the {MOST_BYTES >> 20:,} MiB that are read at once")
        file.seek(0)
        return file.read()


def _facts(data: bytes) -> dict[str, Any]:
    """What the footer says; nothing where that is not ours."""
    facts = json.loads((pq.read_schema(pa.BufferReader(data)).metadata or {}).get(FACTS, b"{}"))
    return facts if isinstance(facts, dict) else {}


def _step(table: pa.Table, number: int, facts: Mapping[str, Any]) -> Step:
    column = {name: table.column(name).combine_chunks() for name in table.column_names}
    for update in facts["updates"]:
        _ = update["version"], update["skipped"], update["value_only"]
    lengths = torch.from_numpy(np.diff(_offsets(column["tokens"])))
    _check_lengths(column["pieces"], lengths)
    entries = len(lengths) * (int(lengths.max()) if len(lengths) else 0)
    if entries > MOST_ENTRIES:
        sizes = f"{len(lengths):,} completions, the longest of {int(lengths.max()):,} tokens"
        raise ValueError(f"it has {sizes}: {entries:,} places for tokens, more than the {MOST_ENTRIES:,} held at once")
    rows = _Rows(lengths)
    counts = torch.from_numpy(np.diff(_offsets(column["updates"])))
    most = int(counts.max()) if len(counts) else 0
    has = torch.arange(most) < counts.unsqueeze(1)
    updates = torch.full((len(lengths), most), -1)
    updates[has] = torch.from_numpy(column["updates"].flatten().to_numpy().astype(np.int64))
    if most and int(updates.max()) >= len(facts["updates"]):
        raise ValueError("it is damaged: a row is of an update that is not there")
    return Step(
        number=number,
        facts=facts,
        batch=_batch(column, rows, lengths),
        state=column["state"].to_pylist(),
        sibling=column["sibling"].to_pylist(),
        problem=column["problem"].to_pylist(),
        prompt=column["prompt"].to_pylist(),
        text=column["text"].to_pylist(),
        answer=[answer or "" for answer in column["answer"].to_pylist()],
        parts=[dict(part) for part in column["parts"].to_pylist()],
        pieces=column["pieces"].to_pylist(),
        updates=updates.T.contiguous(),
        current=rows.nested(column["current_logprobs"], has),
        entropy=rows.nested(column["entropy"], has),
    )


def _batch(column: Mapping[str, pa.Array], rows: "_Rows", lengths: Int[Tensor, " B"]) -> Batch:
    group = torch.from_numpy(column["group"].to_numpy().astype(np.int64))
    if len(group) and not 0 <= int(group.min()) <= int(group.max()) < len(group):
        raise ValueError("it is damaged: groups are not counted from 0")
    prompts: dict[int, tuple[int, ...]] = {}
    for place, number in enumerate(group.tolist()):
        if number not in prompts:
            prompts[number] = tuple(column["prompt_tokens"][place].as_py())

    def optional(name: str) -> Tensor | None:
        return rows(column[name]) if name in column else None

    return Batch(
        prompts=tuple(prompts.get(number, ()) for number in range(max(prompts, default=-1) + 1)),
        tokens=rows(column["tokens"]),
        lengths=lengths,
        mask=rows(column["mask"]),
        group=group,
        outcome=torch.from_numpy(column["outcome"].to_numpy(zero_copy_only=False).copy()),
        rewards=torch.from_numpy(column["reward"].to_numpy(zero_copy_only=False).copy()),
        truncated=torch.from_numpy(column["truncated"].to_numpy(zero_copy_only=False).copy()),
        version=torch.from_numpy(column["version"].to_numpy().copy()),
        rollout_logprobs=rows(column["rollout_logprobs"]),
        rollout_entropy=optional("rollout_entropy"),
        old_logprobs=rows(column["old_logprobs"]),
        advantages=rows(column["advantages"]),
        ref_logprobs=optional("ref_logprobs"),
        values=optional("values"),
        returns=optional("returns"),
        **_routes(column, rows, group, len(prompts)),
    )


def _routes(column: Mapping[str, pa.Array], rows: "_Rows", group: Int[Tensor, " B"], prompts: int) -> dict[str, Any]:
    """The experts that were replayed, where any were."""
    if "routes" not in column or not len(group):
        return {}
    shape = (-1, column["route_layers"][0].as_py(), column["route_experts"][0].as_py())
    first = [int((group == number).nonzero()[0]) for number in range(prompts)]
    found = [_flat(column["prompt_routes"].slice(place, 1)).reshape(shape) for place in first]
    flat = _flat(column["routes"]).reshape(shape)
    return {"routes": rows.of_each(flat, UNKNOWN), "prompt_routes": tuple(found)}


class _Rows:
    """Lists of unequal lengths back to tensors."""

    def __init__(self, lengths: Int[Tensor, " B"]) -> None:
        self._lengths, self._width = lengths, max(int(lengths.max()) if len(lengths) else 0, 1)

    def __call__(self, lists: pa.Array) -> Tensor:
        """0 beyond each row's length."""
        _check_lengths(lists, self._lengths)
        flat = _flat(lists)
        blank = torch.zeros(len(self._lengths), self._width, dtype=flat.dtype)
        return blank.masked_scatter(self._inside(self._lengths), flat)

    def of_each(self, flat: Tensor, filler: int) -> Tensor:
        """What has a shape of its own at each token."""
        blank = torch.full((len(self._lengths), self._width, *flat.shape[1:]), filler, dtype=flat.dtype)
        blank[self._inside(self._lengths)] = flat
        return blank

    def nested(self, lists: pa.Array, has: Tensor) -> Float[Tensor, "E B T"]:
        """NaN wherever there is nothing."""
        lengths = torch.where(has, self._lengths.unsqueeze(1), 0)
        _check_lengths(lists, has.sum(dim=1))
        _check_lengths(lists.flatten(), lengths[has])
        flat = _flat(lists.flatten())
        blank = torch.full((*has.shape, self._width), torch.nan, dtype=flat.dtype)
        inside = torch.arange(self._width) < lengths.unsqueeze(2)
        return blank.masked_scatter(inside, flat).transpose(0, 1).contiguous()

    def _inside(self, lengths: Int[Tensor, " B"]) -> Tensor:
        return torch.arange(self._width) < lengths.unsqueeze(1)


def _check_lengths(lists: pa.Array, lengths: Int[Tensor, " R"]) -> None:
    if not np.array_equal(np.diff(_offsets(lists)), lengths.numpy()):
        raise ValueError("it is damaged: a column is not aligned with the tokens")


def _flat(lists: pa.Array) -> Tensor:
    values = lists.flatten().to_numpy(zero_copy_only=False)
    return torch.from_numpy(np.array(values))  # a copy: arrow's memory is read only


def _offsets(lists: pa.Array) -> np.ndarray:
    return lists.offsets.to_numpy().astype(np.int64)
