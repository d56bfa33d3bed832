"""Attention by tiles: which tiles there are, against all pairs; its numbers, against two SDPA calls and autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from proximo.models.packing import tiles as tiles_module
from proximo.models.packing.layout import pack
from proximo.models.packing.plain_tiles import TILE
from proximo.models.packing.tile_attention import packed_attention
from proximo.models.packing.tiles import BLOCK, Tiles, padded_length, tiles
from tests.run_processes import Script


def rows_of(prompts: list[int], completions: list[tuple[int, int]]):
    """Prompts of these lengths; (which prompt, how long) of each completion, in any order."""
    lengths = torch.tensor([length for _, length in completions], dtype=torch.long)
    return {
        "prompts": [list(range(length)) for length in prompts],
        "tokens": torch.zeros(len(completions), max(1, *lengths.tolist()), dtype=torch.long),
        "lengths": lengths,
        "group": torch.tensor([number for number, _ in completions], dtype=torch.long),
    }


def seen_pairs(rows) -> Tensor:
    """Of all places, token by token: which place attends to which, counted by hand."""
    spans, place = [], 0
    for number in sorted(set(rows["group"].tolist())):
        prompt = range(place, place + len(rows["prompts"][number]))
        spans.append((prompt, range(0)))
        place = prompt.stop
        for member, length in zip(rows["group"].tolist(), rows["lengths"].tolist(), strict=True):
            if member == number:
                spans.append((range(place, place + max(length - 1, 0)), prompt))
                place = spans[-1][0].stop
    spans.append((range(place, padded_length(place)), range(0)))
    seen = torch.zeros(padded_length(place), padded_length(place), dtype=torch.bool)
    for own, prompt in spans:
        for query in own:
            seen[query, prompt.start : prompt.stop] = True
            seen[query, own.start : query + 1] = True
    return seen


def check(rows) -> None:
    """Forward and backward tiles name every pair that is seen once, and no other."""
    found = pack(**rows, in_blocks=True).reader
    assert isinstance(found, Tiles)
    pairs = seen_pairs(rows)
    behind = torch.ones_like(pairs).tril()
    forward, backward = torch.zeros_like(pairs, dtype=torch.long), torch.zeros_like(pairs, dtype=torch.long)
    for start, end, own, first, last in found.queries.tolist():
        assert 0 < end - start <= TILE
        forward[start:end, first:last] += 1
        forward[start:end, own:end] += 1
    places = []
    for start, end, first, last, place in found.keys.tolist():
        assert 0 < end - start <= TILE
        assert 0 < last - first <= tiles_module.CHUNK
        backward[first:last, start:end] += 1
        if place >= 0:
            assert found.sums[place, :2].tolist() == [start, end]
            places.append(place)
    assert torch.equal(forward * behind, pairs.long())
    assert torch.equal(backward * behind, pairs.long())
    assert sorted(places) == [*range(len(found.sums))]
    for place, (_, _, first, number) in enumerate(found.sums.tolist()):
        assert number > 1
        assert first <= place < first + number


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
def test_tiles_are_all_pairs(rows):
    check(rows)


@pytest.mark.parametrize("rows", CASES.values(), ids=CASES.keys())
def test_tiles_in_parts_are_all_pairs(rows, monkeypatch):
    monkeypatch.setattr(tiles_module, "CHUNK", 128)
    check(rows)


@pytest.mark.slow("compares many layouts")
@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300)), min_size=1, max_size=6),
)
def test_tiles_are_all_pairs_of_any_rows(prompts, completions):
    check(rows_of(prompts, [(number % len(prompts), length) for number, length in completions]))


def test_tiles_by_hand(monkeypatch):
    # A prompt of 130 tokens, then one completion of 100 places, then padding up to 256.
    monkeypatch.setattr(tiles_module, "CHUNK", 128)
    found = tiles(*(torch.tensor([number]) for number in (0, 130, 130, 100, 0)))
    # The most keys first: the completion has 230, the prompt's second tile 130, its first 128, the padding 26.
    assert found.queries.tolist() == [
        [130, 230, 130, 0, 130],
        [128, 130, 0, 0, 0],
        [0, 128, 0, 0, 0],
        [230, 256, 230, 0, 0],
    ]
    # The prompt's first tile is attended to by 230 places, in two parts; its second by 102.
    assert found.keys.tolist() == [
        [0, 128, 0, 128, 0],
        [0, 128, 128, 230, 1],
        [128, 130, 128, 230, -1],
        [130, 230, 130, 230, -1],
        [230, 256, 230, 256, -1],
    ]
    assert found.sums.tolist() == [[0, 128, 0, 2], [0, 128, 0, 2]]


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


@pytest.mark.slow("compares many layouts")
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("rows", CASES.values(), ids=CASES.keys())
def test_attention_is_that_of_the_packed_reader(rows, heads, monkeypatch):
    monkeypatch.setattr(tiles_module, "CHUNK", 128)
    row, blocks = pack(**rows), pack(**rows, in_blocks=True)
    size, padded = row.tokens.shape[1], blocks.tokens.numel()
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, padded, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(1, 2, padded, 16, generator=generator, dtype=torch.float64, requires_grad=True) for _ in "kv"
    )
    pull = torch.randn(padded, heads, 16, generator=generator, dtype=torch.float64)
    pull[size:] = 0  # nothing is read from the padding
    inputs = (query, key, value)
    expected = row.reader.read(query[:, :, :size], key[:, :, :size], value[:, :, :size], 0.3)[0]
    in_blocks = [each[0].unflatten(1, (-1, BLOCK)).transpose(0, 1) for each in inputs]
    assert isinstance(blocks.reader, Tiles)
    found = blocks.reader.read(in_blocks[0], in_blocks[1], in_blocks[2], 0.3).flatten(0, 1)
    assert_close(found[:size], expected, rtol=0, atol=1e-12)
    assert found.isfinite().all()
    wanted = torch.autograd.grad(expected, inputs, pull[:size])
    for one, other in zip(torch.autograd.grad(found, inputs, pull), wanted, strict=True):
        assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.slow("runs torch's own checks")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch 2.15's own check reads that of an intermediate
def test_the_operation_is_what_torch_expects_of_one():
    blocks = pack(**CASES["no room left for padding"], in_blocks=True)
    assert isinstance(blocks.reader, Tiles)
    rows = [torch.randn(blocks.tokens.numel(), heads, 4, requires_grad=True) for heads in (2, 1, 1)]
    torch.library.opcheck(packed_attention, (*rows, *vars(blocks.reader).values(), 0.5))


# A process of its own: types that are checked at run time cannot be compiled.
COMPILED = """
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from proximo.models import compiling, frozen_copy, score, scoring, tiny_model, with_precision

counter, compile = CompileCounterWithBackend("aot_eager"), torch.compile
torch.compile = lambda function, **options: compile(function, backend=counter, **options)
torch.set_num_threads(1)
model = tiny_model(hidden=32, layers=3, heads=2, kv_heads=1, intermediate=64)

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
assert counter.frame_count == 1, "nothing else is compiled"
handle.remove()

counter.frame_count = 0
model = with_precision(model, torch.bfloat16)
fast, plain = gradients(model, 1, True)[0], gradients(model, 1, False)[0]  # few tokens: bfloat16 is slow on a CPU
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


@pytest.mark.slow("compiles layers")
def test_one_compilation_serves_all_layers_and_sizes(tmp_path):
    script = Script(COMPILED, stdout=tmp_path / "stdout", stderr=tmp_path / "stderr")
    assert script.wait() == 0, (tmp_path / "stderr").read_text()[-2000:]
    assert (tmp_path / "stdout").read_text() == "fine\n"
