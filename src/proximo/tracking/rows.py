"""New rows of a .jsonl file that grows, and that a resumed run may cut back."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from proximo.storage.lines import to_row, whole_lines
from proximo.storage.opening import UnsafeFile, open_file
from proximo.tracking.position import Place

Row = dict[str, Any]


def new_rows(
    path: Path, place: Place, *, is_over: bool, resumed_after: Callable[[], int]
) -> Iterator[tuple[Row | None, Place]]:
    """Rows after a place, each with the place behind it. None: what was sent before has been replaced by other rows,
    which follow.

    A file that has become shorter belongs to a resumed run, which writes the same rows again: until it has passed the
    place nothing is new. If it then has other rows there, those after step `resumed_after()` follow.
    """
    try:
        file = open_file(path)
    except UnsafeFile:
        raise
    except OSError:
        return
    with file:
        if file.seek(0, 2) < place.offset and not is_over:
            return
        if place.offset and not _is_there(file, place):
            place = _first_after(file, resumed_after())
            yield None, place
        file.seek(place.offset)
        for line in whole_lines(file):
            row = to_row(line)
            place = _behind(place, file.tell(), line or b"", row)
            if row is not None:
                yield row, place


def _is_there(file: BinaryIO, place: Place) -> bool:
    """Whether the last row that was sent is still where it was."""
    file.seek(place.offset - place.length)
    return hashlib.sha256(file.read(place.length)).hexdigest() == place.digest


def _first_after(file: BinaryIO, step: int) -> Place:
    """The place before the first row of a later step."""
    file.seek(0)
    place = Place()
    for line in whole_lines(file):
        row = to_row(line)
        if row is not None and step_of(row) > step:
            break
        place = _behind(place, file.tell(), line or b"", row)
    return place


def _behind(place: Place, offset: int, line: bytes, row: Row | None) -> Place:
    step = place.step if row is None else max(place.step, step_of(row))
    return replace(place, offset=offset, length=len(line), digest=hashlib.sha256(line).hexdigest(), step=step)


def step_of(row: Row) -> int:
    step = row.get("step")
    return step if isinstance(step, int) else 0
