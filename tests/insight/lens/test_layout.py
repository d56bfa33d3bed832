"""Rows and tokens: the fast ways count and copy as an index does."""

import pytest
import torch

from proximo.insight.lens import layout
from proximo.insight.lens.layout import TokenLayout


@pytest.mark.parametrize("long", [0, 10**9])
def test_rows_are_padded_and_counted_token_by_token(monkeypatch, long):
    monkeypatch.setattr(layout, "LONG", long)
    made = TokenLayout(torch.tensor([2, 0, 3]))
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert made.padded(values, torch.tensor([2, 0, 1]), 9).tolist() == [[3, 4, 5], [1, 2, 9], [9, 9, 9]]
    assert made.padded(values, torch.tensor([1]), 9).tolist() == [[9]]
    assert made.padded(values, torch.tensor([], dtype=torch.long)).shape == (0, 1)
    assert made.count(values > 1.5).tolist() == [1, 0, 3]
    assert made.any(values > 2.5).tolist() == [False, False, True]


def test_blocks_are_all_rows_in_order_and_no_larger_than_allowed(monkeypatch):
    monkeypatch.setattr(layout, "PLACES", 5)
    lengths = [2, 3, 1, 0, 9, 4, 2]
    found = TokenLayout(torch.tensor(lengths)).blocks()
    assert found == [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6), slice(6, 7)]
    assert TokenLayout(torch.tensor([], dtype=torch.long)).blocks() == [slice(0, 0)]


@pytest.mark.parametrize("index", [[0, 1, 2], [1, 2], [2, 1], [0, 2], [3], [4, 5], [0, 1, 2, 3]])
def test_rows_that_follow_each_other_are_copied_at_once(monkeypatch, index):
    """Rows 0 to 2 are equally long, 3 is longer, 4 and 5 are empty."""
    monkeypatch.setattr(layout, "LONG", 0)
    made, rows = TokenLayout(torch.tensor([2, 2, 2, 3, 0, 0])), torch.tensor(index)
    values, other = torch.arange(9.0), -torch.ones(9)
    found = made.padded(values, rows, 7)
    made.write(other, rows, found)
    monkeypatch.setattr(TokenLayout, "_stretch", lambda self, index: None)
    assert found.equal(made.padded(values, rows, 7))
    expected = -torch.ones(9)
    made.write(expected, rows, found)
    assert other.equal(expected)
    assert found.data_ptr() != values.data_ptr(), "whoever writes into it writes into the step"
