"""Attention by blocks: which blocks see which, against all pairs; and its numbers, against two SDPA calls."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.testing import assert_close

from proximo.models.packing.flex import BLOCK, FlexReader, attend_blocks, block_matrices, filled_up, padded_length
from proximo.models.packing.flex import _spans as spans_of
from proximo.models.packing.layout import pack
from tests.processes import Script


def rows_of(prompts: list[int], completions: list[tuple[int, int]]):
    """Prompts of these lengths; (which prompt, how long) of each completion, in any order."""
    lengths = torch.tensor([length for _, length in completions], dtype=torch.long)
    return {
        "prompts": [list(range(length)) for length in prompts],
        "tokens": torch.zeros(len(completions), max(1, *lengths.tolist()), dtype=torch.long),
        "lengths": lengths,
        "group": torch.tensor([number for number, _ in completions], dtype=torch.long),
    }


def room(length: int) -> int:
    """What a span takes up: a whole number of blocks where it is short of that by a 64th of itself at most."""
    return next((size for size in range(length, length + length // 64 + 1) if size % BLOCK == 0), length)


def seen_pairs(rows) -> Tensor:
    """Of all places, token by token: who is where, counted by hand. A place that fills a span up sees as its span does,
    and is seen by nothing but what comes after it there."""
    spans, place = [], 0
    for number in sorted(set(rows["group"].tolist())):
        prompt = range(place, place + len(rows["prompts"][number]))
        spans.append((range(place, place + room(len(prompt))), range(0)))
        place += room(len(prompt))
        for member, length in zip(rows["group"].tolist(), rows["lengths"].tolist(), strict=True):
            if member == number:
                size = room(max(length - 1, 0))
                spans.append((range(place, place + size), prompt))
                place += size
    spans.append((range(place, padded_length(place)), range(0)))
    seen = torch.zeros(padded_length(place), padded_length(place), dtype=torch.bool)
    for own, prompt in spans:
        for query in own:
            seen[query, prompt.start : prompt.stop] = True
            seen[query, own.start : query + 1] = True
    return seen


def by_block(pairs: Tensor) -> Tensor:
    count = len(pairs) // BLOCK
    return pairs.reshape(count, BLOCK, count, BLOCK).transpose(1, 2).flatten(2)


def listed(num: Tensor, which: Tensor) -> Tensor:
    """Back to a matrix; every block is named once."""
    blocks = torch.zeros(which.shape[2:], dtype=torch.long)
    for row, (count, columns) in enumerate(zip(num[0, 0].tolist(), which[0, 0].tolist(), strict=True)):
        for column in columns[:count]:
            blocks[row, column] += 1
    assert int(blocks.max()) <= 1
    return blocks.bool()


def check(rows) -> None:
    reader = pack(**rows, in_blocks=True).reader
    assert isinstance(reader, FlexReader)
    pairs = seen_pairs(rows)
    blocks = by_block(pairs)
    some, every = blocks.any(2), blocks.all(2)
    # Every pair that is seen lies in a listed block, no block is listed in vain, and full ones are full.
    assert torch.equal(listed(reader.full_kv_num, reader.full_kv_which), every)
    assert torch.equal(listed(reader.kv_num, reader.kv_which), some & ~every)
    assert torch.equal(listed(reader.full_q_num, reader.full_q_which), every.T)
    assert torch.equal(listed(reader.q_num, reader.q_which), (some & ~every).T)
    # The mask inside the blocks.
    place = torch.arange(len(pairs))
    own = (place >= reader.own_start[:, None]) & (place <= place[:, None])
    before = (place >= reader.prompt_start[:, None]) & (place < reader.prompt_end[:, None])
    assert torch.equal(own | before, pairs)


CASES = {
    "one short prompt, nothing said": rows_of([1], [(0, 0)]),
    "a single token, many long completions": rows_of([1], [(0, 300), (0, 1), (0, 0), (0, 2), (0, 257)]),
    "prompts longer than blocks": rows_of([400, 129, 128], [(0, 5), (1, 200), (2, 130), (0, 140), (2, 1)]),
    "no room left for padding": rows_of([128], [(0, 129)]),
    "the first completion joins its prompt": rows_of([100], [(0, 400), (0, 30)]),
    "rows that are no neighbours": rows_of([10, 260], [(1, 90), (0, 90), (1, 300), (0, 1)]),
    "spans just short of blocks": rows_of([127, 510], [(0, 128), (0, 60), (1, 255), (0, 257), (1, 385), (1, 128)]),
    "a prompt that nobody continues": rows_of([50, 60, 70], [(2, 9), (0, 8)]),
}


@pytest.mark.parametrize("rows", CASES.values(), ids=CASES.keys())
def test_blocks_are_those_of_all_pairs(rows):
    check(rows)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300)), min_size=1, max_size=6),
)
def test_blocks_are_those_of_all_pairs_of_any_rows(prompts, completions):
    check(rows_of(prompts, [(number % len(prompts), length) for number, length in completions]))


def test_two_blocks_by_hand():
    # A prompt of 130 tokens, then one completion of 100 places, then padding up to 256.
    reader = pack(**rows_of([130], [(0, 101)]), in_blocks=True).reader
    assert isinstance(reader, FlexReader)
    spans = spans_of(*(torch.tensor([number]) for number in (0, 130, 130, 100, 0)))
    assert spans.start.tolist() == [0, 130, 230]
    assert spans.end.tolist() == [130, 230, 256]
    touched, full = block_matrices(spans)
    # The second block of places ends the prompt, says the completion, and pads: the padding sees nothing before it.
    assert touched.tolist() == [[True, False], [True, True]]
    assert full.tolist() == [[False, False], [False, False]]
    assert reader.own_start[[0, 129, 130, 229, 230, 255]].tolist() == [0, 0, 130, 130, 230, 230]
    assert reader.prompt_end[[0, 129, 130, 229, 230]].tolist() == [0, 0, 130, 130, 0]


def test_spans_fill_up_where_little_is_missing():
    # 126 lacks 2, more than a 64th of it; 512 lacks nothing; 508 lacks 4, and 7 would be a 64th.
    lengths = torch.tensor([0, 1, 126, 127, 128, 129, 252, 253, 508, 512])
    assert filled_up(lengths).tolist() == [0, 1, 126, 128, 128, 129, 252, 256, 512, 512]
    assert [room(length) for length in lengths.tolist()] == filled_up(lengths).tolist()
    # Two groups of prompts and completions of one token less than a block: every block but the diagonal is full.
    reader = pack(**rows_of([128, 128], [(0, 128), (0, 128), (1, 128)]), in_blocks=True).reader
    assert isinstance(reader, FlexReader)
    assert listed(reader.kv_num, reader.kv_which).equal(torch.eye(5, dtype=torch.bool))
    assert reader.full_kv_num[0, 0].tolist() == [0, 1, 1, 0, 1]


def test_a_row_has_at_least_two_blocks():
    # torch compiles a size of 1 apart from all others.
    assert [padded_length(length) for length in (1, 128, 256, 257)] == [256, 256, 256, 384]


def test_packed_in_blocks_is_packed_and_padding():
    rows = CASES["rows that are no neighbours"]
    row, blocks = pack(**rows), pack(**rows, in_blocks=True)
    size = row.tokens.shape[1]
    assert blocks.tokens.shape == blocks.positions.shape == (padded_length(size) // BLOCK, BLOCK)
    assert_close(blocks.tokens.flatten()[:size], row.tokens[0])
    assert_close(blocks.positions.flatten()[:size], row.positions[0])
    assert_close(blocks.predictors, row.predictors)
    assert int(blocks.predictors.max()) < size


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("rows", CASES.values(), ids=CASES.keys())
def test_attention_is_that_of_the_packed_reader(rows, heads, monkeypatch):
    # Without compilation flex_attention computes all scores; what is tested is what it is told.
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    row, blocks = pack(**rows), pack(**rows, in_blocks=True)
    size, padded = row.tokens.shape[1], blocks.tokens.numel()
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, padded, 16, generator=generator)
    key, value = torch.randn(2, 1, 2, padded, 16, generator=generator)
    # Where the row's tokens stand among the blocks.
    at = torch.empty(size, dtype=torch.long)
    at[row.places.prompt_tokens], at[row.places.completion_tokens] = (
        blocks.places.prompt_tokens,
        blocks.places.completion_tokens,
    )
    expected = row.reader.read(query[:, :, at], key[:, :, at], value[:, :, at], 0.3)
    in_blocks = [each[0].unflatten(1, (-1, BLOCK)).transpose(0, 1) for each in (query, key, value)]
    assert isinstance(blocks.reader, FlexReader)
    found = attend_blocks(blocks.reader, in_blocks[0], in_blocks[1], in_blocks[2], 0.3).flatten(0, 1)
    assert_close(found[at], expected[0], rtol=0, atol=1e-12)
    assert found.isfinite().all()


# A process of its own: types that are checked at run time cannot be compiled.
COMPILED = """
import torch
from torch._dynamo.testing import CompileCounterWithBackend
import torch.nn.attention.flex_attention as flex
from proximo.models import compiling, frozen_copy, score, scoring, tiny_model, with_precision

