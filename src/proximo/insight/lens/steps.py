"""One step's rollouts, read back into tensors: the tokens of all completions are concatenated, without padding."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from proximo.insight.lens.columns import Pieces, RolloutColumns, TokenTensors, check_lengths, flat, offsets
from proximo.insight.lens.files import CHANGED, metadata_of, rollout_file, was_intact
from proximo.insight.lens.layout import TokenLayout
from proximo.insight.lens.turns import read_messages, read_turns
from proximo.models.routing import UNKNOWN
from proximo.runs.rollouts import FORMAT
from proximo.types import Turn
from proximo.types.batches import Batch
from proximo.types.tensor_types import Bool, Float, Int

MAX_TOKENS = 1 << 26
"""Maximum tokens of a step; each takes some hundred bytes of memory."""
MAX_PASSED = 1 << 28
"""Maximum of tokens times passes; each takes eight bytes."""
MAX_PROMPTED = 1 << 24
"""Maximum tokens of all prompts, which are kept as numbers of Python."""
PER_TOKEN = {
    "tokens": 0,
    "sampled": 0,
    "mask": 0,
    "rollout_logprobs": 0,
    "rollout_entropy": 0,
    "old_logprobs": 0,
    "advantages": 0,
    "ref_logprobs": 0,
    "teacher_logprobs": 0,
    "values": 0,
    "returns": 0,
    "turn_rewards": 0,
    "step_rewards": math.nan,
    "routes": UNKNOWN,
}
"""Fields of a batch with one entry per token, and their padding value."""


@dataclass(frozen=True)
class FlatBatch(Batch):
    """A batch without padding: tensors that are [B, T] in a batch are [N] here, see `TokenLayout`."""

    @cached_property
    def layout(self) -> TokenLayout:
        return TokenLayout(self.lengths)

    @property
    def sampled_lengths(self) -> Int[Tensor, " B"]:
        return self.layout.count(self.sampled)

    def rows(self, index: Int[Tensor, " M"]) -> Batch:
        """Some of the rows, padded to the longest."""
        known = {each.name: getattr(self, each.name) for each in fields(Batch)}
        for name, value in known.items():
            if isinstance(value, Tensor) and name in PER_TOKEN:
                known[name] = self.layout.padded(value, index, PER_TOKEN[name])
            elif isinstance(value, Tensor):
                known[name] = value[index]
        return Batch(**known | {"tokens": known["tokens"].long()})


@dataclass(frozen=True)
class StoredStep:
    """Samples of a step, as they are stored; a row is a completion."""

    number: int
    metadata: Mapping[str, Any]
    """Metadata of the whole step: `updates` has one entry per update."""
    batch: FlatBatch
    state: Sequence[str]
    """State of each row: trained, unscored or dropped."""
    sibling: Sequence[int]
    problem: Sequence[str]
    """Ids of the problems."""
    prompt: Sequence[str]
    text: Sequence[str]
    answer: Sequence[str]
    """Expected answers; empty if the grader needs none."""
    parts: Sequence[Mapping[str, float]]
    pieces: Sequence[Sequence[str]]
    """Text of each token."""
    turns: Sequence[Sequence[Turn]]
    """Turns of each episode; empty for a completion that is a single reply."""
    messages: Sequence[Sequence[Mapping[str, str]]]
    """The prompt of each row as a conversation; empty where it was a text."""
    updates: Int[Tensor, "E B"]
    """Update of each row in each pass over the data; -1: in none."""
    current: Float[Tensor, "E N"]
    """Log-probs before that update; NaN if the row was not run."""
    entropy: Float[Tensor, "E N"]
    """Entropies before that update; NaN if the row was not run."""

    @property
    def layout(self) -> TokenLayout:
        """Positions of each row's tokens among all N; `batch.sampled` says which were sampled."""
        return self.batch.layout

    @property
    def passes(self) -> int:
        return len(self.updates)

    @cached_property
    def old_is_sampler(self) -> bool:
        """True if the sampler's log-probs are the old ones, because none were computed."""
        return torch.equal(self.batch.old_logprobs, self.batch.rollout_logprobs)

    def entropy_in(self, number: int, part: slice = slice(None)) -> Float[Tensor, " N"] | None:
        """Entropy of the policy before the update of a pass; that of the sampling policy in rows that were not run."""
        sampled = None if self.batch.rollout_entropy is None else self.batch.rollout_entropy[part]
        if not self.passes:
            return sampled
        entropy = self.entropy[number, part]
        return entropy if sampled is None else torch.where(entropy.isnan(), sampled.to(entropy.dtype), entropy)

    @property
    def is_value_only(self) -> bool:
        """True if only the value model was trained."""
        return bool(self.metadata["updates"]) and all(update["value_only"] for update in self.metadata["updates"])


