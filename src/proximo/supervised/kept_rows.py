"""Encoded rows of a large file, kept in the user's cache: the same file, tokenizer and options give them at once.

What the rows depend on is in the key: the content of the files, the tokenizer with its chat template, the options, and
the code of this version. Only what took long is kept.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from proximo.data import DataFile, read_examples, read_rankings
from proximo.data.locating import data_files
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.tokens.keys import tokens_key
from proximo.supervised.limits import Encoded
from proximo.system.caches import Cache
from proximo.system.folders import file_hash
from proximo.system.opening import without_links

CACHE = Cache("tokens", max_bytes=4 << 30)
LARGE = 4 << 20
"""Bytes of data from which on encoded rows are looked for."""
READERS = (read_examples, read_rankings)
"""Readers whose rows depend on the file and their options alone."""


@dataclass(frozen=True)
class KeptRows:
    """Rows of a file as they were prepared, with the numbers that are told about them."""

    train: list[Encoded]
    held_out: list[Encoded]
    mistakes: list[tuple[str, str]]
    """Location and mistake of rows that were skipped."""
    left_out: int
    cut: int
    again: bool
    """True if the held-out rows were chosen by the second hash."""


def rows_key(
    data: DataFile, read: Callable[..., Any], tokenizer: PreTrainedTokenizerBase, ends: Collection[int]
) -> str | None:
    """Key of all that the rows depend on; None where they are few, or it is not known."""
    reader, options = (read.func, read.keywords) if isinstance(read, partial) else (read, {})
    if reader not in READERS:
        return None
    try:
        files = [file for path in _paths(data) for file in data_files(path, "data")]
        if sum(Path(file).stat().st_size for file in files) < LARGE:
            return None
        contents = [(file, file_hash(without_links(file))) for file in files]
    except (OSError, ValueError):  # refused where it is read
        return None
    return tokens_key(tokenizer, map(repr, (contents, reader.__qualname__, options, data, sorted(ends))))


def _paths(data: DataFile) -> list[str]:
    return [data.path, *([data.held_out] if isinstance(data.held_out, str) else [])]


def read_kept(key: str) -> KeptRows | None:
    """Rows that are kept under a key; None if there are none."""
    content = CACHE.read(key)
    if content is None:
        return None
    try:
        return _unpacked(content)
    except (ValueError, LookupError, TypeError, SafetensorError):
        CACHE.remove(key)
        return None


def keep(key: str, rows: KeptRows) -> None:
    """Keep rows under a key."""
    CACHE.write(key, _packed(rows))


# As bytes


def _packed(rows: KeptRows) -> bytes:
    items = [*rows.train, *rows.held_out]
    completions = [tokens for item in items for tokens in item.completions]
    trained = [item.trained for item in items if item.trained is not None]
    words = {
        "locations": [item.location for item in items],
        "mistakes": rows.mistakes,
        "numbers": [len(rows.train), rows.left_out, rows.cut, int(rows.again)],
    }
    arrays = {
        "words": np.frombuffer(json.dumps(words).encode(), np.uint8),
        **_flat("prompts", [item.prompt for item in items], np.uint32),
        **_flat("completions", completions, np.uint32),
        **_flat("trained", trained, np.bool_),
        "counts": np.array([len(item.completions) for item in items], np.uint32),
        "margins": np.array([np.nan if item.margin is None else item.margin for item in items], np.float64),
        "closed": np.array([item.closed for item in items], np.uint32),
        "apart": np.array([item.is_apart for item in items], np.bool_),
        "partly": np.array([item.trained is not None for item in items], np.bool_),
    }
    return save(arrays)


def _flat(name: str, rows: Sequence[Sequence[int]], kind: type) -> dict[str, np.ndarray]:
    """Rows of different lengths as one array, with where each ends."""
    lengths = np.array([len(row) for row in rows], np.int64)
    flat = np.fromiter((each for row in rows for each in row), kind, int(lengths.sum()))
    return {name: flat, f"{name}_ends": np.cumsum(lengths)}


def _unpacked(content: bytes) -> KeptRows:
    arrays = load(content)
    words = json.loads(arrays["words"].tobytes())
    prompts, completions, trained = (_rows(arrays, name) for name in ("prompts", "completions", "trained"))
    texts, masks = iter(completions), iter(trained)
    items = [
        Encoded(location, prompt, tuple(next(texts) for _ in range(count)), margin, closed, mask, is_apart)
        for location, prompt, count, margin, closed, mask, is_apart in zip(
            words["locations"],
            prompts,
            arrays["counts"].tolist(),
            [None if margin != margin else margin for margin in arrays["margins"].tolist()],
            arrays["closed"].tolist(),
            [next(masks) if is_partly else None for is_partly in arrays["partly"].tolist()],
            arrays["apart"].tolist(),
            strict=True,
        )
    ]
    train, left_out, cut, again = words["numbers"]
    mistakes = [(location, what) for location, what in words["mistakes"]]
    return KeptRows(items[:train], items[train:], mistakes, left_out, cut, bool(again))


def _rows(arrays: dict[str, np.ndarray], name: str) -> list[tuple[Any, ...]]:
    flat, ends = arrays[name], [0, *arrays[f"{name}_ends"].tolist()]
    # Equal numbers are one object each, as little memory as there is.
    objects = np.arange(int(flat.max(initial=0)) + 1).astype(object) if flat.dtype == np.uint32 else None
    values = flat.tolist() if objects is None else objects[flat].tolist()
    return [tuple(values[start:end]) for start, end in pairwise(ends)]
