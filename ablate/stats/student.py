"""Student's t: the half-width of an interval, and how often chance alone gives as much (Student 1908)."""

from __future__ import annotations

import math

CONFIDENCE = 0.95

ALPHA = 0.05
"""How often a difference may be declared where there is none: 1 - `CONFIDENCE`."""


def quantile(degrees: int, level: float = ALPHA) -> float:
    """What |t| exceeds with a probability of `level`, with so many degrees of freedom."""
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    return float(stdtrit(degrees, 1 - level / 2))


def two_sided_p(mean: float, sd: float, n: int) -> float:
    """The p value of the t test that the mean of `n` values is zero; of values without any spread 0 or 1."""
    from scipy.special import stdtr

    if sd == 0:
        return 1.0 if mean == 0 else 0.0
    return 2 * float(stdtr(n - 1, -abs(mean) / (sd / math.sqrt(n))))


def interval(mean: float, sd: float, n: int) -> tuple[float, float]:
    """The 95 % t interval of the mean of `n` values."""
    half = quantile(n - 1) * sd / math.sqrt(n)
    return mean - half, mean + half
