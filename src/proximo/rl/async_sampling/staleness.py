"""Warns about completions of older weights that nothing corrects for."""

import math
import statistics
from collections.abc import Mapping

from proximo.algorithms import Algorithm
from proximo.losses.pieces.protocols import AnchorTraits

STEPS = 3
"""Number of a run's first steps with older weights that are measured."""


class StaleWatch:
    """Watches every step's metrics and warns at most once, with the measured gap."""

    def __init__(self, staleness: int, algorithm: Algorithm) -> None:
        # With the sampler's own policy as the anchor, the ratio is the correction.
        is_corrected = algorithm.correct is not None or AnchorTraits.read(algorithm.anchor).needs_sampler_logprobs
        self._staleness = 0 if is_corrected else staleness
        self._gaps: list[tuple[float, float]] = []

    def look(self, metrics: Mapping[str, object]) -> str | None:
        """The warning, if there is one."""
        values = [metrics.get(name) for name in ("mismatch_kl", "mismatch_ess")]
        gap = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
        if not self._staleness or len(gap) < len(values):
            return None
        self._gaps.append((gap[0], gap[1]))
        if len(self._gaps) <= STEPS:  # the first step has the policy's own weights
            return None
        kl, effective = (statistics.mean(column) for column in zip(*self._gaps[1:], strict=True))
        staleness, self._staleness = self._staleness, 0
        return (
            f"ahead.staleness is {staleness} and the algorithm has no correction: in the first {STEPS} steps with "
            f"older weights the sampler was {kl:.2g} nats a token from the policy, and the effective sample size "
            f"{effective:.0%} of the tokens. Use TokenTruncated in algorithm.correct: ratios still compare with the "
            "policy at the start of the step, and the correction with the sampler"
        )
