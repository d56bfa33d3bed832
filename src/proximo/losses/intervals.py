"""Student's t: confidence intervals of a mean, valid for few values."""

import math
import statistics
from collections.abc import Sequence

T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantiles for 1 to 30 degrees of freedom."""
_Z = 1.959964
"""97.5 % quantile for infinitely many degrees of freedom."""


def t_quantile_95(df: int) -> float:
    """The 97.5 % quantile of Student's t; beyond the table by a series in 1 / df, accurate to 4 digits."""
    if df <= len(T95):
        return T95[df - 1]
    first, second = (_Z**3 + _Z) / 4, (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    third = (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384
    return _Z + first / df + second / df**2 + third / df**3


def half_width(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean; NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan
    return t_quantile_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
