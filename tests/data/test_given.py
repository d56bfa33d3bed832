"""Rows given in Python: lists, columns, Arrow tables and DataFrames, without importing the library that made them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from proximo.data.given import rows_of

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": None}]
COLUMNS: Mapping[str, Any] = {"prompt": ["1+1=", "2+2="], "answer": ["2", None]}


class Pandas:
    """What is asked of a DataFrame of pandas, whose missing values are NaN."""

    columns = ("prompt", "answer", "tokens")

    def to_dict(self, orient: str) -> dict[str, list[Any]]:
        assert orient == "list"
        return {"prompt": ["1+1=", "2+2="], "answer": ["2", float("nan")], "tokens": [np.array([1, 2]), None]}


class Polars:
    """What is asked of a DataFrame of polars."""

    columns = ("prompt", "answer")

    def to_dicts(self) -> list[dict[str, Any]]:
        return [dict(row) for row in ROWS]


class Stream:
    """A table of any other library that speaks Arrow."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return pa.table(dict(COLUMNS)).__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    "given", [ROWS, COLUMNS, {"prompt": np.array(["1+1=", "2+2="]), "answer": ("2", None)}, Polars(), Stream()]
)
def test_rows_are_the_same_in_whatever_form(given):
    assert rows_of(given) == ROWS


def test_a_pandas_frame_has_none_where_nothing_is_and_lists_for_arrays():
    first, second = rows_of(Pandas())
    assert first == {"prompt": "1+1=", "answer": "2", "tokens": [1, 2]}
    assert second == {"prompt": "2+2=", "answer": None, "tokens": None}


def test_the_mark_before_a_files_first_column_is_none_of_its_name():
    """As csv.DictReader reads a file that Excel wrote."""
    rows = [{f"\ufeff{name}" if name == "prompt" else name: value for name, value in row.items()} for row in ROWS]
    assert rows_of(rows) == ROWS
    assert rows_of({"\ufeffprompt": COLUMNS["prompt"], "answer": COLUMNS["answer"]}) == ROWS


def test_columns_of_different_lengths_and_splits_are_refused():
    with pytest.raises(ValueError, match="columns of different lengths: prompt 2, answer 1"):
        rows_of({"prompt": ["a", "b"], "answer": ["1"]})
    with pytest.raises(ValueError, match=r"give one, data\['train'\] or data\['test'\]"):
        rows_of({"train": ROWS, "test": ROWS})
    with pytest.raises(ValueError, match="a list of dictionaries, a DataFrame or a Dataset"):
        rows_of(3)
