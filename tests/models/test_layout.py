"""Where tokens stand in a forward pass, which state predicts which, and how rows share micro-batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proximo.models import micro_batches
from proximo.models.packing.layout import pack, pad, predictors, split_group
from proximo.models.packing.packed import PackedReader, packed_reader, similar

# Two prompts, three completions: rows 0 and 2 continue prompt 1, row 1 prompt 0.
PROMPTS = [[50], [60, 61, 62]]
TOKENS = torch.tensor([[1, 2, 3], [4, 5, 0], [7, 0, 0]])
LENGTHS = torch.tensor([3, 2, 1])
GROUP = torch.tensor([1, 0, 1])


def test_packed_by_hand():
    packed = pack(PROMPTS, TOKENS, LENGTHS, GROUP)
    # Prompt 0 with row 1's first token, prompt 1 with row 0's first two; last tokens predict nothing.
    assert packed.tokens.tolist() == [[50, 4, 60, 61, 62, 1, 2]]
    assert packed.positions.tolist() == [[0, 1, 0, 1, 2, 3, 4]]
    # Row 0: end of prompt 1, then its own tokens; row 1: end of prompt 0, then its own; row 2: end of prompt 1.
    assert packed.predictors.tolist() == [4, 5, 6, 0, 1, 4]


def test_who_sees_whom_by_hand():
    reader = pack(PROMPTS, TOKENS, LENGTHS, GROUP).reader
    assert isinstance(reader, PackedReader)
    prompts, completions = reader.buckets
    assert prompts.places.tolist() == prompts.seen.tolist() == [[0, 0, 0], [2, 3, 4]]
    assert prompts.mask is None
    # The rows with states of their own: row 0 at places 5 and 6, row 1 at place 1.
    assert completions.places.tolist() == [[5, 6], [1, 0]]
    assert completions.mask is not None
    seen = [
        [{place for place, sees in zip(row, mask, strict=True) if sees} for mask in masks]
        for row, masks in zip(completions.seen.tolist(), completions.mask[:, 0].tolist(), strict=True)
    ]
    assert seen[0] == [{2, 3, 4, 5}, {2, 3, 4, 5, 6}]
    assert seen[1][0] == {0, 1}
    # Outputs stand as [prompt 0, -, -, prompt 1 …, row 0 …, row 1, -].
    assert reader.source.tolist() == [0, 8, 3, 4, 5, 6, 7]


def test_spans_of_similar_length_share_a_call():
    lengths = torch.tensor([10, 300, 0, 149, 150, 3000, 64])
    # 3000 alone; 300 with 150, its half; 149 alone, since 2 · 64 < 149; 64 with all that are shorter.
    assert [index.tolist() for index in similar(lengths)] == [[5], [1, 4], [3], [0, 6]]
    # Below 65 tokens padding costs less than a call.
    assert [index.tolist() for index in similar(torch.tensor([64, 1, 30]))] == [[0, 1, 2]]
    assert similar(torch.tensor([0, 0])) == []


def test_one_long_completion_widens_no_call_but_its_own():
    """31 completions of 10 tokens and one of 300 behind a prompt of 5, each call with the places that it computes."""
    lengths = torch.tensor([10] * 15 + [300] + [10] * 16)
    starts = 5 + lengths.cumsum(0) - lengths
    reader = packed_reader(torch.tensor([0]), torch.tensor([5]), starts, lengths, torch.zeros_like(lengths))
    assert [tuple(bucket.places.shape) for bucket in reader.buckets] == [(1, 5), (1, 300), (31, 10)]


def test_padded_by_hand():
    padded = pad(PROMPTS, TOKENS, LENGTHS, GROUP)
    assert padded.tokens.tolist() == [[60, 61, 62, 1, 2, 3], [50, 4, 5, 0, 0, 0], [60, 61, 62, 7, 0, 0]]
    assert padded.mask.sum(1).tolist() == [6, 3, 4]
    assert padded.predictors.tolist() == [2, 3, 4, 6, 7, 14]


def test_the_shift_by_hand():
    ends, starts, lengths = torch.tensor([4, 4, 9]), torch.tensor([5, 7, 10]), torch.tensor([3, 0, 1])
    assert predictors(ends, starts, lengths).tolist() == [4, 5, 6, 9]


def test_prompts_nobody_continues_are_left_out():
    packed = pack([[1, 2], *PROMPTS], TOKENS[1:2], LENGTHS[1:2], torch.tensor([1]))
    assert packed.tokens.tolist() == [[50, 4]]


def test_micro_batches_by_hand():
    # Groups of 5 + 7 = 12, 2 + 6 = 8, 3 + 1 = 4 and 1 + 2 = 3 tokens need three batches of 12: 12, 8 and 4 + 3.
    parts = micro_batches([5, 2, 3, 1], [3, 4, 6, 1, 2], [0, 0, 1, 2, 3], token_budget=12)
    assert parts == [[0, 1], [2], [3, 4]]


def test_micro_batches_that_fit_only_unevenly():
    # 5 + 4 and 3 + 3 + 3 fill two batches of 9; into the emptiest first, 5 + 3 and 4 + 3 leave no room for the last 3.
    assert micro_batches([4, 3, 2, 2, 2], [1] * 5, [0, 1, 2, 3, 4], token_budget=9) == [[0, 1], [2, 3, 4]]


def test_equal_groups_are_spread_evenly():
    parts = micro_batches([1] * 16, [1] * 16, list(range(16)), token_budget=7)
    assert sorted(map(len, parts)) == [2, 2, 3, 3, 3, 3]


def test_a_group_larger_than_the_budget_stands_alone():
    assert micro_batches([5, 1], [9, 1, 1], [0, 1, 1], token_budget=10) == [[0], [1, 2]]


def test_rows_of_a_group_need_not_be_neighbours():
    assert micro_batches([2, 2], [1, 1, 1, 1], [1, 0, 1, 0], token_budget=4) == [[1, 3], [0, 2]]


def test_no_rows_no_batches():
    assert micro_batches([3], [], [], token_budget=4) == []


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ValueError, match="token_budget is 0"):
        micro_batches([1], [1], [0], token_budget=0)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=20),
    st.integers(1, 40),
)
def test_micro_batches_laws(prompt_lengths, rows, budget):
    group = [number % len(prompt_lengths) for number, _ in rows]
    lengths = [length for _, length in rows]
    parts = micro_batches(prompt_lengths, lengths, group, budget)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    for part in parts:
        groups = {group[row] for row in part}
        assert part == [row for row in range(len(rows)) if group[row] in groups]
        size = sum(prompt_lengths[number] for number in groups) + sum(lengths[row] for row in part)
        assert size <= budget or len(groups) == 1
    assert parts == micro_batches(prompt_lengths, lengths, group, budget)


# Groups that may be split


def test_a_split_group_by_hand():
    # 3 + 20 tokens, of which 10 fit beside the prompt: first-fit gives 9, 6 + 4 and 1, and the 1 fits beside the 9.
    assert split_group(3, [6, 9, 4, 1], token_budget=13) == [[1, 3], [0, 2]]
    assert split_group(3, [6, 9, 4, 1], token_budget=23) == [[0, 1, 2, 3]]
    # Even parts: 8 of 2 beside a prompt of 3 fit as 5, 3 or, better, 4 and 4.
    assert split_group(3, [2] * 8, token_budget=13) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    # Not even the prompt fits: one completion each; one without tokens takes no more room than its prompt.
    assert split_group(5, [2, 1], token_budget=1) == [[0], [1]]
    assert split_group(5, [0, 0], token_budget=1) == [[0, 1]]


def test_micro_batches_of_split_groups_by_hand():
    # Group 0 has 4 + 12 = 16 tokens, group 1 has 2 + 3 = 5, and 12 fit: 4 + 6, 4 + 6 and 5 into three batches.
    lengths, group = [6, 3, 3, 1, 2], [0, 0, 0, 1, 1]
    assert micro_batches([4, 2], lengths, group, token_budget=12, may_split=True) == [[0], [1, 2], [3, 4]]
    assert micro_batches([4, 2], lengths, group, token_budget=12) == [[0, 1, 2], [3, 4]]
    # With room for 15 the rest of group 0 shares a batch with group 1: 4 + 6 and 4 + 6 + 5.
    assert micro_batches([4, 2], lengths, group, token_budget=15, may_split=True) == [[0, 3, 4], [1, 2]]


groups_of_rows = given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=20),
    st.integers(1, 40),
)


@groups_of_rows
def test_split_micro_batches_laws(prompt_lengths, rows, budget):
    group = [number % len(prompt_lengths) for number, _ in rows]
    lengths = [length for _, length in rows]
    parts = micro_batches(prompt_lengths, lengths, group, budget, may_split=True)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    assert all(parts)
    for part in parts:
        size = sum(prompt_lengths[number] for number in {group[row] for row in part}) + sum(
            lengths[row] for row in part
        )
        alone = {group[row] for row in part} == {group[part[0]]} and sum(lengths[row] > 0 for row in part) <= 1
        assert size <= budget or alone
    for number in set(group):
        whole = [row for row in range(len(rows)) if group[row] == number]
        if prompt_lengths[number] + sum(lengths[row] for row in whole) <= budget:
            assert sum(not set(whole).isdisjoint(part) for part in parts) == 1


@groups_of_rows
def test_nothing_is_split_that_fits(prompt_lengths, rows, budget):
    """Then the micro-batches are those of whole groups, one by one."""
    group = [number % len(prompt_lengths) for number, _ in rows]
    lengths = [length for _, length in rows]
    sizes = [
        prompt_lengths[number] + sum(lengths[row] for row in range(len(rows)) if group[row] == number)
        for number in group
    ]
    budget = max([budget, *sizes])
    assert micro_batches(prompt_lengths, lengths, group, budget, may_split=True) == micro_batches(
        prompt_lengths, lengths, group, budget
    )
