"""The decode kernel, graphs and compiled layers on a GPU, against plain computing."""

from random import Random

import pytest
import torch

from proximo.models import score, tiny_model, tiny_tokenizer
from proximo.samplers.embedded import EmbeddedSampler
from proximo.samplers.embedded.attention import PAGE, pages_for, plain_attention, work_items
from proximo.samplers.sampler import SamplingOptions
from proximo.types import Request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

REQUESTS = [Request(0, tuple(range(3, 40)), 6), Request(1, (5,), 6), Request(2, tuple(range(20, 30)), 6)]
OPTIONS = SamplingOptions(max_tokens=40)


def attention_case(
    seed: int, rows: int, heads: int, kv_heads: int, width: int, room: tuple[int, int], members: int
) -> list[torch.Tensor]:
    """Random queries and pages; three prompts, rows spread over them, some units empty."""
    random = torch.Generator().manual_seed(seed)
    prompt_of = torch.randint(3, (rows,), generator=random).tolist()
    rows_of = [[row for row in range(rows) if prompt_of[row] == prompt] for prompt in range(3)]
    units = [(p, part[i : i + members]) for p, part in enumerate(rows_of) for i in range(0, len(part), members)]
    units += [(-1, [])] * 2
    seats = {row: number * members + seat for number, (_, part) in enumerate(units) for seat, row in enumerate(part)}
    per_prompt, per_row = map(pages_for, room)
    count = 3 * per_prompt + rows * per_row
    pages = (torch.randperm(count, generator=random) + 1).int()
    prompt_lengths = torch.randint(1, room[0] + 1, (3,), generator=random, dtype=torch.int32)
    places = torch.randint(room[1], (rows,), generator=random)
    unit_prompt = torch.tensor([prompt for prompt, _ in units], dtype=torch.int32)
    shared = torch.where(unit_prompt >= 0, prompt_lengths[unit_prompt.clamp(min=0)], 0)
    return [
        torch.randn(rows, heads, width, generator=random),
        *torch.randn(2, rows, kv_heads, width, generator=random).unbind(),
        *(side.clone() for side in torch.randn(2, count + 1, kv_heads, PAGE, width, generator=random)),
        pages[: 3 * per_prompt].view(3, per_prompt),
        prompt_lengths,
        pages[3 * per_prompt :].view(rows, per_row),
        places,
        places + 1,
        unit_prompt,
        torch.tensor([part + [-1] * (members - len(part)) for _, part in units], dtype=torch.int32),
        torch.tensor([seats[row] for row in range(rows)], dtype=torch.int32),
        *work_items(torch.cat((shared.long(), places + 1)), kv_heads),
    ]


def drawn_cases(count: int) -> list[tuple[int, int, int, int, int, tuple[int, int], int]]:
    """Shapes that nobody chose: widths of any kind, 1 to 16 queries a key head, rows and lengths of all sizes."""
    random = Random(0)
    cases = []
    for seed in range(count):
        kv_heads, repeats = random.choice([1, 2, 3, 4, 8]), random.choice([1, 2, 3, 4, 7, 8, 16])
        room = random.choice([1, 63, 64, 65, 700, 2100]), random.choice([1, 64, 65, 300, 3000])
        width = random.choice([16, 32, 48, 64, 80, 96, 128, 192, 256])
        members = min(random.choice([1, 2, 4, 8]), 1 << max(0, (64 // repeats).bit_length() - 1))
        cases.append((seed, random.choice([1, 2, 7, 33]), kv_heads * repeats, kv_heads, width, room, members))
    return cases


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(
    "case",
    [
        (0, 5, 4, 2, 16, (70, 40), 4),
        (1, 6, 4, 4, 32, (300, 200), 2),
        (2, 64, 16, 8, 128, (700, 300), 16),
        (3, 20, 32, 8, 128, (2100, 1), 16),
        (4, 7, 2, 1, 64, (1, 600), 1),
        *drawn_cases(12),
    ],
)
def test_the_kernel_is_attention(case, dtype, bound):
    from proximo.samplers.embedded.kernels import decode_attention

    inputs = attention_case(*case)
    rounded = [each.to(dtype) if each.is_floating_point() else each for each in inputs]
    moved = [each.clone().cuda() for each in rounded]
    exact = [each.double() if each.is_floating_point() else each for each in rounded]
    expected = plain_attention(*exact, scale=0.1)
    found = decode_attention(*moved, scale=0.1)
    gap = (found.double().cpu() - expected).norm() / expected.norm()
    assert gap < bound
    assert torch.equal(moved[3].cpu().double(), exact[3])  # each new key was written, and nothing else
    assert torch.equal(moved[4].cpu().double(), exact[4])


def on_gpu(dtype: torch.dtype = torch.float32):
    return tiny_model(hidden=256, layers=3).to(device="cuda", dtype=dtype)  # pyright: ignore[reportCallIssue]


def gaps(model, completions, temperature=1.0):
    rows = [completion for siblings in completions for completion in siblings]
    lengths = torch.tensor([len(each.tokens) for each in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    sampled = torch.zeros(tokens.shape)
    for row, each in enumerate(rows):
        tokens[row, : lengths[row]], sampled[row, : lengths[row]] = (
            torch.tensor(each.tokens),
            torch.tensor(each.logprobs),
        )
    with torch.no_grad():
        scores = score(
            model,
            prompts=[request.prompt_tokens for request in REQUESTS],
            tokens=tokens,
            lengths=lengths,
            group=torch.arange(len(REQUESTS)).repeat_interleave(6),
            temperature=temperature,
        )
    mask = torch.arange(tokens.shape[1]) < lengths[:, None]
    return (scores.logprobs.cpu().float() - sampled).abs()[mask]


@pytest.mark.parametrize(
    ("dtype", "shared_prefix", "graphs", "mean", "most"),
    [
        (torch.float32, True, True, 1e-6, 1e-5),
        (torch.float32, False, False, 1e-6, 1e-5),
        (torch.bfloat16, True, True, 2e-3, 2e-2),
    ],
)
def test_the_sampler_is_the_learner(dtype, shared_prefix, graphs, mean, most):
    """Twice: once while steps are compiled and captured, once replayed, with slots that are taken again."""
    model = on_gpu(dtype)
    sampler = EmbeddedSampler(model, tiny_tokenizer(), slots=10, shared_prefix=shared_prefix, graphs=graphs)
    for step in range(2):
        gap = gaps(model, sampler.sample(REQUESTS, OPTIONS, seed=0, step=step))
        assert gap.mean() < mean
        assert gap.max() < most


def test_equal_calls_are_equal_and_updates_are_seen():
    model = on_gpu()
    sampler = EmbeddedSampler(model, tiny_tokenizer(), slots=18)
    first, again = (sampler.sample(REQUESTS, OPTIONS, seed=0, step=7) for _ in range(2))
    assert first == again
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert sampler.sample(REQUESTS, OPTIONS, seed=0, step=7) != first
    assert gaps(model, sampler.sample(REQUESTS, OPTIONS, seed=0, step=8)).max() < 1e-4
