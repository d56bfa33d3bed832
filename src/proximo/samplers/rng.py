"""Draws of tokens from logits: random numbers without state, and the distribution they are drawn from.

A generator's state would tie a token to everything drawn before it. Here each token has its own counter,
(seed, step, key, sample, position), and a hash makes it a uniform number: rows may be batched, ordered or
resumed in any way and draw the same.
"""

from functools import lru_cache

import torch
from torch import Tensor

from proximo.samplers.sampler import SamplingOptions
from proximo.types.tensor_types import Float, Int

# The increment and the finaliser of splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit integers.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
SECOND_FACTOR = 0x94D049BB133111EB - 2**64


BLOCK = 128
"""Tokens per block. A block is drawn first, and then a token of it, so that the cumulative sum is over blocks only."""

LOWEST = -1e4
"""A score so far below the highest weighs 0; -inf would too, but 0 · -inf is no number."""

WHOLE = 2.0**61
"""A distribution in integers sums to about this: exact and the same in any order, with room for rounding."""


def uniforms(
    seed: int | Int[Tensor, ""],
    step: int | Int[Tensor, ""],
    keys: Int[Tensor, " R"],
    samples: Int[Tensor, " R"],
    positions: Int[Tensor, " R"],
) -> Float[Tensor, " R"]:
    """One float64 number in [0, 1) for each row, a function of its counter alone."""
    return uniforms_at(row_states(seed, step, keys, samples), positions)


def row_states(
    seed: int | Int[Tensor, ""], step: int | Int[Tensor, ""], keys: Int[Tensor, " R"], samples: Int[Tensor, " R"]
) -> Int[Tensor, " R"]:
    """State of each row, for all its tokens: an engine that keeps it mixes one word a token, not five.

    Seed and step may be tensors on the device, which a recorded graph reads anew each time it is replayed.
    """
    if isinstance(seed, int) and isinstance(step, int):
        state = _root(signed(seed), signed(step))
    else:
        state = torch.zeros((), dtype=torch.int64, device=keys.device)
        for word in (seed, step):
            state = _mixed(state + (signed(word) if isinstance(word, int) else word))
    # Mixing between the words makes their order count: (1, 2) and (2, 1) are different counters.
    return _mixed(_mixed(keys + state) + samples)


def turn_key(key: int, turn: int) -> int:
    """The key of a later turn's random numbers; that of the first turn is the request's own."""
    return key if turn == 0 else int(_mixed(_mixed(torch.tensor(signed(key))) + turn))


