"""Rows and tokens: the fast ways read, count and copy as an index does."""

import pyarrow.parquet as pq
import pytest
import torch

from proximo.algorithms import GRPO
from proximo.insight.lens import layout
from proximo.insight.lens.columns import Columns
from proximo.insight.lens.layout import Layout
from proximo.insight.lens.steps import LARGE, read_step
from tests.stored import Asked, Said, store


@pytest.mark.parametrize("long", [0, 10**9])
def test_rows_are_padded_and_counted_token_by_token(monkeypatch, long):
    monkeypatch.setattr(layout, "LONG", long)
    made = Layout(torch.tensor([2, 0, 3]))
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert made.padded(values, torch.tensor([2, 0, 1]), 9).tolist() == [[3, 4, 5], [1, 2, 9], [9, 9, 9]]
    assert made.padded(values, torch.tensor([1]), 9).tolist() == [[9]]
    assert made.padded(values, torch.tensor([], dtype=torch.long)).shape == (0, 1)
    assert made.count(values > 1.5).tolist() == [1, 0, 3]
    assert made.any(values > 2.5).tolist() == [False, False, True]


def test_columns_are_the_same_in_whatever_order_they_are_asked_for(tmp_path):
    """Two are read at a time where an order is given, which is only a promise."""
    said = [Said(["a", "b", "a"], 1.0, reference=[-0.1, -0.2, -0.3]), Said(["", "c"], 0.0, reference=[-0.4, -0.5])]
    path = store(tmp_path / "run", GRPO, [Asked(said)]).step_file(0)
    with path.open("rb") as file:
        whole = pq.read_table(path)
        for names in (LARGE, LARGE[::-1], (*LARGE[1::2], *LARGE[::2])):
            column = Columns(file, LARGE)
            found = {name: column[name].to_pylist() for name in names if name in column}
            assert len(found) > 5
            assert found == {name: whole[name].to_pylist() for name in found}
    pieces = read_step(path, 0).pieces
    assert [pieces[0], pieces[-1], *pieces[:1]] == [["a", "b", "a"], ["", "c"], ["a", "b", "a"]]
