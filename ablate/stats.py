"""Means over seeds, differences paired by seed, and verdicts that refuse to call a difference inside the noise.

Times are compared by their ratio, paired by round: noise of a machine is in proportion to what it disturbs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ablate.metrics import Direction

Verdict = Literal[
    "better",
    "worse",
    "different",
    "no clear difference",
    "single seed",
    "no common seed",
    "another task",
    "trained against only profiled",
]

TimingVerdict = Literal["faster", "slower", "no clear difference", "single round", "no common round"]

CONFIDENCE = 0.95

POWER = 0.9
"""A difference counts as one that can be seen where it is found with this probability."""

SOUGHT = 0.05
"""The relative difference that repeats are recommended for."""

MOST_HIDDEN = 0.1
"""A check that would miss a larger relative difference is no check: what it found equal may be anything. Twice what
repeats are recommended for, so that rounds as recommended pass also where chance makes them look noisier.
"""

VISIBLE_HALF_WIDTHS = 1.66
"""A slowdown is found with a probability of `POWER` where it is so many half-widths of a 95 % t interval: 1.57 to 1.66,
as the number of rounds has it.
"""

SD_CONFIDENCE = 0.8
"""How sure the sd is to be that repeats are planned with."""

MOST_REPEATS = 1000


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation over `n` seeds; `sd` is None where one seed gives none."""

    mean: float | None
    sd: float | None
    n: int


@dataclass(frozen=True)
class Difference:
    """Variant minus baseline over the seeds both have; the interval is None where `n` seeds give none."""

    mean: float | None
    low: float | None
    high: float | None
    n: int
    verdict: Verdict

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.verdict in ("better", "worse", "different")


@dataclass(frozen=True)
class Ratio:
    """A variant's time by the baseline's: the geometric mean over `n` rounds that both have, and its interval.

    `sd` is that of the ratios' logarithms.
    """

    mean: float | None
    low: float | None
    high: float | None
    sd: float | None
    n: int
    verdict: TimingVerdict

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes equality."""
        return self.verdict in ("faster", "slower")

    @property
    def holds_equality(self) -> bool:
        """Whether there is an interval and it holds equality."""
        return self.verdict == "no clear difference"

    @property
    def visible(self) -> float | None:
        """The relative slowdown that so many rounds at this noise find; None where there is no interval."""
        return None if self.sd is None else smallest_visible(self.sd, self.n)

    @property
    def is_coarse(self) -> bool:
        """Whether more than `MOST_HIDDEN` would go unseen."""
        return self.visible is None or self.visible > MOST_HIDDEN

    def is_beyond(self, difference: float) -> bool:
        """Whether the whole interval is further from equality than a relative difference, to either side."""
        if self.low is None or self.high is None:
            return False
        return self.low > 1 + difference or self.high < 1 / (1 + difference)


def finite(value: Any) -> float | None:
    """`value` as a finite number, or None: NaN, infinity, missing values, truth values and text are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def values_by_seed(rows: Iterable[Mapping[str, Any]], column: str) -> dict[int, float]:
    """What competes: the finite values of `column` among rows that ended `ok`, by seed."""
    found = {}
    for row in rows:
        value = finite(row.get(column))
        if row.get("status") == "ok" and value is not None and row.get("seed") is not None:
            found[int(row["seed"])] = value
    return dict(sorted(found.items()))


def summarize(values: Iterable[float]) -> Summary:
    """Mean and sample standard deviation of finite values."""
    known = list(values)
    if not known:
        return Summary(None, None, 0)
    sd = statistics.stdev(known) if len(known) > 1 else None
    return Summary(statistics.fmean(known), sd, len(known))


def paired_difference(
    variant: Mapping[int, float], baseline: Mapping[int, float], direction: Direction | None
) -> Difference:
    """The mean difference over common seeds, its 95 % t interval, and what it says in the metric's `direction`."""
    differences = [variant[seed] - baseline[seed] for seed in sorted(variant.keys() & baseline.keys())]
    summary = summarize(differences)
    if summary.mean is None:
        return Difference(None, None, None, 0, "no common seed")
    if summary.sd is None:
        return Difference(summary.mean, None, None, 1, "single seed")
    half = _t_quantile(summary.n - 1) * summary.sd / math.sqrt(summary.n)
    low, high = summary.mean - half, summary.mean + half
    return Difference(summary.mean, low, high, summary.n, _verdict(low, high, direction))


