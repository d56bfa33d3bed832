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


BLOCK = 128
"""Tokens are drawn in two steps, a block of so many and then one of it: only the blocks' masses are summed up."""


def uniforms(
    seed: int | Int[Tensor, ""],
    step: int | Int[Tensor, ""],
    keys: Int[Tensor, " R"],
    samples: Int[Tensor, " R"],
    positions: Int[Tensor, " R"],
) -> Float[Tensor, " R"]:
    """One float64 number in [0, 1) for each row, a function of its counter alone.

    Seed and step may be tensors on the device, which a recorded graph reads anew each time it is replayed.
    """
    state = torch.zeros_like(keys)
    for word in (seed, step, keys, samples, positions):
        # Mixing between the words makes their order count: (1, 2) and (2, 1) are different counters.
        state = _mixed(state + (signed(word) if isinstance(word, int) else word))
    return _shifted(state, 11).double() * 2.0**-53


def draw(
    logits: Float[Tensor, "R V"], uniforms: Float[Tensor, " R"], options: SamplingOptions
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """A token for each row, and its log-prob under the distribution it was really drawn from.

    With temperature 0 that distribution is a point mass, so the log-prob is 0. Nothing here waits for the device or
    has a shape that depends on values, so it can be recorded in a CUDA graph.
    """
    if options.greedy:
        highest, tokens = logits.float().max(dim=-1)
        return tokens, highest - highest  # 0, but NaN where the logits are
    scores = sampling_logprobs(logits, options) if options.truncates else logits.float() / options.temperature
    highest = scores.amax(dim=-1, keepdim=True)
    masses = _block_masses((scores - highest).exp_())
    total = masses.sum(dim=-1, keepdim=True)
    block, below, mass = _inverted(masses, uniforms.unsqueeze(1) * total)
    # Of the chosen block's mass, the share that lies below the target.
    share = (uniforms.unsqueeze(1) * total - below) / mass
    places = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    inside = (scores.gather(1, places.clamp(max=logits.shape[1] - 1)) - highest).exp_().double()
    inside = inside.masked_fill(places >= logits.shape[1], 0.0)
    place, _, _ = _inverted(inside, share * inside.sum(dim=-1, keepdim=True))
    tokens = block * BLOCK + place
    logprobs = (scores.gather(1, tokens) - highest).double() - total.log()
    return tokens.squeeze(1), logprobs.squeeze(1).float()


def _block_masses(weights: Float[Tensor, "R V"]) -> Float[Tensor, "R N"]:
    """The sum of each block, the last of which may be shorter.

    In float32 inside a block, whose rounding is that of the weights themselves; in float64 from there on, since in
    a float32 sum over all of them rare tokens would vanish.
    """
    whole = weights.shape[1] // BLOCK * BLOCK
    masses = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(dim=-1)
    if whole < weights.shape[1]:
        masses = torch.cat((masses, weights[:, whole:].sum(dim=-1, keepdim=True)), dim=1)
    return masses.double()


def _inverted(
    widths: Float[Tensor, "R N"], target: Float[Tensor, "R 1"]
) -> tuple[Int[Tensor, "R 1"], Float[Tensor, "R 1"], Float[Tensor, "R 1"]]:
    """The place at which the sum of the widths passes the target, the sum before it and the width there.

    A place without width is never returned, whatever a parallel sum rounds to, nor one behind the last that has one,
    whatever the target was rounded to.
    """
    heights = widths.cumsum(dim=-1)
    reached = heights.masked_fill(widths == 0, -1.0)
    top = reached.amax(dim=-1, keepdim=True)
    target = torch.minimum(target, torch.nextafter(top, torch.zeros_like(top)))
    # The first of the highest: argmax promises it.
    place = (reached > target).byte().argmax(dim=-1, keepdim=True)
    return place, (heights - widths).gather(1, place), widths.gather(1, place)


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