def read_step(path: Path, number: int) -> StoredStep:
    """Read a step's file; ValueError, in one line, if it is damaged or was written by another version."""
    try:
        with rollout_file(path) as file:
            metadata = metadata_of(file)
            if metadata.get("format") != FORMAT:
                raise ValueError("another version of Proximo wrote it: read it with that one, or run the step again")
            with rollout_file(path) as same, ThreadPoolExecutor(1) as pool:
                other = _OtherHalf(pool, path, same)
                try:
                    return _step(RolloutColumns(file), number, metadata, other)
                finally:
                    other.texts.result()  # of a damaged file this is what is wrong
    except KeyError as error:
        raise ValueError(f"{path}: it is damaged, {error} is missing") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from None
    except (
        TypeError,
        AttributeError,
        IndexError,
        RuntimeError,
        OverflowError,
        MemoryError,
    ):  # a column of another kind than ours
        raise ValueError(f"{path}: it is damaged, or something else than a run's rollouts") from None
    finally:
        pa.default_memory_pool().release_unused()  # arrow keeps what it read into for the next time


class _OtherHalf:
    """Part of a file that another core reads: whether it is intact, its long texts, and the numbers of each pass."""

    def __init__(self, pool: ThreadPoolExecutor, path: Path, file: BinaryIO) -> None:
        self._pool, self._path, self._file = pool, path, file
        self.texts = pool.submit(self._texts)

    def _texts(self) -> dict[str, pa.Array]:
        if not was_intact(self._path, self._file):
            raise ValueError(CHANGED)
        column = RolloutColumns(self._file, coded=[Pieces.COLUMN])
        return {name: column[name] for name in ("pieces", "text")}

    def passes(self, rows: TokenTensors, has: Bool[Tensor, "B E"]) -> "Future[list[Float[Tensor, 'E N']]]":
        """Log-probs and entropies."""

        def read() -> list[Tensor]:
            column = RolloutColumns(self._file)
            return [rows.nested(column[name], has) for name in ("current_logprobs", "entropy")]

        return self._pool.submit(read)


def _step(column: RolloutColumns, number: int, metadata: Mapping[str, Any], other: _OtherHalf) -> StoredStep:
    for update in metadata["updates"]:
        _ = update["version"], update["skipped"], update["value_only"]
    tokens = column["tokens"]
    lengths = torch.from_numpy(np.diff(offsets(tokens)))
    rows_updates = column["updates"]
    counts = torch.from_numpy(np.diff(offsets(rows_updates)))
    max_passes = int(counts.max()) if len(counts) else 0
    _check_size(lengths, max_passes)
    rows = TokenTensors(TokenLayout(lengths))
    has = torch.arange(max_passes) < counts.unsqueeze(1)
    updates = torch.full((len(lengths), max_passes), -1)
    passes = other.passes(rows, has)
    updates[has] = torch.from_numpy(rows_updates.flatten().to_numpy().astype(np.int64))
    if max_passes and int(updates.max()) >= len(metadata["updates"]):
        raise ValueError("it is damaged: a row belongs to an update that is missing")
    batch = _batch(column, rows, lengths, rows(tokens).int())  # half as wide as in training, and there are millions
    del tokens
    long, (current, entropy) = other.texts.result(), passes.result()
    if "rollout_entropy" in column and (not max_passes or bool(entropy.isnan().any())):
        # Else every token has a later one.
        batch = replace(batch, rollout_entropy=rows(column["rollout_entropy"]))
    check_lengths(long["pieces"], lengths)
    return StoredStep(
        number=number,
        metadata=metadata,
        batch=batch,
        state=column["state"].to_pylist(),
        sibling=column["sibling"].to_pylist(),
        problem=column["problem"].to_pylist(),
        prompt=column["prompt"].to_pylist(),
        text=long["text"].to_pylist(),
        answer=[answer or "" for answer in column["answer"].to_pylist()],
        parts=[dict(part) for part in column["parts"].to_pylist()],
        pieces=Pieces(long["pieces"]),
        turns=read_turns(_texts(column, "turns", len(lengths)), lengths.tolist()),
        messages=read_messages(_texts(column, "messages", len(lengths))),
        updates=updates.T.contiguous(),
        current=current,
        entropy=entropy,
    )


