"""How one number grows with another: a power law with the interval of its exponent."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ablate.stats.student import quantile

SAME_EXPONENT = 0.05
"""Exponents closer than this tell the same growth, however narrow an interval is."""


@dataclass(frozen=True)
class PowerLaw:
    """`y = factor · x ** exponent`, fitted to `n` points; the interval of the exponent is None where two give none.

    `local` is the exponent between the two points of the largest x alone.
    """

    exponent: float
    low: float | None
    high: float | None
    factor: float
    local: float
    n: int

    @property
    def is_straight(self) -> bool:
        """Whether the last two points grow as all do: where not, one exponent does not tell the growth."""
        if self.low is None or self.high is None:
            return True
        return self.low - SAME_EXPONENT <= self.local <= self.high + SAME_EXPONENT


def power_law(xs: Iterable[float], ys: Iterable[float]) -> PowerLaw | None:
    """Least squares of log y over log x, with the 95 % t interval of the slope (n - 2 degrees of freedom).

    None where the points have no such line: fewer than two different x, or a value that is not positive and finite.
    """
    points = sorted(zip(xs, ys, strict=True))
    if any(not math.isfinite(each) or each <= 0 for point in points for each in point):
        return None
    if len({x for x, _ in points}) < 2:
        return None
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (statistics.fmean(column) for column in zip(*logs, strict=True))
    width = math.fsum((x - mean_x) ** 2 for x, _ in logs)
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in logs) / width
    half = None
    if (freedom := len(logs) - 2) > 0:
        rest = math.fsum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in logs)
        half = quantile(freedom) * math.sqrt(rest / freedom / width)
    low, high = (None, None) if half is None else (slope - half, slope + half)
    return PowerLaw(slope, low, high, math.exp(mean_y - slope * mean_x), _last_slope(logs), len(logs))


def _last_slope(logs: list[tuple[float, float]]) -> float:
    """Between the two largest x; of several y at one of them the mean."""
    last, before = sorted({x for x, _ in logs}, reverse=True)[:2]
    rise = [statistics.fmean(y for each, y in logs if each == x) for x in (last, before)]
    return (rise[0] - rise[1]) / (last - before)
