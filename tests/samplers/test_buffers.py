from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from proximo.samplers.buffers import BufferPlan, fitted, plan_for
from proximo.samplers.cache import KeyShape
from proximo.samplers.captured import MAX_KINDS, CapturedSteps, size_for
from proximo.samplers.shared import SharedCache, plain_attention
from proximo.samplers.table import empty_table

SHAPE = KeyShape(layers=2, heads=2, width=4, dtype=torch.float64, device=torch.device("cpu"))
FIRST, SECOND = (1, 2, 3), (4, 5, 6, 7, 8)


def cache(members: int, prompts: int = 2, slots: int = 6) -> SharedCache:
    return SharedCache(SHAPE, prompts, max_prompt_tokens=5, slots=slots, room=4, members=members)


def prefix(prompt: tuple[int, ...]) -> torch.Tensor:
    return torch.full((2, 2, 2, len(prompt), 4), float(prompt[0]))


def test_keys_and_values_of_each_layer_have_memory_of_their_own():
    """torch.compile takes one for the other where two parts of one tensor are changed in place."""
    reader = cache(members=2).reader(3, empty_table(6, 4, SHAPE.device), 0)
    layers = [reader.layer(number) for number in range(SHAPE.layers)]
    sides = [side for layer in layers for side in (layer.keys, layer.values, layer.prefix_keys, layer.prefix_values)]
    assert len({side.untyped_storage().data_ptr() for side in sides}) == 4 * SHAPE.layers


def test_rows_of_a_prompt_share_units_of_so_many():
    shared = cache(members=2)
    for prompt, count in ((FIRST, 3), (SECOND, 2)):
        assert shared.reserve(prompt)
        shared.enter(prompt, prefix(prompt), count=count)
    shared.settle()
    table = empty_table(6, 4, SHAPE.device)
    reader = shared.reader(5, table, 0)
    assert reader.unit_prefix.tolist() == [0, 0, 1, -1]
    assert reader.unit_rows.tolist() == [[0, 1], [2, -1], [3, 4], [-1, -1]]
    assert reader.prefix_lengths.tolist() == [3, 5]
    assert reader.prefixes[0][0][:, 0, :, 0].tolist() == [[1, 1, 1] + [0] * 13, [4] * 5 + [0] * 11]


def test_a_prompt_leaves_with_its_last_row_and_another_takes_its_place():
    shared = cache(members=2)
    for prompt, count in ((FIRST, 2), (SECOND, 1)):
        assert shared.reserve(prompt)
        shared.enter(prompt, prefix(prompt), count=count)
    assert not shared.reserve((9, 9))
    # Row 0 leaves and row 2 moves into its place; the first prompt is still row 1's.
    shared.release([0], [2], [0], own=1, left=2)
    assert not shared.reserve((9, 9))
    shared.settle()
    table = empty_table(6, 4, SHAPE.device)
    assert shared.reader(2, table, 0).unit_prefix.tolist() == [1, 0]
    assert shared.reader(2, table, 0).unit_rows.tolist() == [[0, -1], [1, -1]]
    shared.release([1], [], [], own=0, left=1)
    assert shared.reserve((9, 9))
    shared.enter((9, 9), prefix((9, 9)), count=1)
    shared.settle()
    assert shared.reader(2, table, 0).unit_prefix.tolist() == [1, 0]
    assert shared.reader(2, table, 0).prefix_lengths.tolist() == [2, 5]


def test_units_are_enough_for_any_distribution():
    shared = cache(members=4, prompts=3, slots=9)
    for prompt, count in (((1,), 5), ((2,), 1), ((3,), 3)):
        assert shared.reserve(prompt)
        shared.enter(prompt, prefix(prompt), count=count)
    shared.settle()
    reader = shared.reader(9, empty_table(9, 4, SHAPE.device), 0)
    assert sorted(row for unit in reader.unit_rows.tolist() for row in unit if row >= 0) == list(range(9))


