from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from proximo.samplers.embedded.attention import MIN_CHUNK, PAGE, PROGRAMS, plain_attention, work_items
from proximo.samplers.embedded.buffers import BufferPlan, plan_for, with_pages, with_slots
from proximo.samplers.embedded.cache import KeyShape
from proximo.samplers.embedded.cuda_graphs import MAX_KINDS, CapturedSteps, size_for
from proximo.samplers.embedded.paged import PagedCache
from proximo.samplers.embedded.row_state import empty_table

SHAPE = KeyShape(layers=2, heads=2, width=4, dtype=torch.float64, device=torch.device("cpu"))
FIRST, SECOND = (1, 2, 3), tuple(range(4, 74))


def cache(members: int, prompts: int = 2, slots: int = 6, pages: int = 40) -> PagedCache:
    return PagedCache(SHAPE, pages, prompts, max_prompt_tokens=70, slots=slots, room=200, members=members)


def prefix(prompt: tuple[int, ...]) -> torch.Tensor:
    """Keys and values that are different in every place."""
    size = 2 * 2 * 2 * len(prompt) * 4
    return (torch.arange(size, dtype=torch.float64) + prompt[0] * 10_000).view(2, 2, 2, len(prompt), 4)


def entered(held: PagedCache, *rows: tuple[tuple[int, ...], int]) -> PagedCache:
    for prompt, count in rows:
        assert all(held.reserve(prompt, number) for number in range(count))
        held.enter(prompt, prefix(prompt), count=count)
    assert held.grow([1] * sum(count for _, count in rows))
    held.settle()
    return held


def spans(held: PagedCache, rows: int, slots: int = 6):
    return held.reader(rows, empty_table(slots, 200, SHAPE.device), 0).spans


def test_keys_and_values_of_each_layer_have_memory_of_their_own():
    """torch.compile takes one for the other where two parts of one tensor are changed in place."""
    reader = cache(members=2).reader(3, empty_table(6, 200, SHAPE.device), 0)
    layers = [reader.layer(number) for number in range(SHAPE.layers)]
    sides = [side for layer in layers for side in (layer.keys, layer.values)]
    assert len({side.untyped_storage().data_ptr() for side in sides}) == 2 * SHAPE.layers


def test_rows_of_a_prompt_share_units():
    found = spans(entered(cache(members=2), (FIRST, 3), (SECOND, 2)), 5)
    assert found.unit_prompt.tolist() == [0, 0, 1, -1]
    assert found.unit_rows.tolist() == [[0, 1], [2, -1], [3, 4], [-1, -1]]
    assert found.row_seats.tolist() == [0, 1, 2, 4, 5]
    assert found.prompt_lengths.tolist() == [3, 70]


def test_a_prompt_is_kept_once_in_pages():
    held = entered(cache(members=2), (FIRST, 3), (SECOND, 2))
    found = spans(held, 5)
    for prompt, pages in ((FIRST, found.prompt_pages[0]), (SECOND, found.prompt_pages[1])):
        keys = held._layers[1][0][pages.long()].transpose(0, 1).flatten(1, 2)[:, : len(prompt)]
        assert torch.equal(keys, prefix(prompt)[1, 0])
    own = [page for row in found.row_pages.tolist() for page in row if page]
    prompts = [page for row in found.prompt_pages.tolist() for page in row if page]
    assert len(own) == 5
    assert len(prompts) == 3
    assert len({*own, *prompts}) == 8


def test_a_prompt_leaves_with_its_last_row_and_another_takes_its_place():
    held = entered(cache(members=2), (FIRST, 2), (SECOND, 1))
    assert not held.reserve((9, 9), 0)
    # Row 0 leaves and row 2 moves into its place; the first prompt is still row 1's.
    held.release([0], [2], [0], own_tokens=1, left=2)
    assert not held.reserve((9, 9), 0)
    held.settle()
    assert spans(held, 2).unit_prompt.tolist() == [1, 0]
    assert spans(held, 2).unit_rows.tolist() == [[0, -1], [1, -1]]
    held.release([1], [], [], own_tokens=0, left=1)
    assert held.reserve((9, 9), 0)
    held.enter((9, 9), prefix((9, 9)), count=1)
    held.settle()
    assert spans(held, 2).unit_prompt.tolist() == [1, 0]
    assert spans(held, 2).prompt_lengths.tolist() == [2, 70]