def _texts(column: RolloutColumns, name: str, count: int) -> list[str | None]:
    """A column that older files, and steps without it, do not have."""
    return column[name].to_pylist() if name in column else [None] * count


def _check_size(lengths: Int[Tensor, " B"], passes: int) -> None:
    """Refuse steps that are too large for memory: a small compressed file may hold very many equal numbers."""
    tokens = int(lengths.sum())
    size, sizes = max(tokens, len(lengths)), f"it has {len(lengths):,} completions of {tokens:,} tokens"
    if size > MAX_TOKENS:
        raise ValueError(f"{sizes}, more than the {MAX_TOKENS:,} that are held at once")
    if size * passes > MAX_PASSED:
        raise ValueError(f"{sizes} in {passes:,} passes, more than the {MAX_PASSED:,} that are held at once")


def _batch(
    column: RolloutColumns, rows: TokenTensors, lengths: Int[Tensor, " B"], tokens: Int[Tensor, " N"]
) -> FlatBatch:
    group = torch.from_numpy(column["group"].to_numpy().astype(np.int64))
    if len(group) and not 0 <= int(group.min()) <= int(group.max()) < len(group):
        raise ValueError("it is damaged: groups are not numbered from 0")
    prompts: dict[int, tuple[int, ...]] = {}
    prompt_tokens, left = column["prompt_tokens"], MAX_PROMPTED
    for row, number in enumerate(group.tolist()):
        if number not in prompts:
            left -= len(prompt_tokens[row].values or ())
            if left < 0:
                raise ValueError(f"its prompts have more than the {MAX_PROMPTED:,} tokens that are held at once")
            prompts[number] = tuple(prompt_tokens[row].as_py())

    names = ("ref_logprobs", "teacher_logprobs", "values", "returns", "turn_rewards", "step_rewards")
    mask = rows(column["mask"])
    sampled = rows(column["sampled"]) if "sampled" in column else torch.ones_like(mask)  # absent: all were
    sampler, old = rows(column["rollout_logprobs"]), rows(column["old_logprobs"])
    return FlatBatch(
        prompts=tuple(prompts.get(number, ()) for number in range(max(prompts, default=-1) + 1)),
        tokens=tokens,
        lengths=lengths,
        sampled=mask if torch.equal(mask, sampled) else sampled,  # often the same, and kept once
        mask=mask,
        group=group,
        outcome=torch.from_numpy(column["outcome"].to_numpy(zero_copy_only=False).copy()),
        rewards=torch.from_numpy(column["reward"].to_numpy(zero_copy_only=False).copy()),
        truncated=torch.from_numpy(column["truncated"].to_numpy(zero_copy_only=False).copy()),
        version=torch.from_numpy(column["version"].to_numpy().copy()),
        rollout_logprobs=sampler,
        old_logprobs=sampler if torch.equal(sampler, old) else old,
        advantages=rows(column["advantages"]),
        **{name: rows(column[name]) for name in names if name in column},
        **_routes(column, rows, group, len(prompts)),
    )


def _routes(column: RolloutColumns, rows: TokenTensors, group: Int[Tensor, " B"], prompts: int) -> dict[str, Any]:
    """The replayed experts, if there are any."""
    if "routes" not in column or not len(group):
        return {}
    shape = (-1, column["route_layers"][0].as_py(), column["route_experts"][0].as_py())
    first = [int((group == number).nonzero()[0]) for number in range(prompts)]
    routes_of_prompts = column["prompt_routes"]
    by_prompt = [flat(routes_of_prompts.slice(row, 1)).reshape(shape) for row in first]
    routes = rows(column["routes"], entries=shape[1] * shape[2]).reshape(shape)
    return {"routes": routes, "prompt_routes": tuple(by_prompt)}
