"""Hash and length of the prompt of each row of a large file, and whether to train on it.

It takes minutes to make for ten million rows, so it is kept in the user's cache beside the copy of the rows.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from proximo.data import Prompt, Row
from proximo.data.row_copies import copies_folder, is_kept, keeping
from proximo.data.splits import ENOUGH, held_out_hash, number_again, prompt_key, second_hash
from proximo.data.stored import StoredRows
from proximo.system.opening import open_file, replacing
from proximo.system.slow_work import told_while_slow
from proximo.system.version import __version__

NAMED = 100_000
"""Bad rows that are named; more are counted."""
LAYOUT = "1"
"""Version of the kept file."""
MAX_HEADER = 256 << 20
"""Bytes of the kept file's first line."""


@dataclass(frozen=True)
class CheckedPrompt:
    """Prompt of a row, as its check read it."""

    prompt: Prompt
    is_kept: bool = True
    """False: the row is not trained on, such as for its pass rate."""


CheckRow = Callable[[Row], CheckedPrompt]
"""Checks a row; ValueError says what is wrong with it."""


@dataclass(frozen=True)
class RowIndex:
    """Hash and length of each row's prompt, and whether it is kept, in the order of the rows."""

    hashes: np.ndarray
    """Hash of each prompt, by which prompts are held out."""
    lengths: np.ndarray
    """Characters of each prompt; 0: the row is bad."""
    kept: np.ndarray
    """True for each row that may be trained on."""
    mistakes: tuple[tuple[str, str], ...] = ()
    """Location and mistake of the first bad rows."""

    @property
    def bad(self) -> int:
        """Number of bad rows."""
        return int((self.lengths == 0).sum())


def index_of(rows: Sequence[Row], check: CheckRow, settings: str, path: str) -> RowIndex:
    """Check every row, or read what an earlier check of the same rows found; `settings` names all that the check
    depends on besides the rows, `path` the data for a person."""
    if not isinstance(rows, StoredRows):
        return _made(rows, check, path)
    key = f"{rows.key} {settings} {__version__} {LAYOUT}"
    file = copies_folder() / f"{hashlib.sha256(key.encode(errors='surrogatepass')).hexdigest()[:32]}.index"
    if (known := _read(file, len(rows))) is not None:
        return known
    made = _made(rows, check, path)
    with keeping(file) as partial, replacing(partial) as target:
        _write(target, made)
    return made


def _made(rows: Sequence[Row], check: CheckRow, path: str) -> RowIndex:
    hashes, lengths, kept = (np.zeros(len(rows), kind) for kind in _KINDS)
    mistakes: list[tuple[str, str]] = []
    remaining = told_while_slow(rows, f"rows of {path} checked", len(rows))
    start = 0
    while part := [_known(row, check, mistakes) for row in islice(remaining, _PIECE)]:
        end = start + len(part)
        hashes[start:end], lengths[start:end], kept[start:end] = zip(*part, strict=True)
        start = end
    return RowIndex(hashes, lengths, kept, tuple(mistakes))


def _known(row: Row, check: CheckRow, mistakes: list[tuple[str, str]]) -> tuple[int, int, bool]:
    """Hash and length of a row's prompt, and whether it is kept; a bad row is one of the mistakes."""
    try:
        checked = check(row)
    except ValueError as error:
        if len(mistakes) < NAMED:
            mistakes.append((row.location, str(error)))
        return 0, 0, False
    return held_out_hash(prompt_key(checked.prompt)), _characters(checked.prompt), checked.is_kept


def _characters(prompt: Prompt) -> int:
    texts = (prompt,) if isinstance(prompt, str) else (turn["content"] for turn in prompt)
    return max(1, sum(map(len, texts)))


_PIECE = 1 << 14
"""Rows that are looked at together: a number for each of all rows takes more memory than what is kept of them."""
_TOP = np.uint64(60)


