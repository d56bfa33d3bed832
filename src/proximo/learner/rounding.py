"""Bounds on what two ways of computing the same numbers may differ by rounding alone, and what happens beyond them."""

import math
from dataclasses import dataclass

import torch

from proximo.algorithms import Algorithm
from proximo.losses.diagnostics import MismatchStats
from proximo.losses.pieces.protocols import GateTraits
from proximo.models.model_types import PreTrainedConfig, PreTrainedModel

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of transformers' configs for the number of experts of a layer."""
MIXTURE_FACTOR = 10.0
"""Factor by which a mixture's bound is wider: rounding may send a token to another expert."""


@dataclass(frozen=True)
class Bounds:
    """Bounds on the difference between two ways of computing the same."""

    mean: float
    """Bound on the mean of log-probs, over tokens."""
    largest: float
    """Bound on a token's log-prob."""
    relative: float
    """Bound on all log-probs, or on a gradient, as a share of its norm."""
    trusts: bool
    """True if a sampler that is the model itself must be so close that the gate can use its log-probs."""
    stops: float
    """Mean gap of log-probs, over the tokens of a step, beyond which a run stops: no rounding explains it."""


# A step may have few tokens, and a model outside the fast path rounds its residual stream too: `stops` is far above
# `mean`, and above `largest`, the bound of any one token. Chosen with margin, not measured. A fault moves them by nats.
FLOAT32 = Bounds(mean=1e-4, largest=1e-4, relative=1e-4, trusts=True, stops=0.02)
# bfloat16 rounds to 8 digits: 2⁻⁹ = 0.2 % of every state, a few hundred times on the way through some thirty layers
# and, for a gradient, back. Errors of random sign grow with the root of their number: 0.2 % · √(10 · 30 · 2) = 5 % of a
# gradient, and of a logit around 10 some 0.02, of which a log-prob sees the difference to its neighbours. The bounds
# are twice that. What they are to find is far outside: a token or a mask in a wrong place moves log-probs by nats, a
# wrong normaliser a gradient by tens of per cent. On a GPU the mean gap of a real model of 0.5 B is 0.004, of which
# `mean` is twice; of another, of 135 M, 0.008 to 0.012, which nobody has explained.
BFLOAT16 = Bounds(mean=8e-3, largest=0.1, relative=0.1, trusts=False, stops=0.25)
# float16 rounds to 11 digits, an eighth of that. Measured: 0.0005 (0.5 B).
FLOAT16 = Bounds(mean=1e-3, largest=0.0125, relative=0.0125, trusts=False, stops=0.1)


def bounds_of(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Bounds:
    """`dtype` is what it computes in, if that is not its weights'."""
    return {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}.get(dtype or model.dtype, FLOAT32)


def is_mixture(config: PreTrainedConfig) -> bool:
    """True if tokens are routed to experts."""
    text = config.get_text_config()
    return any((getattr(text, name, None) or 0) > 1 for name in EXPERT_COUNTS)


def max_gap(model: PreTrainedModel, dtype: torch.dtype | None = None) -> float:
    """The largest `sampler_gap` that rounding may explain, of a sampler that is the model itself. `dtype` is what it
    computes in, if that is not its weights'."""
    stops = bounds_of(model, dtype).stops
    return min(stops * MIXTURE_FACTOR, 1.0) if is_mixture(model.config) else stops


def check_gap(stats: MismatchStats | None, limit: float | None, model: PreTrainedModel) -> float | None:
    """A ValueError where the sampler is not the policy; numbers that are not finite are the guard's to judge.

    What is left to check: `limit` again while nothing was measured, then None.
    """
    if stats is None or limit is None:
        return limit
    if not math.isfinite(stats.gap) or stats.gap <= limit:
        return None
    kind, precision = type(model).__name__, str(model.dtype).removeprefix("torch.")
    remedy = "" if bounds_of(model) is FLOAT32 else "try dtype float32, or "
    raise ValueError(
        f"sampler_gap is {stats.gap:.3g} nats per token at the first step, above {limit:g}, the most that rounding in "
        f"{precision} explains: {kind} is sampled from another distribution than the one it is trained on. Nothing "
        f"was updated; {remedy}use another model, and report this with the output of proximo selfcheck"
    )


def late_gap(stats: MismatchStats, limit: float) -> str | None:
    """Message on a gap that appears after steps without one; None where rounding explains it."""
    if not stats.gap > limit:
        return None
    return (
        f"sampler_gap is {stats.gap:.3g} nats per token, above {limit:g}, the most that rounding explains, and it was "
        "smaller before: the sampler no longer samples from the policy that is trained, such as one whose weights were "
        "not pushed. Its log-probs are not taken for the old policy's; look at the sampler, and resume from a "
        "checkpoint before this step"
    )


def gate_width(algorithm: Algorithm) -> float:
    """The smallest log-ratio that matters to the gate; PPO's clip where the gate has no edge."""
    return GateTraits.read(algorithm.gate).width
