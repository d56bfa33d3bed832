"""The file of a step's rollouts: whether it is intact, and the facts in its footer."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from proximo.runs.rollout_files import MAX_FILE, opened
from proximo.runs.rollouts import FACTS, FORMAT
from proximo.system.opening import json_value, open_file
from proximo.system.sealing import is_intact

CHANGED = "its bytes differ from what was written"
LARGE = 8 << 20
"""Bytes above which a file is checked once, and again when it was written; others are checked whenever they are
read."""


def was_intact(path: Path, file: BinaryIO) -> bool:
    """Whether it is unchanged; of a large file, whether it was when that was last looked at, unless it was written
    since: the page and its checks ask at the same time."""
    about = os.fstat(file.fileno())
    if about.st_size <= LARGE:
        return is_intact(file)
    return _large_is_intact(path, about.st_ino, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=256)
def _large_is_intact(path: Path, *stamp: int) -> bool:
    with rollout_file(path) as file:
        return is_intact(file)


def complaint(path: Path) -> str | None:
    """What is wrong with a rollout file, without reading it into tensors; None: nothing, or another version wrote
    it."""
    try:
        file = rollout_file(path)
    except (OSError, ValueError) as error:
        return str(error)
    with file:
        if was_intact(path, file):
            return None
        try:
            return None if facts_of(file).get("format", FORMAT) != FORMAT else CHANGED
        except (OSError, ValueError, RecursionError, pa.ArrowException):
            return CHANGED


def rollout_file(path: Path) -> BinaryIO:
    """The file, open; ValueError if it is too large, OSError if it is a link."""
    file = open_file(path)
    if (size := file.seek(0, 2)) > MAX_FILE:
        file.close()
        raise ValueError(f"it has {size >> 20:,} MiB, more than the {MAX_FILE >> 20:,} MiB that are read at once")
    return file


def facts_of(file: BinaryIO) -> dict[str, Any]:
    """Facts in the file's footer; empty if Proximo did not write it."""
    facts = json_value((opened(file).schema_arrow.metadata or {}).get(FACTS, b"{}"))
    return facts if isinstance(facts, dict) else {}
