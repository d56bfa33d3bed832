"""Parquet files with a SHA-256 of their own bytes, which detects any change, footer included.

The checksum is between the last page and the footer. Parquet readers find both by their offsets and never look
there, so all of them can read a sealed file.
"""

import hashlib
from pathlib import Path

MAGIC = b"PAR1"
"""First and last bytes of a Parquet file."""
TAIL = 8
"""Bytes after the footer: its length and the magic."""
DIGEST = hashlib.sha256().digest_size


def seal(path: Path) -> None:
    """Insert the checksum into a newly written Parquet file."""
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
    """Whether a sealed file is unchanged."""
    if len(data) < TAIL or not data.endswith(MAGIC):
        return False
    start = len(data) - TAIL - int.from_bytes(data[-TAIL : -len(MAGIC)], "little")
    if start < DIGEST:
        return False
    view = memoryview(data)
    found = hashlib.sha256(view[: start - DIGEST])
    found.update(view[start:])
    return found.digest() == view[start - DIGEST : start]
