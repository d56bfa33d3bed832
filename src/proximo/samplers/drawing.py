"""From logits to tokens: random numbers without state, and the distribution they are drawn from.

A generator's state would tie a token to everything drawn before it. Here each token has its own counter,
(seed, step, key, sample, position), and a hash makes it a uniform number: rows may be batched, ordered or
resumed in any way and draw the same.
"""

import torch
from torch import Tensor

from proximo.samplers import SamplingOptions
from proximo.shapes import Float, Int

# The increment and the finaliser of splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit integers.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
SECOND_FACTOR = 0x94D049BB133111EB - 2**64


def uniforms(
    seed: int, step: int, keys: Int[Tensor, " R"], samples: Int[Tensor, " R"], positions: Int[Tensor, " R"]
) -> Float[Tensor, " R"]:
    """One float64 number in [0, 1) for each row, a function of its counter alone."""
    state = torch.zeros_like(keys)
    for word in (signed(seed), signed(step), keys, samples, positions):
        # Mixing between the words makes their order count: (1, 2) and (2, 1) are different counters.
        state = _mixed(state + word)
    return _shifted(state, 11).double() * 2.0**-53


def draw(
    logits: Float[Tensor, "R V"], uniforms: Float[Tensor, " R"], options: SamplingOptions
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """A token for each row, and its log-prob under the distribution it was really drawn from.

    With temperature 0 that distribution is a point mass, so the log-prob is 0.
    """
    if options.greedy:
        highest, tokens = logits.float().max(dim=-1)
        return tokens, highest - highest  # 0, but NaN where the logits are
    logprobs = sampling_logprobs(logits, options)
    # The inverse of the cumulative distribution, in float64: in float32 rare tokens would share a step.
    heights = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    total = heights[:, -1:]
    # Rounding must not lift the target to the total: beyond it lie only tokens of probability 0.
    target = torch.minimum(uniforms.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(heights, target, right=True).clamp(max=logits.shape[1] - 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def sampling_logprobs(logits: Float[Tensor, "R V"], options: SamplingOptions) -> Float[Tensor, "R V"]:
    """The distribution tokens are drawn from, in float32; -inf on tokens that truncation leaves out."""
    logprobs = torch.log_softmax(logits.float() / options.temperature, dim=-1)
    if not options.truncates:
        return logprobs
    # Each of the three keeps the most likely tokens up to some rank, so the smallest count decides.
    ranked, order = logprobs.sort(dim=-1, descending=True, stable=True)
    vocabulary = logits.shape[1]
    top_k = min(options.top_k or vocabulary, vocabulary)
    kept = torch.full_like(order[:, :1], top_k)
    if options.top_p < 1:
        # Top-k comes first, so top-p means a share of what top-k left.
        heights = ranked[:, :top_k].exp().cumsum(dim=-1, dtype=torch.float64)
        short = heights < options.top_p * heights[:, -1:]
        kept = torch.minimum(kept, short.sum(dim=-1, keepdim=True) + 1)
    if options.min_p > 0:
        likely = ranked.exp() >= options.min_p * ranked[:, :1].exp()
        kept = torch.minimum(kept, likely.sum(dim=-1, keepdim=True))
    left_out = torch.arange(vocabulary, device=logits.device) >= kept
    left_out = torch.zeros_like(left_out).scatter(1, order, left_out)
    return torch.log_softmax(logprobs.masked_fill(left_out, -torch.inf), dim=-1)


def _mixed(words: Int[Tensor, " R"]) -> Int[Tensor, " R"]:
    """A bijection of 64-bit integers in which every bit of the input moves every bit of the output."""
    words = words + INCREMENT
    words = (words ^ _shifted(words, 30)) * FIRST_FACTOR
    words = (words ^ _shifted(words, 27)) * SECOND_FACTOR
    return words ^ _shifted(words, 31)


def _shifted(words: Int[Tensor, " R"], bits: int) -> Int[Tensor, " R"]:
    """Shifted right without the sign: torch's shift of a negative integer fills with ones."""
    return (words >> bits) & (2 ** (64 - bits) - 1)


def signed(word: int) -> int:
    """The 64-bit integer with the same low bits."""
    return (word + 2**63) % 2**64 - 2**63