def uniforms_at(states: Int[Tensor, " R"], positions: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """The rows' numbers at these positions."""
    return _shifted(_mixed(states + positions), 11).double() * 2.0**-53


@lru_cache(maxsize=64)
def _root(seed: int, step: int) -> int:
    return int(_mixed(_mixed(torch.tensor(seed)) + step))


def draw(
    logits: Float[Tensor, "R V"], uniforms: Float[Tensor, " R"], options: SamplingOptions
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"], Float[Tensor, " R"]]:
    """A token for each row, its log-prob under the distribution it was really drawn from, and the policy's entropy.

    The entropy is of the distribution at the sampling temperature, before top-k, top-p or min-p cut it: what a learner
    computes. With temperature 0 the distribution is a point mass, so log-prob and entropy are 0. Nothing here waits
    for the device or has a shape that depends on values: it can be recorded in a CUDA graph.
    """
    if options.greedy:
        highest, tokens = logits.float().max(dim=-1)
        return tokens, highest - highest, highest - highest  # 0, but NaN where the logits are
    scores = _tempered(logits, options.temperature)
    masses, highest, entropy = _block_masses(scores)
    if options.truncates:
        scores = sampling_logprobs(logits, options)
        masses, highest, _ = _block_masses(scores)
    number = uniforms.unsqueeze(1)
    if logits.shape[1] <= BLOCK:
        tokens, _ = _inverted(masses, number)
    else:
        block, number = _inverted(masses, number)
        places = block * BLOCK + torch.arange(BLOCK, device=logits.device)
        inside = (scores.gather(1, places.clamp(max=logits.shape[1] - 1)) - highest).exp_().double()
        inner, _ = _inverted(inside.masked_fill(places >= logits.shape[1], 0.0), number)
        tokens = block * BLOCK + inner
    logprobs = (scores.gather(1, tokens) - highest).double() - masses.sum(dim=-1, keepdim=True).log()
    return tokens.squeeze(1), logprobs.squeeze(1).float(), entropy


def _block_masses(
    scores: Float[Tensor, "R V"],
) -> tuple[Float[Tensor, "R N"], Float[Tensor, "R 1"], Float[Tensor, " R"]]:
    """The weight of each block of a large vocabulary, the last of which may be shorter, or of each token of a small
    one; the highest score, which weighs 1; and the entropy of the whole.

    A block is read once: it is summed against its own highest score. In float32 inside a block, whose rounding is
    that of the weights themselves; in float64 from there on, since in a float32 sum over all of them rare tokens
    would vanish.
    """
    if scores.shape[1] <= BLOCK:
        highest = scores.amax(dim=-1, keepdim=True)
        below = (scores - highest).clamp_(min=LOWEST)
        masses = below.exp().double()
        return masses, highest, _entropy(masses, masses * below)
    whole = scores.shape[1] // BLOCK * BLOCK
    parts = [_sums(scores[:, :whole].unflatten(1, (-1, BLOCK)))]
    if whole < scores.shape[1]:
        parts.append(_sums(scores[:, whole:].unsqueeze(1)))
    sums, moments, peaks = (torch.cat(each, dim=1) if len(parts) > 1 else each[0] for each in zip(*parts, strict=True))
    highest = peaks.amax(dim=-1, keepdim=True)
    depth = (peaks - highest).double().clamp_(min=LOWEST)
    scale = depth.exp()
    masses = sums.double() * scale
    return masses, highest, _entropy(masses, moments.double() * scale + masses * depth)


def _sums(blocks: Float[Tensor, "R N K"]) -> tuple[Float[Tensor, "R N"], Float[Tensor, "R N"], Float[Tensor, "R N"]]:
    """Sums of weights and of weight · score, and the highest score, of each block, all against that score. A block that
    cannot be drawn has one, too, and sums of 0."""
    peaks = blocks.amax(dim=-1).clamp(min=torch.finfo(blocks.dtype).min)
    below = (blocks - peaks.unsqueeze(-1)).clamp_(min=LOWEST)
    weights = below.exp()
    return weights.sum(dim=-1), below.mul_(weights).sum(dim=-1), peaks


def _entropy(masses: Float[Tensor, "R N"], moments: Float[Tensor, "R N"]) -> Float[Tensor, " R"]:
    """log Σ w − Σ w·score / Σ w, with scores against the highest."""
    total = masses.sum(dim=-1)
    return (total.log() - moments.sum(dim=-1) / total).float()


def _inverted(
    widths: Float[Tensor, "R N"], number: Float[Tensor, "R 1"]
) -> tuple[Int[Tensor, "R 1"], Float[Tensor, "R 1"]]:
    """Lay the widths side by side on [0, 1): the place that holds the number, and how far inside it lies, in [0, 1].

    In integers a sum has no rounding, so a place without width is never met, however a device orders its additions.
    """
    shares = (widths * (WHOLE / widths.sum(dim=-1, keepdim=True))).long()
    heights = shares.cumsum(dim=-1)
    total = heights[:, -1:]
    # The product is rounded to 53 bits and must not reach the total: beyond it there is nothing.
    target = torch.minimum((number * total).long(), total - 1)
    # The bound is for sums of NaN alone, which the log-prob will show.
    index = torch.searchsorted(heights, target, right=True).clamp(max=widths.shape[1] - 1)
    width = shares.gather(1, index)
    return index, (target - heights.gather(1, index) + width).double() / width


def sampling_logprobs(logits: Float[Tensor, "R V"], options: SamplingOptions) -> Float[Tensor, "R V"]:
    """The distribution tokens are drawn from, in float32; -inf on tokens that truncation leaves out."""
    logprobs = torch.log_softmax(_tempered(logits, options.temperature), dim=-1)
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


def _tempered(logits: Float[Tensor, "R V"], temperature: float) -> Float[Tensor, "R V"]:
    return logits.float() if temperature == 1 else logits.float() / temperature


def _mixed(words: Int[Tensor, "*R"]) -> Int[Tensor, "*R"]:
    """A bijection of 64-bit integers in which every bit of the input moves every bit of the output."""
    words = words + INCREMENT
    words = (words ^ _shifted(words, 30)) * FIRST_FACTOR
    words = (words ^ _shifted(words, 27)) * SECOND_FACTOR
    return words ^ _shifted(words, 31)


def _shifted(words: Int[Tensor, "*R"], bits: int) -> Int[Tensor, "*R"]:
    """Shifted right without the sign: torch's shift of a negative integer fills with ones."""
    return (words >> bits) & (2 ** (64 - bits) - 1)


def signed(word: int) -> int:
    """The 64-bit integer with the same low bits."""
    return (word + 2**63) % 2**64 - 2**63
