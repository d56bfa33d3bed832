"""Parquet files with a SHA-256 of their own bytes, which detects any change, footer included.

The checksum is between the last page and the footer. Parquet readers find both by their offsets and never look
there, so all of them can read a sealed file.
"""

import hashlib
from pathlib import Path
from typing import BinaryIO

from proximo.system.opening import writing

MAGIC = b"PAR1"
"""First and last bytes of a Parquet file."""
TAIL = 8
"""Bytes after the footer: its length and the magic."""
BLOCK = 1 << 20
DIGEST = hashlib.sha256().digest_size


def seal(path: Path) -> None:
    """Insert the checksum into a newly written Parquet file."""
    with writing(path) as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        size = file.seek(0, 2)
        file.seek(size - TAIL)
        start = size - TAIL - int.from_bytes(file.read(TAIL - len(MAGIC)), "little")
        file.seek(start)
        footer = file.read()
        file.seek(start)
        file.write(digest + footer)


def is_intact(file: BinaryIO) -> bool:
    """Whether a sealed file is unchanged. Reads it whole, a block at a time."""
    size = file.seek(0, 2)
    if size < TAIL:
        return False
    file.seek(size - TAIL)
    tail = file.read(TAIL)
    start = size - TAIL - int.from_bytes(tail[: -len(MAGIC)], "little")
    if not tail.endswith(MAGIC) or start < DIGEST:
        return False
    file.seek(0)
    found = hashlib.sha256()
    _update(found, file, start - DIGEST)
    digest = file.read(DIGEST)
    _update(found, file, size - start)
    return found.digest() == digest


def _update(found: "hashlib._Hash", file: BinaryIO, count: int) -> None:
    while count > 0 and (block := file.read(min(count, BLOCK))):
        found.update(block)
        count -= len(block)
