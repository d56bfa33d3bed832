"""Copies of large Parquet files in the user's cache, from which single rows can be read.

A row group of Parquet has a million rows, all of which must be unpacked to read one. The copy has the same values in
batches of a few hundred. It is named after the file's content, so that later runs find it.
"""

import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from proximo.data.rows import file_state
from proximo.system.caches import cache_folder, is_own
from proximo.system.folders import PARTIAL, whole_file
from proximo.system.opening import make_folder, names, open_file, remove, rename, replacing, without_links
from proximo.system.slow_work import told_while_slow

if TYPE_CHECKING:
    from io import BytesIO

MAX_ROWS, MAX_VALUES, MAX_BYTES = 200_000_000, 1 << 32, 64 << 30
"""Rows, values and unpacked bytes of a file that is copied."""
MAX_SHARED = 16 << 20
"""Bytes of a page from which many rows take their texts: a batch of rows then takes 4 GiB at most."""
TOGETHER = 256
"""Rows of a batch of the copy."""
LAYOUT = "1"
"""Version of the copies."""
UNUSED, ABANDONED = 30 * 24 * 3600.0, 24 * 3600.0
"""Seconds after which a copy that nobody read is removed, and one that was never finished."""
ROWS = b"rows"
"""Key of the number of rows in a copy's schema."""


def copied(file: str, field: str) -> Path:
    """The copy of a file, which is made if there is none; `field` is the config field named in errors.

    Example: copied("train.parquet", "data") == copies_folder() / "5c1b….arrow"
    """
    try:
        with open_file(without_links(file)) as opened:
            before = _state(opened)
            path = copies_folder() / f"{_digest(file, opened)[:32]}-{LAYOUT}.arrow"
            if not is_kept(path):
                _copy(file, opened, path, before)
    except (OSError, ValueError) as error:
        raise ValueError(f"{field} is {file!r}: it cannot be read, {error}") from error
    except MemoryError:
        raise ValueError(f"{field} is {file!r}: it cannot be read, there is not enough memory: give a part") from None
    return path


def copies_folder() -> Path:
    """Folder of the copies, which only this user may use."""
    if (folder := cache_folder("rows")) is None:
        raise OSError("there is no home folder to copy its rows to: set XDG_CACHE_HOME to a folder of your own")
    return folder


def is_kept(path: Path) -> bool:
    """Tell whether a file is in the cache, and nobody else can have written it; its time says that it is used."""
    try:
        is_there = is_own(path.lstat()) and is_own(path.parent.lstat()) and stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
    with suppress(OSError):
        os.utime(path)
    return is_there


@contextmanager
def keeping(path: Path) -> Iterator[Path]:
    """A temporary name for a file of the cache, which becomes `path` at the end; what nobody uses is removed."""
    folder = path.parent
    try:
        make_folder(folder, mode=0o700)
        if not is_own(folder.lstat()):
            raise OSError("others can write there")
        _tidy(folder)
        # Each process has a name of its own: two may write the same file.
        alone = path.with_name(f"{path.stem}-{os.getpid()}{path.suffix}")
        with whole_file(alone) as partial:
            yield partial
        rename(alone, path)
    except OSError as error:
        raise OSError(
            f"its rows are copied to {folder}, which fails: {error.strerror or error}; set XDG_CACHE_HOME to a folder "
            "of your own with room"
        ) from error


def _tidy(folder: Path) -> None:
    """Remove what was not used for long."""
    for name in names(folder):
        with suppress(OSError):
            if time.time() - (folder / name).lstat().st_mtime > (ABANDONED if name.endswith(PARTIAL) else UNUSED):
                remove(folder / name)


_digests: dict[str, tuple[tuple[int, ...], str]] = {}
"""State and digest of files whose content was read."""


def _digest(file: str, opened: BinaryIO) -> str:
    """SHA-256 of a file, which is read once as long as it does not change."""
    state, known = file_state(file), _digests.get(file)
    if state is not None and known is not None and known[0] == state:
        return known[1]
    digest = hashlib.file_digest(cast("BytesIO", opened), "sha256").hexdigest()
    if state is not None:
        _digests[file] = state, digest
    return digest


# Writing


def _copy(file: str, opened: BinaryIO, path: Path, before: tuple[int, ...]) -> None:
    """Write the copy of a file that was in this state before it was read."""
    # Imported late, because only these files need it.
    from proximo.system.parquet import TableLimits, open_parquet

    limits = TableLimits(MAX_ROWS, MAX_VALUES, MAX_BYTES, MAX_SHARED)
    # Of a large row group no more is read than is needed next.
    parquet = open_parquet(opened, limits, buffer_size=1 << 20, pre_buffer=False)
    with keeping(path) as partial:
        _write(file, parquet, partial)
        if _state(opened) != before:
            raise ValueError("it changed while it was read: start again when it is whole")


def _write(file: str, parquet: Any, partial: Path) -> None:
    """Write all rows, their number first."""
    from pyarrow import ArrowInvalid, PythonFile, ipc

    from proximo.system.parquet import refuse_size

    rows, number, size = parquet.metadata.num_rows, 0, 0
    options = ipc.IpcWriteOptions(compression="zstd")
    schema = _plain_schema(parquet.schema_arrow).with_metadata({ROWS: str(rows)})
    batches = told_while_slow(_batches(parquet), f"rows of {file} copied", rows, each=TOGETHER)
    try:
        with replacing(partial) as target, ipc.new_file(PythonFile(target, "w"), schema, options=options) as writer:
            for batch in batches:
                number, size = number + batch.num_rows, size + batch.nbytes
                refuse_size(size, MAX_BYTES)
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    except ArrowInvalid as error:
        raise ValueError(f"it is damaged: {_first_line(error)}") from error
    if number != rows:
        raise ValueError(f"it is damaged: it has {number:,} rows where its footer says {rows:,}")


def _plain_schema(schema: Any) -> Any:
    """A schema whose columns of numbered values have the values themselves."""
    import pyarrow as pa

    kinds = ((field, field.type) for field in schema)
    return pa.schema(
        [field.with_type(kind.value_type) if pa.types.is_dictionary(kind) else field for field, kind in kinds]
    )


def _batches(parquet: Any) -> Iterator[Any]:
    """The rows in batches, of which only the last has fewer than others."""
    import pyarrow as pa

    kept: list[Any] = []
    try:
        for batch in parquet.iter_batches(TOGETHER, use_threads=False):
            batch.validate(full=True)
            kept.append(_plain(batch))
            while sum(each.num_rows for each in kept) >= TOGETHER:
                whole = kept[0] if len(kept) == 1 else pa.concat_batches(kept)
                yield whole.slice(0, TOGETHER)
                kept = [whole.slice(TOGETHER)] if whole.num_rows > TOGETHER else []
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"it is damaged: {_first_line(error)}") from error
    if kept:
        yield pa.concat_batches(kept)


def _plain(batch: Any) -> Any:
    """A batch whose columns of numbered values have the values themselves."""
    import pyarrow as pa

    columns = (
        column.dictionary_decode() if pa.types.is_dictionary(column.type) else column for column in batch.columns
    )
    return pa.RecordBatch.from_arrays(list(columns), names=batch.schema.names)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]


def _state(opened: BinaryIO) -> tuple[int, ...]:
    now = os.fstat(opened.fileno())
    return now.st_size, now.st_mtime_ns, now.st_ctime_ns
