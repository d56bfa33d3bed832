"""The file of a step's rollouts: whether it is intact, and the metadata in its footer."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from proximo.runs.rollout_files import MAX_FILE, opened
from proximo.runs.rollouts import FORMAT, METADATA_KEY
from proximo.system.opening import json_value, open_file
from proximo.system.sealing import is_intact

CHANGED = "its bytes differ from what was written"
LARGE = 8 << 20
"""Bytes above which a file is checked once, and again when it was written; others are checked whenever they are
read."""


def was_intact(path: Path, file: BinaryIO) -> bool:
    """True if it is unchanged. A large file is checked again only after it was written: the page and its checks ask at
    the same time."""
    about = os.fstat(file.fileno())
    if about.st_size <= LARGE:
        return is_intact(file)
    return _large_is_intact(path, about.st_ino, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=256)
def _large_is_intact(path: Path, *stamp: int) -> bool:
    with rollout_file(path) as file:
        return is_intact(file)


def complaint(path: Path) -> str | None:
    """Damage to a rollout file in words, without reading it into tensors; None: none, or another version wrote it."""
    try:
        file = rollout_file(path)
    except (OSError, ValueError) as error:
        return str(error)
    with file:
        if was_intact(path, file):
            return None
        try:
            return None if metadata_of(file).get("format", FORMAT) != FORMAT else CHANGED
        except (OSError, ValueError, RecursionError, pa.ArrowException):
            return CHANGED


def rollout_file(path: Path) -> BinaryIO:
    """The file, open; ValueError if it is too large, OSError if it is a link."""
    file = open_file(path)
    if (size := file.seek(0, 2)) > MAX_FILE:
        file.close()
        raise ValueError(f"it has {size >> 20:,} MiB, more than the {MAX_FILE >> 20:,} MiB that are read at once")
    return file


def metadata_of(file: BinaryIO) -> dict[str, Any]:
    """Metadata in the file's footer; empty if Proximo did not write it."""
    metadata = json_value((opened(file).schema_arrow.metadata or {}).get(METADATA_KEY, b"{}"))
    return metadata if isinstance(metadata, dict) else {}
