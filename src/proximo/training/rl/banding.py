"""Whether a clip's band fits the lengths of a run, where the ratio is a mean over a completion's tokens."""

import math
import statistics
from collections.abc import Mapping

from proximo.algorithms import Algorithm
from proximo.maths.pieces.traits import GateTraits, RatioTraits

STEPS = 5
"""Steps with updates that are looked at: a run's first."""
MAX_BLOCKED = 0.3
"""Share of the tokens that a band which fits does not block."""
WIDER = 4
"""Standard deviations of the measured ratio that the proposed band spans to either side: a policy that the band no
longer holds back moves further than the one that was measured."""


class BandWatch:
    """Told of every step's metrics; speaks once, after the first steps, or never. No finding: the run may learn well,
    only later than it would with a band that fits its lengths."""

    def __init__(self, algorithm: Algorithm) -> None:
        low, high = GateTraits.read(algorithm.gate).band
        self._edges = (1 - low, high - 1)
        applies = RatioTraits.read(algorithm.ratio).length_normalised and max(self._edges) > 0
        self._left, self._rows = STEPS if applies else 0, list[tuple[float, float, float]]()

    def look(self, metrics: Mapping[str, object]) -> str | None:
        """A line for a person, where there is something to say."""
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
            f"the clip's band −{self._edges[0]:.2g} / +{self._edges[1]:.2g} blocked {blocked:.0%} of the tokens in the "
            f"first {STEPS} steps: the ratio is a mean over a completion's tokens, and with {length:.3g} of them it "
            f"spreads by {spread:.2g}. Learning is slower for it; --algorithm.gate.low {low:g} --algorithm.gate.high "
            f"{high:g}, about {WIDER} times that spread, would fit these lengths"
        )
