"""Parquet files that carry the SHA-256 of their own bytes: what a disk or a copy has changed is found, footer included.

The checksum stands between the last page and the footer. Readers of Parquet find both by their places and never look
there, so that every one of them reads a sealed file.
"""

import hashlib
from pathlib import Path

MAGIC = b"PAR1"
"""How a Parquet file begins and ends."""
TAIL = 8
"""Bytes behind the footer: its length and the magic."""
DIGEST = hashlib.sha256().digest_size


def seal(path: Path) -> None:
    """Put the checksum into a Parquet file that was just written."""
    with path.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        size = file.seek(0, 2)
        file.seek(size - TAIL)
        start = size - TAIL - int.from_bytes(file.read(TAIL - len(MAGIC)), "little")
        file.seek(start)
        footer = file.read()
        file.seek(start)
        file.write(digest + footer)


def is_intact(data: bytes) -> bool:
    """Whether a sealed file has the bytes that it was sealed with."""
    if len(data) < TAIL or not data.endswith(MAGIC):
        return False
    start = len(data) - TAIL - int.from_bytes(data[-TAIL : -len(MAGIC)], "little")
    if start < DIGEST:
        return False
    view = memoryview(data)
    found = hashlib.sha256(view[: start - DIGEST])
    found.update(view[start:])
    return found.digest() == view[start - DIGEST : start]
