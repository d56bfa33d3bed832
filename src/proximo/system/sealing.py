"""Files with a SHA-256 of their own content, which detects any change: Parquet, and tables of JSON.

In Parquet the checksum is between the last page and the footer. Readers find both by their offsets and never look
there, so all of them can read a sealed file.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from proximo.system.opening import writing

MAGIC = b"PAR1"
"""First and last bytes of a Parquet file."""
TAIL = 8
"""Bytes after the footer: its length and the magic."""
BLOCK = 1 << 20
DIGEST = hashlib.sha256().digest_size
SEALED, HASH = "sealed", "sha256"
"""Fields of a sealed table: that it is, so that a hash whose own name was changed is missed; and the hash of the
rest."""


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
    """Tell whether a sealed file is unchanged. Reads it whole, a block at a time."""
    size = file.seek(0, 2)
    if size < TAIL:
        return False
    file.seek(size - TAIL)
    tail = file.read(TAIL)
    start = size - TAIL - int.from_bytes(tail[: -len(MAGIC)], "little")
    if not tail.endswith(MAGIC) or start < DIGEST:
        return False
    file.seek(0)
    computed = hashlib.sha256()
    _update(computed, file, start - DIGEST)
    digest = file.read(DIGEST)
    _update(computed, file, size - start)
    return computed.digest() == digest


def _update(computed: "hashlib._Hash", file: BinaryIO, count: int) -> None:
    while count > 0 and (block := file.read(min(count, BLOCK))):
        computed.update(block)
        count -= len(block)


def sealed(table: Mapping[str, object]) -> dict[str, object]:
    """The table with the hash of its content, in place of one that it had.

    Example: path.write_text(json.dumps(sealed({"steps": 3})))
    """
    content = {name: value for name, value in table.items() if name != HASH} | {SEALED: True}
    return content | {HASH: _hash(json.loads(json.dumps(content)))}


def is_as_sealed(table: Mapping[str, Any]) -> bool:
    """Tell whether a table that was read from JSON is as it was written; True for tables that were never sealed."""
    content = dict(table)
    known = content.pop(HASH, None)
    if known is None:
        return SEALED not in content
    try:
        return known == _hash(content)
    except RecursionError:  # nothing that we write is nested so deeply
        return False


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
