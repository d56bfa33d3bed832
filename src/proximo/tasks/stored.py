"""Problems of large files, each made of its row when it is drawn.

Splits, order, ids and refusals are those of `FileProblems`: every row is checked before training starts. Only the
tokens of prompts are counted for some: the longest, until enough of them fit, and a sample. One that proves too long
later is refused, or passed over with skip_bad, when it is drawn.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from proximo.data import Mistakes, Row, read_rows, stable_hash
from proximo.data.rows import refuse_absent, shortened
from proximo.data.splits import AGAIN, prompt_key, refuse_same
from proximo.data.stored import stored_rows
from proximo.system.safe_text import counted
from proximo.tasks.draws import shuffled
from proximo.tasks.protocol import Complaints, Split
from proximo.tasks.reading import FileProblems, refuse_bad, refuse_no_rows
from proximo.tasks.row_index import (
    NAMED,
    CheckRow,
    RowIndex,
    held_out_again,
    held_out_rows,
    index_of,
    positions,
    repeated_prompts,
    rows_of_hashes,
)
from proximo.types import Problem

LONGEST = 1024
"""Prompts whose tokens are counted at once, the longest first, until all of them fit."""
SAMPLED = 2048
"""First prompts of each split whose tokens are counted, and number of others drawn at random."""


@dataclass(frozen=True)
class LargeFile:
    """A file whose rows are problems, and what its task makes of a row."""

    path: str
    held_out: float | str
    skip_bad: bool
    problem: Callable[[Row], Problem]
    """Makes a problem of a row; ValueError says what is wrong with it."""
    check: CheckRow
    """Checks a row in less time."""
    settings: str
    """All that the check depends on besides the rows."""
    needed: Mapping[str, Sequence[str]]
    """Columns by the config field that names them; a file must have one of each field."""


@dataclass(frozen=True)
class _Part:
    """The rows of a split."""

    rows: Sequence[Row]
    lengths: np.ndarray
    """Characters of the prompt of each row."""
    positions: np.ndarray
    """Indices of the rows that belong to the split."""

    def __len__(self) -> int:
        return len(self.positions)

    def row(self, number: int) -> Row:
        return self.rows[int(self.positions[number])]

    def longest_first(self) -> Iterator[list[int]]:
        """Numbers of the split's rows, those with long prompts first, in blocks."""
        lengths, count = self.lengths[self.positions], min(LONGEST, len(self))
        if not count:
            return
        # All rows are only sorted where the longest are not enough.
        first = np.flatnonzero(lengths >= np.partition(lengths, len(lengths) - count)[-count])
        yield first[np.argsort(lengths[first], kind="stable")[::-1]][:count].tolist()
        order = np.argsort(lengths, kind="stable")[::-1]
        yield from (order[start : start + LONGEST].tolist() for start in range(count, len(order), LONGEST))

    def sample(self) -> list[int]:
        """Numbers of some rows: the first ones, which evaluation asks, and as many others."""
        count = min(SAMPLED, len(self))
        others = Random(stable_hash("looked at", len(self))).sample(range(len(self)), count)
        return sorted({*range(count), *others})

    def without(self, numbers: Collection[int]) -> "_Part":
        return replace(self, positions=np.delete(self.positions, sorted(numbers))) if numbers else self


def problems_of(
    file: LargeFile, keeps: Callable[[Problem], bool] = lambda problem: True
) -> "FileProblems | StoredProblems":
    """The problems of a file: in memory, or read from disk where it or its held-out data are large."""
    held_out = file.held_out
    large = stored_rows(file.path, "task.path") or (
        stored_rows(held_out, "task.held_out") if isinstance(held_out, str) else None
    )
    if large:
        return StoredProblems(file)
    return FileProblems(file.path, held_out, file.skip_bad, file.problem, keeps, file.needed)


def _chosen(rows: np.ndarray) -> np.ndarray:
    """Indices of the rows for which this is true."""
    return positions(lambda piece: rows[piece], len(rows))


