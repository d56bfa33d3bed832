"""Options of AdamW that all stages share: learning-rate schedules, decays, and the form of its moments."""

import math
from typing import Literal

RateSchedule = Literal["constant", "linear", "cosine"]
"""The learning rate after the warm-up: constant, or falling to 0 at the end, in a straight line or as half a cosine."""
Moments = Literal["float32", "8bit", "cpu"]
"""Where AdamW's two moments are between steps: in float32 on the device, there in 8 bits, or in the host's memory."""
BLOCK = 256
"""Moments that share a scale in 8 bits."""
LEAST_QUANTIZED = 4096
"""Weights of a parameter from which on its moments are quantised."""


def rate_share(schedule: RateSchedule, index: int, *, warmup: int, steps: int | None) -> float:
    """The share of the peak learning rate at a step, counted from 0, of `steps`. None: constant ones need no end.

    Example: rate_share("linear", 10, warmup=0, steps=20) is 0.5
    """
    if index < 0:  # what starts later
        return 0.0
    if index < warmup:
        return (index + 1) / warmup
    if schedule == "constant":
        return 1.0
    assert steps is not None
    left = max(steps - index, 0) / (steps - warmup)
    return left if schedule == "linear" else (1 - math.cos(math.pi * left)) / 2


def check_adam(table: str, beta1: float, beta2: float, epsilon: float) -> None:
    """Raise ValueError for decays outside 0 to 1, or an epsilon that is not positive."""
    for name, value in (("adam_beta1", beta1), ("adam_beta2", beta2)):
        if not 0 <= value < 1:
            raise ValueError(f"{table}.{name} is {value}: give a decay from 0 to below 1, such as 0.9")
    if not epsilon > 0:
        raise ValueError(f"{table}.adam_epsilon is {epsilon}: give a positive number, such as 1e-8")


def moment_bytes(moments: Moments, width: int) -> float:
    """Bytes of the device per weight of `width` bytes, of the two moments."""
    return {"float32": 2.0 * width, "8bit": 2 * (1 + 4 / BLOCK), "cpu": 0.0}[moments]