def test_units_are_enough_for_any_distribution():
    held = entered(cache(members=4, prompts=3, slots=9), ((1,), 5), ((2,), 1), ((3,), 3))
    assert sorted(row for unit in spans(held, 9, 9).unit_rows.tolist() for row in unit if row >= 0) == list(range(9))


def test_pages_are_given_as_rows_grow_and_a_slot_without_a_row_has_none():
    held = entered(cache(members=1), (FIRST, 2))
    assert held.grow([64, 65])
    counts = [sum(page > 0 for page in row) for row in spans(held, 3).row_pages.tolist()]
    assert counts == [1, 2, 0]
    held.release([0], [1], [0], own_tokens=65, left=1)
    assert held.grow([65])
    assert [sum(page > 0 for page in row) for row in spans(held, 3).row_pages.tolist()] == [2, 0, 0]


def test_a_row_enters_only_where_every_row_can_still_take_a_page():
    held = cache(members=1, pages=6)
    assert entered(held, (FIRST, 2))  # a page for the prompt, one for each row
    assert held.reserve(FIRST, 0)  # 3 free: for two rows and the new one
    assert not held.reserve(FIRST, 1)
    assert not held.grow([200, 200])
    assert held.grow([128, 129])
    assert not held.reserve(FIRST, 0)


def test_a_row_that_is_stored_comes_back_as_it_was():
    held = entered(cache(members=1, pages=8), (FIRST, 2))
    held.grow([100, 30])
    pages = spans(held, 2).row_pages[0, :2].long()
    for number, side in enumerate(side for layer in held._layers for side in layer):
        side[pages] = torch.randn(2, 2, PAGE, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    before = [side[pages].clone() for layer in held._layers for side in layer]
    stored = held.store(0)
    held.release([0], [1], [0], own_tokens=30, left=1)
    assert held.grow([129])  # takes one of the pages that were freed
    assert held.fits(stored)
    held.restore(stored)
    held.settle()
    assert held.grow([129, 100])
    found = spans(held, 2)
    back = [side[found.row_pages[1, :2].long()] for layer in held._layers for side in layer]
    assert all(torch.equal(old, new) for old, new in zip(before, back, strict=True))
    assert found.unit_prompt.tolist() == [0, 0]
    held.release([0, 1], [], [], own_tokens=0, left=0)
    assert len(held._free) == 8


@given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=60).filter(any),
    heads=st.sampled_from([1, 2, 8, 16]),
)
def test_items_cover_every_span_once(lengths, heads):
    items, first, chunk = (each.tolist() for each in work_items(torch.tensor(lengths), heads))
    [size] = chunk
    assert size % PAGE == 0
    assert len(items) >= first[-1]
    for span, length in enumerate(lengths):
        mine = [item for item, owner in enumerate(items) if owner == span]
        assert mine == list(range(first[span], first[span + 1]))
        assert (len(mine) - 1) * size < length <= len(mine) * size if length else not mine
    # Few long spans are divided among as many programs as many short ones.
    assert size == MIN_CHUNK or first[-1] * heads <= PROGRAMS + len(lengths) * heads