counter, compile = CompileCounterWithBackend("aot_eager"), torch.compile
torch.compile = lambda function, **options: compile(function, backend=counter, **options)
flex._validate_device = lambda *_: None  # flex has no kernel for gradients on a CPU; what is traced is the same
torch.set_num_threads(1)
model = tiny_model(hidden=64, layers=3, intermediate=64)

def gradients(model, seed, fast):
    random = torch.Generator().manual_seed(seed)
    prompts = [[5] * 3, [7] * (90 * seed + 1)]
    lengths = torch.tensor([0, 1, 40 + seed, 130 * seed])
    tokens = torch.randint(3, 90, (4, int(lengths.max())), generator=random)
    compiling.compiles = lambda _: fast
    scoring.reads_blocks = lambda _: fast
    rows = dict(prompts=prompts, tokens=tokens, lengths=lengths, group=torch.tensor([0, 1, 1, 0]))
    model.zero_grad()
    logprobs = score(model, **rows).logprobs
    logprobs.mean().backward()
    return [logprobs.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

def compare(seed):
    for fast, plain in zip(gradients(model, seed, True), gradients(model, seed, False), strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=2e-6)

for seed in (1, 2, 3):
    compare(seed)
assert counter.frame_count == 1, f"{counter.frame_count} compilations for three layers and three sizes"
gradients(frozen_copy(model).requires_grad_(True), 2, True)
assert counter.frame_count == 1, "a copy is compiled anew"

for number, offload in ((2, False), (3, True)):
    compiling.checkpoint_layers(model, number, offload=offload)
    compare(2)
    assert counter.frame_count == 1, "checkpointing compiles anew"
compiling.checkpoint_layers(model, 0)

runs = []
handle = model.model.layers[1].register_forward_pre_hook(lambda *_: runs.append(1))
for seed in (1, 2):
    compare(seed)
assert len(runs) == 4, "a hooked layer runs as it is"
assert counter.frame_count == 2, "attention alone, once"
handle.remove()

counter.frame_count = 0
model = with_precision(model, torch.bfloat16)
fast, plain = gradients(model, 2, True)[0], gradients(model, 2, False)[0]
assert (fast - plain).abs().mean() < 2e-3
assert counter.frame_count == 1, "in half precision once more"

from proximo.models import logprobs
counter.frame_count = 0
states, weight = torch.randn(11, 8, requires_grad=True), torch.randn(20, 8)
for chunk in (11, 4, 5):  # 11, then 4 4 3, then 5 5 and a last one of 1, which torch compiles apart
    options = dict(temperature=0.7, byte_budget=chunk * 80, compiled=True)
    found = logprobs.token_logprobs(states, weight, torch.arange(11), **options)[0]
    expected = (states @ weight.T / 0.7).log_softmax(-1)[torch.arange(11), torch.arange(11)]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), states)[0] for each in (found, expected)))
    assert counter.frame_count == (4 if chunk == 5 else 2)
print("fine")
"""


def test_one_compilation_serves_all_layers_and_sizes(tmp_path):
    script = Script(COMPILED, stdout=tmp_path / "stdout", stderr=tmp_path / "stderr")
    assert script.wait() == 0, (tmp_path / "stderr").read_text()[-2000:]
    assert (tmp_path / "stdout").read_text() == "fine\n"
