"""Random numbers from counters, and tokens from logits."""

import math
from itertools import product

import pytest
import torch

from proximo.samplers.rng import draw, row_states, sampling_logprobs, uniforms, uniforms_at
from proximo.samplers.sampler import SamplingOptions

LAST = 1 - 2**-53
"""The largest uniform number there is."""


def grid(seeds=1, steps=1, keys=1, samples=1, positions=1):
    """Uniforms of all counters up to these."""
    rows = torch.tensor(list(product(range(keys), range(samples), range(positions))))
    return torch.cat([uniforms(seed, step, *rows.T) for seed, step in product(range(seeds), range(steps))])


def logits_of(*probabilities):
    return torch.tensor([probabilities]).log()


def one_level(logits, numbers, temperature):
    """The whole cumulative distribution in float64: the token, and how near the number is to a change of token."""
    heights = (logits.double() / temperature).softmax(-1).cumsum(-1)
    target = numbers.unsqueeze(1) * heights[:, -1:]
    tokens = torch.searchsorted(heights, target, right=True).squeeze(1)
    return tokens, (heights - target).abs().min(-1).values


def splitmix64(word):
    """In Python's integers, from the published algorithm."""
    word = (word + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def test_uniforms_are_a_chain_of_splitmix64():
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # its published first output for seed 0
    for counter in [(0, 0, 0, 0, 0), (1, 2, 3, 4, 5), (-7, 10**6, -(2**62), 63, 4095), (2**64 + 3, 1, 2**63 - 1, 0, 1)]:
        word = 0
        for part in counter:
            word = splitmix64((word + part) % 2**64)
        keys, samples, positions = torch.tensor(counter[2:]).unsqueeze(1)
        assert uniforms(counter[0], counter[1], keys, samples, positions).item() == (word >> 11) / 2**53


def test_uniforms_never_change():
    # Written down: a change here would change every run that is resumed or repeated.
    numbers = uniforms(1, 2, torch.tensor([3, 3, -4]), torch.tensor([0, 1, 0]), torch.tensor([5, 5, 5]))
    assert numbers.tolist() == [0.7553607969626858, 0.48842221597665925, 0.9716346956311603]


def test_uniforms_are_uniform_and_do_not_collide():
    numbers = grid(seeds=2, steps=5, keys=10, samples=10, positions=100)
    assert len(numbers.unique()) == len(numbers) == 100_000
    assert numbers.min() >= 0
    assert numbers.max() < 1
    # Mean, variance and neighbours' correlation, each within four standard errors.
    centred = numbers - 0.5
    assert abs(centred.mean()) < 4 * math.sqrt(1 / 12 / 1e5)
    assert abs(centred.square().mean() - 1 / 12) < 4 * math.sqrt(1 / 180 / 1e5)
    assert abs((centred[1:] * centred[:-1]).mean()) < 4 / 12 / math.sqrt(1e5)
    counts = torch.histc(numbers, bins=100, min=0, max=1)
    assert ((counts - 1000).square() / 1000).sum() < 99 + 4 * math.sqrt(2 * 99)


def test_every_part_of_the_counter_and_its_place_count():
    for first, second in [((1, 0, 0, 0, 0), (0, 1, 0, 0, 0)), ((0, 0, 1, 2, 0), (0, 0, 2, 1, 0))]:
        numbers = [uniforms(*parts[:2], *torch.tensor(parts[2:]).unsqueeze(1)).item() for parts in (first, second)]
        assert numbers[0] != numbers[1]
    for name in ("seeds", "steps", "keys", "samples", "positions"):
        assert len(grid(**{name: 50}).unique()) == 50


def test_a_row_draws_the_same_in_any_company():
    keys, samples, positions = torch.tensor([[4, 9, 4], [0, 3, 1], [7, 7, 2]])
    together = uniforms(5, 6, keys, samples, positions)
    alone = [uniforms(5, 6, keys[i : i + 1], samples[i : i + 1], positions[i : i + 1]).item() for i in range(3)]
    assert together.tolist() == alone


def test_seed_and_step_may_be_tensors_and_a_rows_part_may_be_kept():
    keys, samples, positions = torch.tensor([[4, -9, 2**62], [0, 3, 1], [7, 7, 2]])
    for seed, step in [(0, 0), (5, 6), (-7, 2**62), (2**63 - 1, 1)]:
        numbers = uniforms(seed, step, keys, samples, positions)
        both = torch.tensor(seed), torch.tensor(step)
        for first, second in [both, (seed, both[1]), (both[0], step)]:
            assert torch.equal(uniforms(first, second, keys, samples, positions), numbers)
        kept = row_states(*both, keys, samples)
        assert torch.equal(uniforms_at(kept, positions), numbers)


def test_nothing_in_a_draw_depends_on_values():
    # Tensors without values raise wherever a shape or a branch would ask for one: what a recorded graph needs.
    words = torch.zeros(3, 4, dtype=torch.int64, device="meta").unbind()
    number = torch.zeros((), dtype=torch.int64, device="meta")
    numbers = uniforms(number, number, *words)
    for vocabulary, options in product((100, 300, 384), (SamplingOptions(), SamplingOptions(0.7, 0.9, 5, 0.1))):
        tokens, logprobs, _ = draw(torch.zeros(4, vocabulary, device="meta"), numbers, options)
        assert tokens.shape == logprobs.shape == (4,)


@pytest.mark.slow("draws many completions")
@pytest.mark.parametrize("vocabulary", [1, 2, 127, 128, 129, 256, 300, 1000, 5000])
@pytest.mark.parametrize(("scale", "temperature"), [(0.0, 1.0), (1.0, 1.0), (4.0, 0.7), (1e4, 1.0)])
def test_blocks_draw_what_the_whole_cumulative_distribution_does(vocabulary, scale, temperature):
    random = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(400, vocabulary, generator=random).float() * scale
    # A third of the tokens, and in half of the rows whole blocks, have no probability.
    logits[torch.rand(logits.shape, generator=random) < 1 / 3] = -torch.inf
    logits[:200, vocabulary // 4 : vocabulary // 2] = -torch.inf
    logits[:, vocabulary // 2] = 0.0
    numbers = torch.rand(400, generator=random)
    numbers[:2] = torch.tensor([0.0, LAST])
    tokens, logprobs, _ = draw(logits, numbers, SamplingOptions(temperature=temperature))
    expected, room = one_level(logits, numbers, temperature)
    certain = room > 2e-6
    assert certain.sum() >= 380
    assert torch.equal(tokens[certain], expected[certain])
    scores = (logits / temperature).log_softmax(-1)
    torch.testing.assert_close(logprobs, scores.gather(1, tokens[:, None])[:, 0])
    assert logprobs.isfinite().all()


@pytest.mark.parametrize("vocabulary", [100, 1000, 1024])
def test_the_ends_of_the_distribution_are_met(vocabulary):
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(60, vocabulary, generator=random)
    logits[:, :10] = -torch.inf
    logits[:, -30:] = -torch.inf
    for number, token in [(0.0, 10), (LAST, vocabulary - 31)]:
        tokens, _, _ = draw(logits, torch.full((60,), number), SamplingOptions())
        assert tokens.tolist() == [token] * 60


def test_rare_tokens_keep_their_share():
    # Float32 sums would lose both: one in a block with a likely token, one in a block of its own.
    logits = torch.full((5, 1000), -torch.inf)
    logits[:, [0, 1, 700]] = torch.tensor([1.0, 1e-12, 2e-12]).log()
    numbers = 1 - torch.tensor([3.1e-12, 2.9e-12, 2.1e-12, 1.9e-12, 1e-13])
    assert draw(logits, numbers, SamplingOptions())[0].tolist() == [0, 1, 1, 700, 700]


@pytest.mark.parametrize("vocabulary", [5, 300])
def test_logits_that_are_no_numbers_show_in_the_logprob(vocabulary):
    for wrong in (math.nan, math.inf):
        logits = torch.zeros(2, vocabulary)
        logits[1, 3] = wrong
        tokens, logprobs, _ = draw(logits, torch.tensor([0.5, 0.5]), SamplingOptions())
        assert logprobs.isnan().tolist() == [False, True]
        assert 0 <= tokens.min() <= tokens.max() < vocabulary


def test_draw_inverts_the_cumulative_distribution():
    logits = logits_of(0.2, 0.5, 0.3).expand(6, -1)
    numbers = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, LAST])
    tokens, logprobs, _ = draw(logits, numbers, SamplingOptions())
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    expected = torch.tensor([0.2, 0.2, 0.5, 0.5, 0.3, 0.3], dtype=torch.float32).log()
    torch.testing.assert_close(logprobs, expected)


def test_a_token_comes_as_often_as_its_probability_says():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 40, generator=generator) * 2
    numbers = (torch.arange(10_000) + 0.5) / 10_000
    tokens, _, _ = draw(logits.expand(10_000, -1), numbers, SamplingOptions(temperature=1.5))
    counts = torch.bincount(tokens, minlength=40)
    assert (counts - (logits[0] / 1.5).softmax(-1) * 10_000).abs().max() <= 1.01


