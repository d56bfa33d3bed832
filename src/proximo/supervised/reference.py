"""Log-probs of ranked completions under the reference model: computed once and kept in a file."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from proximo.models import score_rows
from proximo.models.model_types import PreTrainedModel
from proximo.supervised.encoding import Encoded, EncodedRows, Prepared, to_rows
from proximo.system.folders import whole_file
from proximo.system.opening import open_file, replacing, without_links

Sums = tuple[tuple[float, ...], ...]
"""Log-probs of each ranking's completions, summed over their tokens."""


@dataclass(frozen=True)
class Reference:
    train: Sums
    held_out: Sums
    data: str
    """Fingerprint of the tokens."""
    weights: str
    """Fingerprint of the model."""


def micro_batched(items: Sequence[Encoded], batch: int, token_budget: int) -> Iterator[tuple[range, EncodedRows]]:
    """All items in order, in micro-batches: the range of item numbers and their rows.

    The same items are always split in the same way, so that repeated passes agree to the last bit.
    """
    for start in range(0, len(items), batch):
        numbers = range(start, min(start + batch, len(items)))
        rows = to_rows(items[numbers.start : numbers.stop])
        yield from ((numbers, rows.at(part)) for part in rows.parts(token_budget))


@torch.no_grad()
def summed_logprobs(model: PreTrainedModel, rows: Sequence[EncodedRows]) -> list[list[float]]:
    """Log-probs of all rows of each micro-batch, summed over their tokens."""
    return [score_rows(model, part).logprobs.sum(dim=1).tolist() for part in rows]


def compute_reference(
    scored: Callable[[Sequence[EncodedRows]], list[list[float]]],
    prepared: Prepared,
    weights: str,
    batch: int,
    token_budget: int,
) -> Reference:
    """Score all items in one pass. `scored` gives the reference model's log-probs of each micro-batch's rows, and
    `weights` is that model's fingerprint."""

    def sums(items: Sequence[Encoded]) -> Sums:
        logprobs: list[list[float]] = [[] for _ in items]
        parts = list(micro_batched(items, batch, token_budget))
        for (numbers, rows), values in zip(parts, scored([rows for _, rows in parts]), strict=True):
            for number, value in zip(rows.group.tolist(), values, strict=True):
                logprobs[numbers[number]].append(value)
        return tuple(map(tuple, logprobs))

    return Reference(sums(prepared.train), sums(prepared.held_out), data_fingerprint(prepared), weights)


def write_reference(path: Path, reference: Reference, prepared: Prepared) -> None:
    """Write one row per completion; the fingerprints are in the schema's metadata."""
    rows = [
        {"split": split, "place": item.location, "rank": rank, "tokens": len(tokens), "logprob": logprob}
        for split, items, sums in (
            ("train", prepared.train, reference.train),
            ("held_out", prepared.held_out, reference.held_out),
        )
        for item, logprobs in zip(items, sums, strict=True)
        for rank, (tokens, logprob) in enumerate(zip(item.completions, logprobs, strict=True))
    ]
    table = pa.Table.from_pylist(rows)
    metadata = {"data": reference.data, "weights": reference.weights}
    with whole_file(path) as partial, replacing(partial) as file:
        pq.write_table(table.replace_schema_metadata(metadata), file)


def read_reference(path: str, prepared: Prepared) -> Reference:
    """Read what `write_reference` wrote; refused if it belongs to other tokens."""
    try:
        with open_file(without_links(path)) as file:
            table = pq.read_table(file)
        metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        data, weights, logprobs = metadata["data"], metadata["weights"], table.column("logprob").to_pylist()
    except (OSError, pa.ArrowException, KeyError) as error:
        raise ValueError(
            f"reference_logprobs is {path!r}: not a reference.parquet of an earlier run; {error}"
        ) from error
    if data != data_fingerprint(prepared):
        raise ValueError(
            f"reference_logprobs is {path!r}: it was computed for other data, or with another tokenizer, "
            "data.max_tokens or data.held_out; leave it out to compute it again"
        )
    flat = iter(logprobs)
    train, held_out = (
        tuple(tuple(next(flat) for _ in item.completions) for item in items)
        for items in (prepared.train, prepared.held_out)
    )
    return Reference(train, held_out, data, weights)


def data_fingerprint(prepared: Prepared) -> str:
    """A hash of the tokens and their order."""
    digest = hashlib.sha256()
    for split, items in (("train", prepared.train), ("held_out", prepared.held_out)):
        for item in items:
            digest.update(json.dumps((split, item.prompt, item.completions)).encode())
    return digest.hexdigest()


def weights_fingerprint(model: PreTrainedModel, dtype: torch.dtype | None = None) -> str:
    """A hash of the parameters' names and values; in `dtype`, if they are kept wider than they compute."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        value = parameter.detach().to(dtype or parameter.dtype)
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.cpu().flatten().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
