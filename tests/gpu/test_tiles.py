"""Kernels of attention by tiles, against the same in plain torch and float64, for shapes drawn at random."""

import random

import pytest
import torch
from torch import Tensor

from proximo.models.packing import plain_tiles
from proximo.models.packing.tile_attention import packed_attention
from proximo.models.packing.tiles import padded_length, tiles

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Norm of the difference, of the whole."""
SHAPES = [(torch.bfloat16, 64, 4), (torch.bfloat16, 80, 1), (torch.float16, 128, 2), (torch.float32, 24, 3)]


def spans(draw: random.Random) -> tuple[list[Tensor], int]:
    """Prompts of 1 to 300 tokens with up to 6 completions of up to 700, one of 5,000, and the length of their row."""
    prompt_starts, prompt_lengths, starts, lengths, member, place = [], [], [], [], [], 0
    for group in range(3):
        prompt_starts.append(place)
        prompt_lengths.append(draw.randint(1, 300))
        place += prompt_lengths[-1]
        for length in [draw.randint(0, 700) for _ in range(draw.randint(1, 6))] + [5000] * (group == 1):
            starts.append(place)
            lengths.append(length)
            member.append(group)
            place += length
    return [*map(torch.tensor, (prompt_starts, prompt_lengths, starts, lengths, member))], padded_length(place)


@pytest.mark.parametrize(("dtype", "width", "repeats"), SHAPES)
def test_kernels_are_plain_attention(dtype, width, repeats):
    draw = random.Random(width)
    laid, count = spans(draw)
    reader = tiles(*laid).to(torch.device("cuda"))
    tables = (reader.queries, reader.keys, reader.sums)
    key_heads, scale = draw.randint(1, 3), width**-0.5
    torch.manual_seed(width)
    query, key, value = (
        torch.randn(count, heads, width, device="cuda").to(dtype).requires_grad_()
        for heads in (key_heads * repeats, key_heads, key_heads)
    )
    pull = torch.randn(count, key_heads * repeats, width, device="cuda").to(dtype)

    def found() -> list[Tensor]:
        output, _ = packed_attention(query, key, value, *tables, scale)
        return [output, *torch.autograd.grad(output, (query, key, value), pull)]

    exact = (query.detach().double(), key.detach().double(), value.detach().double())
    output, ends = plain_tiles.forward(*exact, tables[0], scale)
    expected = [output, *plain_tiles.gradient(pull.double(), *exact, output, ends, tables, scale)]
    first = found()
    for one, other in zip(first, expected, strict=True):
        assert float((one.detach().double() - other).norm() / other.norm()) < BOUND[dtype]
    for one, again in zip(first, found(), strict=True):
        assert torch.equal(one, again)