def test_a_token_of_probability_zero_is_never_drawn():
    logits = logits_of(0.0, 0.4, 0.0, 0.6, 0.0).expand(4, -1)
    tokens, logprobs, _ = draw(logits, torch.tensor([0.0, 0.39999, 0.40001, LAST]), SamplingOptions())
    assert tokens.tolist() == [1, 1, 3, 3]
    assert logprobs.isfinite().all()
    # Float32 probabilities rarely sum to exactly 1, and the last number must not fall behind their sum.
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    logits[:, 15:] = -torch.inf
    tokens, logprobs, _ = draw(logits, torch.full((50,), LAST), SamplingOptions())
    assert tokens.tolist() == [14] * 50
    # Beyond float32: tokens that underflow have no width at either end.
    logits = torch.tensor([[-300.0, 0.0, 1.0, -300.0]])
    for number, token in [(0.0, 1), (LAST, 2)]:
        assert draw(logits, torch.tensor([number]), SamplingOptions())[0].item() == token


def test_temperature_divides_the_logits():
    # Probabilities ∝ 1, 4 at temperature 1/2 (squared): 1, 16.
    _, logprobs, _ = draw(logits_of(0.2, 0.8), torch.tensor([0.5]), SamplingOptions(temperature=0.5))
    assert logprobs.item() == pytest.approx(math.log(16 / 17), abs=1e-6)