@pytest.mark.parametrize("members", [1, 2, 4])
def test_merged_pieces_are_attention_over_both(members):
    """Against torch's attention over prompt and own tokens side by side."""
    torch.manual_seed(0)
    rows, heads, repeats = 5, 2, 3
    prompt_of, lengths, places = [0, 1, 0, 0, 1], [3, 5], torch.tensor([0, 3, 1, 2, 2])
    query = torch.randn(rows, heads * repeats, 4)
    key, value = torch.randn(2, rows, heads, 4)
    prefixes, own = torch.randn(2, 2, heads, 5, 4), torch.randn(2, rows, heads, 4, 4)
    units = [(p, [r for r in range(rows) if prompt_of[r] == p]) for p in (0, 1)]
    lines = [(p, part[i : i + members]) for p, part in units for i in range(0, len(part), members)]
    arguments = [
        query,
        key,
        value,
        *prefixes,
        torch.tensor(lengths),
        *own,
        places,
        torch.tensor([p for p, _ in lines] + [-1]),
        torch.tensor([part + [-1] * (members - len(part)) for _, part in lines] + [[-1] * members]),
    ]
    output = plain_attention(*arguments, scale=0.5)
    for row in range(rows):
        assert torch.equal(own[0, row, :, places[row]], key[row])
        length, count = lengths[prompt_of[row]], int(places[row]) + 1
        keys, values = (
            torch.cat((side[prompt_of[row], :, :length], mine[row, :, :count]), dim=1)
            for side, mine in zip(prefixes, own, strict=True)
        )
        expected = scaled_dot_product_attention(query[row].view(heads, repeats, 4), keys, values, scale=0.5)
        torch.testing.assert_close(output[row].view(heads, repeats, 4), expected, rtol=1e-12, atol=1e-12)


def test_plans_by_hand():
    rows = Counter({(1,) * 7: 4, (2,) * 3: 4, (3,): 4})
    assert plan_for(rows, max_tokens=9, slots=4) == BufferPlan(
        slots=4, prompts=2, max_prompt_tokens=7, max_tokens=9, siblings=4
    )
    assert plan_for(rows, max_tokens=9, slots=99) == BufferPlan(12, 3, 7, 9, 4)
    assert plan_for(rows, 9, 99).tokens(shared=True) == 3 * 7 + 12 * 9
    assert plan_for(rows, 9, 99).tokens(shared=False) == 12 * 7 + 12 * 9
    assert plan_for(rows, 9, 4).joined(plan_for(rows, 9, 99)) == plan_for(rows, 9, 99)
    assert plan_for(rows, 10, 4).joined(plan_for(rows, 9, 99)) == BufferPlan(12, 3, 7, 10, 4)


def test_slots_follow_the_memory_there_is():
    plan = BufferPlan(slots=8, prompts=2, max_prompt_tokens=10, max_tokens=10, siblings=4)
    assert SHAPE.bytes_per_token == 2 * 2 * 2 * 4 * 8  # layers, keys and values, heads, width, float64
    assert fitted(plan, 100, shared=True) == plan  # 2 · 10 + 8 · 10
    assert fitted(plan, 59, shared=True) == plan.with_slots(3)  # 2 · 10 + 3 · 10
    assert fitted(plan, 39, shared=True) == replace(plan, slots=1, prompts=1)  # 1 · 10 + 1 · 10
    assert fitted(plan, 159, shared=False) == plan.with_slots(7)  # 7 · 10 + 7 · 10
    with pytest.raises(ValueError, match="max_tokens is 10 and prompts have up to 10 tokens"):
        fitted(plan, 19, shared=True)


def test_many_prompts_of_one_sample_wait_for_each_other():
    plan = BufferPlan(slots=512, prompts=400, max_prompt_tokens=3000, max_tokens=100, siblings=1)
    assert fitted(plan, 310_000, shared=True) == replace(plan, slots=100, prompts=100)


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
