"""What so many repeats could have found, and how many more would decide: the power of the paired t test.

Power is that of the noncentral t distribution, of both tails (as in G*Power 3, Faul et al. 2007). It is asked for at
the level at which a contrast is judged: with m contrasts, Holm's first one is judged at 5 %/m.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ablate.stats.student import ALPHA, quantile

POWER = 0.9
"""A difference counts as one that can be seen where it is found with this probability."""

SOUGHT = 0.05
"""The relative difference that repeats are recommended for."""

VISIBLE_HALF_WIDTHS = 1.66
"""A slowdown is found with a probability of `POWER` where it is so many half-widths of a 95 % t interval: 1.57 to 1.66,
as the number of rounds has it.
"""

SD_CONFIDENCE = 0.8
"""How sure the sd is to be that repeats are planned with."""

MOST_REPEATS = 1000

COARSEST = 9.0
"""The largest difference that is told as seen: tenfold. Beyond it a number would say nothing."""

_LEAST_SD = 1e-9
"""Of the difference that is sought: values without any spread are planned with as if they had this much."""


def power(difference: float, sd: float, n: int, level: float = ALPHA) -> float:
    """How often `n` pairs whose differences have this true mean and sd give p <= `level`."""
    return float(_powers(difference / sd, [n], level)[0])


def smallest_difference(sd: float, n: int, level: float = ALPHA) -> float:
    """The true mean that `n` paired differences of this sd find with a probability of `POWER`; `n` is 2 or more."""
    from scipy.special import nctdtrinc  # scipy.stats takes a second to import

    return float(nctdtrinc(n - 1, 1 - POWER, quantile(n - 1, level))) * sd / math.sqrt(n)


def smallest_visible(sd: float, n: int, level: float = ALPHA) -> float:
    """The relative slowdown that `n` rounds find with a probability of `POWER`, where log ratios have this sd."""
    return math.expm1(smallest_difference(sd, n, level))


def visible_by_interval(low: float, high: float) -> float:
    """The same by the interval of a ratio alone, where nobody says how many rounds it is of; never too little."""
    return math.expm1(VISIBLE_HALF_WIDTHS * math.log(high / low) / 2)


def seeds_needed(difference: float, sd: float, n: int, level: float = ALPHA, least_power: float = POWER) -> int | None:
    """The fewest pairs that find this difference with the probability `least_power`; None where 1000 are too few.

    The sd was estimated from `n` pairs, and half of all estimates are too low, those of a few pairs by a lot. So it is
    taken at its upper bound: what is planned with it has at least the power in four of five cases.
    """
    if difference == 0:
        return None
    bound = max(upper_sd(sd, n), _LEAST_SD * abs(difference))
    totals = range(2, MOST_REPEATS + 1)
    found = _powers(difference / bound, totals, level)
    return next((total for total, each in zip(totals, found, strict=True) if each >= least_power), None)


def repeats_needed(sd: float, n: int, difference: float = SOUGHT, contrasts: int = 1) -> int | None:
    """The fewest rounds that find a relative slowdown with a probability of `POWER`, by the sd of log ratios; as the
    first of so many contrasts, so that it is found whatever the others come to.
    """
    return seeds_needed(math.log1p(difference), sd, n, ALPHA / contrasts)


def upper_sd(sd: float, n: int) -> float:
    """What the true sd is not above, with a confidence of `SD_CONFIDENCE`, where `n` normal values have the given."""
    from scipy.special import gammaincinv

    chi_squared = 2 * float(gammaincinv((n - 1) / 2, 1 - SD_CONFIDENCE))
    return sd * math.sqrt((n - 1) / chi_squared)


def _powers(effect: float, totals: Sequence[int], level: float) -> list[float]:
    """Of each number of pairs, with the true mean in units of the true sd."""
    import numpy as np
    from scipy.special import nctdtr, stdtrit

    pairs = np.asarray(totals)
    shift, edge = abs(effect) * np.sqrt(pairs), stdtrit(pairs - 1, 1 - level / 2)
    # Far from zero a tail is not a number: nothing of the distribution is there.
    above, below = (np.nan_to_num(nctdtr(pairs - 1, shift, side), nan=0.0) for side in (edge, -edge))
    return [float(each) for each in 1 - above + below]
