"""What a clip's band means where the ratio is a mean over a completion's tokens."""

import math

from proximo.algorithms import Algorithm
from proximo.losses.pieces.traits import GateTraits, RatioTraits

NOISE = 0.05
"""Standard deviation of one token's log-ratio, to give an example with: some updates away from the old policy."""
LENGTHS = (3, 100, 10_000)


def what_the_band_means(algorithm: Algorithm) -> list[str]:
    """Lines on the lengths for which the band is meant; none where the length does not matter to it."""
    low, high = GateTraits.read(algorithm.gate).band
    width = max(1 - low, high - 1)
    if not RatioTraits.read(algorithm.ratio).length_normalised or width <= 0:
        return []
    length = float(f"{(NOISE / width) ** 2:.3g}")
    spreads = ", ".join(f"{NOISE / math.sqrt(length):.2g} at {length:,} tokens" for length in LENGTHS)
    lines = [
        "log ρ is a mean over |y| tokens: with a spread of σ at each token it spreads by about σ/√|y|, so the same "
        "band is wide for long completions and narrow for short ones",
        f"with σ = {NOISE:g} that is {spreads}",
    ]
    if length < 1:  # no completion is as short
        return lines
    lines[-1] += (
        f"; the band −{1 - low:.2g} / +{high - 1:.2g} is as wide at about "
        f"{length:,.0f} tokens. Much shorter completions are mostly blocked: widen "
        "gate.low and gate.high to a few times ratio_spread in metrics.jsonl"
    )
    return lines