def paired_ratio(variant: Mapping[int, float], baseline: Mapping[int, float]) -> Ratio:
    """The mean ratio of times over common rounds, with the 95 % t interval of their logarithms."""
    rounds = [each for each in sorted(variant.keys() & baseline.keys()) if variant[each] > 0 and baseline[each] > 0]
    summary = summarize(math.log(variant[each] / baseline[each]) for each in rounds)
    if summary.mean is None:
        return Ratio(None, None, None, None, 0, "no common round")
    if summary.sd is None:
        return Ratio(math.exp(summary.mean), None, None, None, 1, "single round")
    half = _t_quantile(summary.n - 1) * summary.sd / math.sqrt(summary.n)
    low, high = summary.mean - half, summary.mean + half
    verdict: TimingVerdict = "no clear difference" if low <= 0 <= high else "faster" if high < 0 else "slower"
    return Ratio(math.exp(summary.mean), math.exp(low), math.exp(high), summary.sd, summary.n, verdict)


def smallest_visible(sd: float, n: int) -> float:
    """The relative slowdown that `n` rounds find with a probability of `POWER`, where log ratios have this sd."""
    from scipy.special import nctdtrinc  # scipy.stats takes a second to import

    shift = float(nctdtrinc(n - 1, 1 - POWER, _t_quantile(n - 1)))
    return math.expm1(shift * sd / math.sqrt(n))


def visible_by_interval(low: float, high: float) -> float:
    """The same by the interval of a ratio alone, where nobody says how many rounds it is of; never too little."""
    return math.expm1(VISIBLE_HALF_WIDTHS * math.log(high / low) / 2)


def repeats_needed(sd: float, n: int, difference: float = SOUGHT, power: float = POWER) -> int | None:
    """The fewest rounds that find a relative slowdown with the probability `power`; None where 1000 are too few.

    The sd was estimated from `n` rounds, and half of all estimates are too low, those of a few rounds by a lot. So it
    is taken at its upper bound: what is planned with it has at least the power in four of five cases.
    """
    import numpy as np
    from scipy.special import nctdtr, stdtrit

    rounds = np.arange(2, MOST_REPEATS + 1)
    bound = max(upper_sd(sd, n), 1e-9)
    shift = math.log1p(difference) * np.sqrt(rounds) / bound
    edge = stdtrit(rounds - 1, (1 + CONFIDENCE) / 2)
    # Far from zero the distribution's tail is not a number: nothing is missed there.
    missed = np.nan_to_num(nctdtr(rounds - 1, shift, edge) - nctdtr(rounds - 1, shift, -edge), nan=0.0)
    enough = np.flatnonzero(1 - missed >= power)
    return int(rounds[enough[0]]) if len(enough) else None


def upper_sd(sd: float, n: int) -> float:
    """What the true sd is not above, with a confidence of `SD_CONFIDENCE`, where `n` normal values have the given."""
    from scipy.special import gammaincinv

    chi_squared = 2 * float(gammaincinv((n - 1) / 2, 1 - SD_CONFIDENCE))
    return sd * math.sqrt((n - 1) / chi_squared)


def _verdict(low: float, high: float, direction: Direction | None) -> Verdict:
    if low <= 0 <= high:
        return "no clear difference"
    if direction is None:
        return "different"
    return "better" if (high < 0) == (direction == "lower") else "worse"


# --- Growth -----------------------------------------------------------------------------------------------------------


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
        half = _t_quantile(freedom) * math.sqrt(rest / freedom / width)
    low, high = (None, None) if half is None else (slope - half, slope + half)
    return PowerLaw(slope, low, high, math.exp(mean_y - slope * mean_x), _last_slope(logs), len(logs))


def _last_slope(logs: list[tuple[float, float]]) -> float:
    """Between the two largest x; of several y at one of them the mean."""
    last, before = sorted({x for x, _ in logs}, reverse=True)[:2]
    rise = [statistics.fmean(y for each, y in logs if each == x) for x in (last, before)]
    return (rise[0] - rise[1]) / (last - before)


def _t_quantile(degrees: int) -> float:
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))