class StoredProblems:
    """The problems of a large file, or of a file with large held-out data."""

    def __init__(self, file: LargeFile) -> None:
        self._file, self._mistakes = file, Mistakes()
        self._complaints: Complaints | None = None
        self._counted = 0
        train, held_out = self._split(*self._read(file.path, "task.path"))
        self._splits: dict[Split, _Part] = {"train": train, "held_out": held_out}
        self._refuse(self._mistakes)
        self._left_out = list(self._mistakes)
        self._refuse_empty()

    def size(self, split: Split) -> int:
        return len(self._splits[split])

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        part = self._splits[split]
        if split == "held_out":
            return self._file.problem(part.row(index % len(part)))
        row = part.row(shuffled(index, len(part), seed))
        return self._judged(row, self._file.problem(row))

    def check(self, complaints: Complaints) -> list[str]:
        """Refuse problems with a complaint, of those that are looked at, all in one error. With skip_bad, drop them and
        return a line for every row left out for any reason. Others are judged when they are drawn."""
        mistakes, self._counted = Mistakes(), 0
        self._splits = {name: self._looked_at(part, complaints, mistakes) for name, part in self._splits.items()}
        self._refuse(mistakes)
        self._refuse_empty()
        self._complaints = complaints
        return [*self._left_out, *mistakes]

    def asked_in_training(self, keys: Collection[str]) -> list[Problem]:
        """Training problems whose prompts have one of these keys."""
        part, file = self._splits["train"], self._file
        index = index_of(part.rows, file.check, file.settings, file.path)
        rows = (part.rows[int(at)] for at in rows_of_hashes(index, part.positions, keys))
        return [problem for row in rows if prompt_key((problem := file.problem(row)).prompt) in keys]

    @property
    def storage_words(self) -> str:
        """Place of the rows, and what of them was checked, for a person."""
        some = f", and the tokens of {self._counted:,}" if self._counted else ""
        return f"read from disk as they are drawn; all rows were checked{some}"

    # The splits

    def _read(self, path: str, field: str) -> tuple[Sequence[Row], RowIndex]:
        """Rows and what is known of each."""
        rows = stored_rows(path, field) or read_rows(path, self._mistakes, field=field)
        for name, columns in self._file.needed.items() if rows else ():
            refuse_absent(rows, columns, f"{field} is {path!r}", name)
        index = index_of(rows, self._file.check, self._file.settings, path)
        if index.bad > NAMED:
            location, what = index.mistakes[0]
            raise ValueError(
                f"{field} is {path!r}: {index.bad:,} of {len(rows):,} rows are bad, more than the {NAMED:,} that can "
                f"be left out, such as {location}: {what}; write it anew without them"
            )
        for mistake in index.mistakes:
            self._mistakes.add(*mistake)
        return rows, index

    def _split(self, rows: Sequence[Row], index: RowIndex) -> tuple[_Part, _Part]:
        """Rows to train on and held-out ones."""
        share, file, self.again_line = self._file.held_out, self._file, None
        good = index.lengths > 0
        if isinstance(share, str):
            refuse_same(file.path, share, "task")
            other, known = self._read(share, "task.held_out")
            away = self._overlapping(rows, index, known)
            held_out = _Part(other, known.lengths, _chosen(known.lengths > 0))
        else:
            away = held_out_rows(index, share)
            if not away.any() and (away := held_out_again(index, share, rows, file.check, file.path)).any():
                self.again_line = f"{file.path}: {counted(int(away.sum()), 'row')} held out {AGAIN}"
            held_out = _Part(rows, index.lengths, _chosen(away))
        train = _Part(rows, index.lengths, _chosen(good & ~away & index.kept))
        self.not_kept = int((good & ~away & ~index.kept).sum())
        """Rows of the training split that are not trained on, such as for their pass rate."""
        self.repeated_line = self._repeated(rows, index, good & (index.kept | away))
        """Number of prompts that occur in several rows, with an example; None if none does."""
        return train, held_out

    def _overlapping(self, rows: Sequence[Row], index: RowIndex, held_out: RowIndex) -> np.ndarray:
        """True for each row whose prompt is held out in other data."""
        away = (index.lengths > 0) & np.isin(index.hashes, held_out.hashes[held_out.lengths > 0])
        for at in np.flatnonzero(away)[:NAMED]:
            what = f"this prompt is also in {self._file.held_out}: remove one of them"
            self._mistakes.add(rows[int(at)].location, what)
        return away

    def _repeated(self, rows: Sequence[Row], index: RowIndex, among: np.ndarray) -> str | None:
        repeated = repeated_prompts(index, among)
        if repeated is None:
            return None
        first, second = (rows[at] for at in repeated.first)
        asked = self._file.check(first).prompt
        shown = shortened(asked if isinstance(asked, str) else asked[-1]["content"])
        return (
            f"{self._file.path}: {repeated.prompts} of {repeated.different} prompts occur more than once, "
            f"{int(among.sum()) - repeated.different} rows more than prompts, such as {shown} in {first.location} and "
            f"{second.location}"
        )

    # Tokens

    def _looked_at(self, part: _Part, complaints: Complaints, mistakes: Mistakes) -> _Part:
        """The part without rows with a complaint: the longest are looked at until enough of them have none, and a
        sample."""
        bad, seen = set[int](), set[int]()
        for block in part.longest_first():
            wrong = self._complained(part, block, complaints, mistakes)
            bad, seen = bad | wrong, seen | set(block)
            if not wrong or (mistakes and not self._file.skip_bad):
                break
        others = [number for number in part.sample() if number not in seen]
        bad |= self._complained(part, others, complaints, mistakes)
        self._counted += len(seen) + len(others)
        return part.without(bad)

    def _complained(self, part: _Part, numbers: Sequence[int], complaints: Complaints, mistakes: Mistakes) -> set[int]:
        """Rows with a complaint, of those with these numbers."""
        rows = [part.row(number) for number in numbers]
        wrong = zip(numbers, rows, complaints([self._file.problem(row) for row in rows]), strict=True)
        bad = [(number, row.location, what) for number, row, what in wrong if what is not None]
        for _, location, what in bad:
            mistakes.add(location, what)
        return {number for number, _, _ in bad}

    def _judged(self, row: Row, problem: Problem) -> Problem:
        """A problem that was drawn: one that the run cannot use is refused, or says so with skip_bad."""
        what = None if self._complaints is None else next(iter(self._complaints([problem])))
        if what is None:
            return problem
        mistakes = Mistakes()
        mistakes.add(row.location, what)
        self._refuse(mistakes)
        return replace(problem, unusable=str(mistakes))

    def _refuse(self, mistakes: Mistakes) -> None:
        refuse_bad(mistakes, self._file.path, self._file.skip_bad)

    def _refuse_empty(self) -> None:
        refuse_no_rows(self.size("train"), self.size("held_out"), self._file.path, self._file.held_out)
