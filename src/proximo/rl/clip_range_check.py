"""Checks whether the clip range fits a run's lengths, for ratios that are means over a completion's tokens."""

import math
import statistics
from collections.abc import Mapping

from proximo.algorithms import Algorithm
from proximo.losses.pieces.protocols import GateTraits, RatioTraits

STEPS = 5
"""Number of a run's first steps with updates that are measured."""
MAX_BLOCKED = 0.3
"""Share of blocked tokens above which the clip range counts as too narrow."""
WIDER = 4
"""Width of the proposed clip range on either side, in standard deviations of the measured ratio. It has a margin, since
a policy that is clipped less moves further."""


class BandWatch:
    """Watches every step's metrics and gives at most one remark, after the first steps. It is not a finding: the run
    may learn well, only more slowly than with a clip range that fits its lengths."""

    def __init__(self, algorithm: Algorithm) -> None:
        low, high = GateTraits.read(algorithm.gate).band
        self._edges = (1 - low, high - 1)
        applies = RatioTraits.read(algorithm.ratio).length_normalised and max(self._edges) > 0
        self._left, self._rows = STEPS if applies else 0, list[tuple[float, float, float]]()

    def look(self, metrics: Mapping[str, object]) -> str | None:
        """The remark, if there is one."""
        values = [metrics.get(name) for name in ("blocked", "length", "ratio_spread")]
        numbers = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
        if not self._left or len(numbers) < len(values):
            return None
        self._left -= 1
        self._rows.append((numbers[0], numbers[1], numbers[2]))
        if self._left:
            return None
        blocked, length, spread = (statistics.mean(column) for column in zip(*self._rows, strict=True))
        if blocked <= MAX_BLOCKED or spread <= max(self._edges):
            return None
        low, high = (float(f"{edge * WIDER * spread / statistics.mean(self._edges):.1g}") for edge in self._edges)
        return (
            f"the clip range −{self._edges[0]:.2g} / +{self._edges[1]:.2g} blocked {blocked:.0%} of the tokens in the "
            f"first {STEPS} steps: the ratio is a mean over a completion's tokens, and with {length:.3g} tokens its "
            f"standard deviation is {spread:.2g}. This slows learning; algorithm.gate.low = {low:g} "
            f"and algorithm.gate.high = {high:g}, about {WIDER} times that, would fit these lengths"
        )