@pytest.mark.parametrize("members", [1, 2, 4])
def test_merged_parts_are_attention_over_both(members):
    """Against torch's attention over prompt and own tokens side by side."""
    torch.manual_seed(0)
    rows, heads, repeats = 5, 2, 3
    prompt_of, lengths, places = [0, 1, 0, 0, 1], [3, 70], torch.tensor([0, 3, 64, 2, 99])
    query = torch.randn(rows, heads * repeats, 4)
    key, value = torch.randn(2, rows, heads, 4)
    keys, values = torch.randn(2, 15, heads, PAGE, 4)
    prompt_pages, row_pages = torch.tensor([[3, 0], [7, 1]]), torch.tensor([[2, 0], [4, 0], [5, 6], [8, 0], [9, 14]])
    units = [(p, [r for r in range(rows) if prompt_of[r] == p]) for p in (0, 1)]
    lines = [(p, part[i : i + members]) for p, part in units for i in range(0, len(part), members)]
    seats = [next(n * members + part.index(r) for n, (_, part) in enumerate(lines) if r in part) for r in range(rows)]
    output = plain_attention(
        query,
        key,
        value,
        keys,
        values,
        prompt_pages,
        torch.tensor(lengths),
        row_pages,
        places,
        places + 1,
        torch.tensor([p for p, _ in lines] + [-1]),
        torch.tensor([part + [-1] * (members - len(part)) for _, part in lines] + [[-1] * members]),
        torch.tensor(seats),
        *work_items(places + 1, heads),
        scale=0.5,
    )
    for row in range(rows):
        place = int(places[row])
        assert torch.equal(keys[row_pages[row, place // PAGE], :, place % PAGE], key[row])
        length, count = lengths[prompt_of[row]], place + 1
        parts = ((prompt_pages[prompt_of[row]], length), (row_pages[row], count))
        seen, held = [
            torch.cat([side[pages].transpose(0, 1).flatten(1, 2)[:, :shown] for pages, shown in parts], dim=1)
            for side in (keys, values)
        ]
        expected = scaled_dot_product_attention(query[row].view(heads, repeats, 4), seen, held, scale=0.5)
        assert torch.allclose(output[row], expected.flatten(0, 1), atol=1e-6)


def test_a_plan_says_how_much_room_a_call_needs():
    rows = Counter({(1,) * 7: 4, (2,) * 3: 4, (3,) * 5: 4})
    assert plan_for(rows, max_tokens=9, slots=4) == BufferPlan(
        slots=4, prompts=2, max_prompt_tokens=7, max_tokens=9, siblings=4
    )
    assert plan_for(rows, max_tokens=9, slots=99) == BufferPlan(12, 3, 7, 9, 4)
    assert plan_for(rows, 9, 99).pages == 3 + 12
    assert plan_for(rows, 65, 99).pages == 3 + 24
    assert plan_for(rows, 9, 4).joined(plan_for(rows, 9, 99)) == plan_for(rows, 9, 99)
    assert plan_for(rows, 10, 4).joined(plan_for(rows, 9, 99)) == BufferPlan(12, 3, 7, 10, 4)


def test_pages_follow_the_memory_there_is_and_slots_stay():
    plan = BufferPlan(slots=8, prompts=4, max_prompt_tokens=100, max_tokens=200, siblings=4)
    assert SHAPE.bytes_per_token == 2 * 2 * 2 * 4 * 8  # layers, keys and values, heads, width, float64
    assert with_pages(plan, None) == (plan, 4 * 2 + 8 * 4)
    assert with_pages(plan, 40) == (plan, 40)
    assert with_pages(plan, 20) == (plan, 20)
    assert with_pages(plan, 11) == (replace(plan, prompts=3), 11)  # 3 · 2 for prompts, 4 for a row at its longest
    assert with_pages(plan, None, needed=20) == (plan, 20)
    assert with_pages(plan, 30, needed=90) == (plan, 30)
    assert with_pages(plan, None, needed=3) == (plan, 4 * 2 + 4)  # prompts, and a row at its longest
    with pytest.raises(ValueError, match="max_tokens is 200 and prompts have up to 100 tokens"):
        with_pages(plan, 5)


def test_slots_of_fixed_size_follow_the_memory_there_is():
    plan = BufferPlan(slots=8, prompts=2, max_prompt_tokens=10, max_tokens=10, siblings=4)
    assert with_slots(plan, 159) == replace(plan, slots=7)
    assert with_slots(plan, 10_000) == plan
    assert with_slots(plan, 39) == replace(plan, slots=1, prompts=1)
    with pytest.raises(ValueError, match="max_tokens is 10 and prompts have up to 10 tokens"):
        with_slots(plan, 19)


def test_steps_are_captured_for_few_sizes():
    assert [size_for(rows, 100) for rows in (1, 3, 9, 65, 97, 100)] == [1, 4, 16, 96, 100, 100]
    assert size_for(1500, 2000) == 2000


def test_a_step_that_was_captured_stays_so(monkeypatch):
    """The first of its kind runs as it is, the second is captured; with many kinds, the old ones make room once."""
    captured, replayed = [], []

    class Graph:
        def replay(self) -> None:
            replayed.append(1)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: nullcontext(captured.append(graph)))
    steps = CapturedSteps()
    for kind in range(MAX_KINDS):
        for _ in range(3):
            steps.run(kind, lambda: None)
    assert (len(captured), len(replayed)) == (MAX_KINDS, 2 * MAX_KINDS)
    steps.run(0, lambda: None)
    assert len(captured) == MAX_KINDS  # as many as may be kept: nothing is captured again
    for _ in range(3):
        steps.run("another", lambda: None)
    assert len(captured) == MAX_KINDS + 1