def test_greedy_is_a_point_mass():
    tokens, logprobs, _ = draw(logits_of(0.2, 0.5, 0.3), torch.tensor([LAST]), SamplingOptions(temperature=0.0))
    assert tokens.tolist() == [1]
    assert logprobs.tolist() == [0.0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SamplingOptions(), [0.1, 0.4, 0.2, 0.3]),
        (SamplingOptions(top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (SamplingOptions(top_k=9), [0.1, 0.4, 0.2, 0.3]),
        (SamplingOptions(top_p=0.65), [0, 4 / 7, 0, 3 / 7]),
        (SamplingOptions(top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
        (SamplingOptions(top_p=0.01), [0, 1, 0, 0]),
        (SamplingOptions(min_p=0.45), [0, 4 / 9, 2 / 9, 3 / 9]),
        (SamplingOptions(min_p=0.55), [0, 4 / 7, 0, 3 / 7]),
        (SamplingOptions(min_p=1.0), [0, 1, 0, 0]),
        # Top-p is a share of what top-k left: 0.4 of 0.7 is over 0.55, and 0.4 of 1 is not.
        (SamplingOptions(top_k=2, top_p=0.55), [0, 1, 0, 0]),
        (SamplingOptions(top_p=0.55), [0, 4 / 7, 0, 3 / 7]),
        (SamplingOptions(top_k=3, top_p=0.95, min_p=0.6), [0, 4 / 7, 0, 3 / 7]),
        # The cut is made after the temperature: squares are 1, 16, 4, 9 of 30.
        (SamplingOptions(temperature=0.5, top_p=0.8), [0, 16 / 25, 0, 9 / 25]),
    ],
)
def test_truncation(options, expected):
    logprobs = sampling_logprobs(logits_of(0.1, 0.4, 0.2, 0.3), options)
    torch.testing.assert_close(logprobs.exp(), torch.tensor([expected], dtype=torch.float32))
    assert options.truncates == (options != SamplingOptions())


def test_the_logprob_is_under_the_truncated_distribution():
    logits = logits_of(0.1, 0.4, 0.2, 0.3).expand(3, -1)
    tokens, logprobs, _ = draw(logits, torch.tensor([0.0, 0.6, LAST]), SamplingOptions(top_k=2))
    assert tokens.tolist() == [1, 3, 3]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([4 / 7, 3 / 7, 3 / 7], dtype=torch.float32))


def test_ties_do_not_let_more_than_k_through():
    probabilities = sampling_logprobs(torch.zeros(1, 6), SamplingOptions(top_k=2)).exp()
    assert probabilities.tolist() == [[0.5, 0.5, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("max_tokens", 0),
        ("stop", ("",)),
    ],
)
def test_options_name_the_field_and_the_value(field, value):
    with pytest.raises(ValueError, match=f"{field} is .*: "):
        SamplingOptions(**{field: value})


# The policy's entropy


def near(found: torch.Tensor, expected: torch.Tensor | list[float]) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), atol=2e-6, rtol=2e-6)


def entropy_of(logits: torch.Tensor, **options) -> torch.Tensor:
    return draw(logits, torch.full((len(logits),), 0.5), SamplingOptions(**options))[2].double()


def test_entropy_by_hand():
    near(entropy_of(torch.zeros(1, 4)), [math.log(4)])
    expected = -(0.2 * math.log(0.2) + 0.8 * math.log(0.8))
    near(entropy_of(logits_of(0.2, 0.8)), [expected])
    # A temperature of 0.5 squares the odds: 1 to 16.
    expected = -(math.log(1 / 17) + 16 * math.log(16 / 17)) / 17
    near(entropy_of(logits_of(0.2, 0.8), temperature=0.5), [expected])
    assert entropy_of(logits_of(0.2, 0.8), temperature=0.0).tolist() == [0.0]
    # A token that cannot be drawn adds nothing.
    near(entropy_of(torch.tensor([[0.0, -torch.inf, 0.0]])), [math.log(2)])


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.9}])
def test_entropy_is_of_the_distribution_before_it_is_cut(options):
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(entropy_of(logits, **options), entropy_of(logits))


@pytest.mark.parametrize("vocabulary", [1, 2, 128, 129, 700, 5000])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_entropy_is_that_of_all_logits_at_once(vocabulary, scale):
    logits = (scale * torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(1))).float()
    logprobs = (logits.double() / 0.7).log_softmax(-1)
    expected = -(logprobs.exp() * logprobs).sum(-1)
    near(entropy_of(logits, temperature=0.7), expected)


def test_entropy_with_a_block_that_cannot_be_drawn():
    logits = torch.full((1, 700), -torch.inf)
    logits[0, 300:304] = 1.0
    near(entropy_of(logits), [math.log(4)])
