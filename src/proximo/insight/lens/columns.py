"""Columns of a rollout file as tensors and texts."""

from collections.abc import Sequence
from functools import cached_property
from typing import BinaryIO, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from proximo.insight.lens.layout import TokenLayout
from proximo.runs.rollout_files import opened
from proximo.types.tensor_types import Bool, Float, Int

MISALIGNED = "it is damaged: a column is not aligned with the tokens"


class RolloutColumns:
    """Columns of a rollout file by name. Each is read when it is asked for, so that at most one is in memory twice, as
    the file has it and as a tensor."""

    def __init__(self, file: BinaryIO, *, coded: Sequence[str] = ()) -> None:
        """`coded`: columns of texts that are kept as numbers of the few texts that there are. Only of a file that is
        known to be intact: a wrong number would end the process. What is no such column is read as it is, and so are
        all where rows are in several groups: arrow cannot join their lists of numbers."""
        self._file = opened(file)
        about = self._file.metadata
        paths = {about.schema.column(index).path for index in range(about.num_columns)}
        if may_code := [name for name in coded if name in paths and about.num_row_groups == 1]:
            file.seek(0)
            self._file = pq.ParquetFile(file, metadata=about, read_dictionary=may_code)
        self._names = frozenset(self._file.schema_arrow.names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> pa.Array:
        if name not in self._names:
            raise KeyError(name)
        pa.default_memory_pool().release_unused()  # of the column before, which would be kept for the next one
        column = self._file.read(columns=[name], use_threads=False).column(0)
        column.validate(full=True)
        return column.combine_chunks()


class Pieces(Sequence[Sequence[str]]):
    """Texts of each row's tokens, made when they are asked for: as Python objects, those of a step with millions of
    tokens would take more memory than all its numbers."""

    COLUMN = "pieces.list.element"
    """Column of the tokens' texts: coded, it is read in a quarter of the time and kept in half of the memory."""

    def __init__(self, lists: pa.Array) -> None:
        self._lists = lists

    def __len__(self) -> int:
        return len(self._lists)

    @overload
    def __getitem__(self, row: int) -> list[str]: ...

    @overload
    def __getitem__(self, row: slice) -> list[list[str]]: ...

    def __getitem__(self, row: int | slice) -> list[str] | list[list[str]]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        texts = self._lists[row].values
        if texts is None:
            return []
        if self._known is None or texts.null_count:
            return texts.to_pylist()
        return self._known[texts.indices.to_numpy()].tolist()

    @cached_property
    def _known(self) -> np.ndarray | None:
        """The texts that tokens have; None if the file has each by itself."""
        values = self._lists.values
        return np.array(values.dictionary.to_pylist(), dtype=object) if pa.types.is_dictionary(values.type) else None


class TokenTensors:
    """Converts columns of lists to tensors, concatenated."""

    def __init__(self, layout: TokenLayout) -> None:
        self._layout = layout

    def __call__(self, lists: pa.Array, entries: int = 1) -> Tensor:
        """The tensor of a column with `entries` entries per token."""
        check_lengths(lists, self._layout.lengths * entries)
        tensor = flat(lists)
        if len(tensor) != self._layout.total * entries:  # a null list has offsets, too
            raise ValueError(MISALIGNED)
        return tensor

    def nested(self, lists: pa.Array, has: Bool[Tensor, "B E"]) -> Float[Tensor, "E N"]:
        """The tensor of a column of lists of lists; NaN where there is no value."""
        lengths = torch.where(has, self._layout.lengths.unsqueeze(1), 0)
        check_lengths(lists, has.sum(dim=1))
        check_lengths(lists.flatten(), lengths[has])
        values = flat(lists.flatten())
        if has.shape[1] == 1 and len(values) == self._layout.total:  # one pass over all rows
            return values.unsqueeze(0)
        tensor = torch.full((has.shape[1], self._layout.total), torch.nan, dtype=values.dtype)
        ends = lengths.flatten().cumsum(0).reshape(has.shape)
        for number, held in enumerate(has.T):
            inside = held[self._layout.row]
            shift = (ends - lengths)[:, number] - self._layout.starts
            places = inside.nonzero().squeeze(1)
            tensor[number, places] = values[places + shift[self._layout.row[places]]]
        return tensor


def check_lengths(lists: pa.Array, lengths: Int[Tensor, " R"]) -> None:
    if not np.array_equal(np.diff(offsets(lists)), lengths.numpy()):
        raise ValueError(MISALIGNED)


def flat(lists: pa.Array) -> Tensor:
    values = lists.flatten().to_numpy(zero_copy_only=False)
    return torch.from_numpy(np.array(values))  # a copy: arrow's memory is read only


def offsets(lists: pa.Array) -> np.ndarray:
    return lists.offsets.to_numpy().astype(np.int64)