def positions(is_wanted: Callable[[slice], np.ndarray], rows: int) -> np.ndarray:
    """Indices of the wanted ones of so many rows, in four bytes each."""
    pieces = (slice(start, start + _PIECE) for start in range(0, rows, _PIECE))
    parts = [(np.flatnonzero(is_wanted(piece)) + piece.start).astype(np.uint32) for piece in pieces]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint32)


# Splits


def held_out_rows(index: RowIndex, share: float) -> np.ndarray:
    """True for each row whose prompt's hash holds it out, for a share of the prompts."""
    bound = min(math.ceil(share * 2**64), 2**64)
    good = index.lengths > 0
    return good & (index.hashes <= np.uint64(bound - 1)) if bound else np.zeros_like(good)


def held_out_again(index: RowIndex, share: float, rows: Sequence[Row], check: CheckRow, path: str) -> np.ndarray:
    """True for each row whose prompt's second hash holds it out, where the first hash holds out none."""
    good = index.lengths > 0
    different = len(np.unique(index.hashes[good]))
    if not share or different < ENOUGH:
        return np.zeros_like(good)
    checked = told_while_slow(zip(rows, good.tolist(), strict=True), f"rows of {path} split", len(rows))
    keys = (prompt_key(check(row).prompt) if is_good else None for row, is_good in checked)
    hashes = np.array([0 if key is None else second_hash(key) for key in keys], dtype=np.uint64)
    return good & (hashes <= np.unique(hashes[good])[number_again(different, share) - 1])


def rows_of_hashes(index: RowIndex, positions: np.ndarray, keys: Collection[str]) -> np.ndarray:
    """Positions whose prompts have the hashes of these keys."""
    hashes = np.array([held_out_hash(key) for key in keys], dtype=np.uint64)
    return positions[np.isin(index.hashes[positions], hashes)]


@dataclass(frozen=True)
class Repeated:
    """Prompts that occur in several rows."""

    prompts: int
    different: int
    """Number of different prompts, of all rows."""
    first: tuple[int, int]
    """Two rows with one prompt."""


def repeated_prompts(index: RowIndex, among: np.ndarray) -> Repeated | None:
    """Count prompts that occur in several of the rows for which `among` is true; None if none does."""
    prompts = different = 0
    first: tuple[int, int] | None = None
    for part in range(16):  # a sixteenth at a time, to take little memory
        inside = positions(lambda piece, part=part: among[piece] & (index.hashes[piece] >> _TOP == part), len(among))
        order = inside[np.argsort(index.hashes[inside], kind="stable")]
        equal = index.hashes[order[1:]] == index.hashes[order[:-1]]
        begins = equal & ~np.concatenate([[False], equal[:-1]]) if len(equal) else equal
        prompts, different = prompts + int(begins.sum()), different + len(order) - int(equal.sum())
        pairs = [(int(order[at]), int(order[at + 1])) for at in np.flatnonzero(begins)]
        first = min([*pairs, *([first] if first else [])], default=None)
    return None if first is None else Repeated(prompts, different, first)


# The kept file


_KINDS = (np.uint64, np.uint32, np.bool_)


def _write(target: BinaryIO, index: RowIndex) -> None:
    target.write(json.dumps([len(index.hashes), index.mistakes]).encode() + b"\n")
    for values in (index.hashes, index.lengths, index.kept):
        target.write(values.data)


def _read(file: Path, rows: int) -> RowIndex | None:
    """The index in a file; None where there is none that fits."""
    if not is_kept(file):
        return None
    try:
        with open_file(file) as opened:
            count, mistakes = json.loads(opened.readline(MAX_HEADER))
            hashes, lengths, kept = (_values(opened, kind, rows) for kind in _KINDS)
    except (OSError, ValueError, TypeError):
        return None
    known = tuple((str(at), str(what)) for at, what in mistakes)
    return RowIndex(hashes, lengths, kept, known) if count == rows else None


def _values(opened: BinaryIO, kind: Any, rows: int) -> np.ndarray:
    data = opened.read(rows * np.dtype(kind).itemsize)
    return np.frombuffer(data, kind, rows)
