"""Times are compared by their ratio, paired by round: noise of a machine is in proportion to what it disturbs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ablate.stats.power import smallest_visible
from ablate.stats.student import ALPHA, interval, two_sided_p
from ablate.stats.values import summarize

TimingVerdict = Literal[
    "faster",
    "slower",
    "no clear difference",
    "no clear difference (after Holm)",
    "single round",
    "no common round",
]

MOST_HIDDEN = 0.1
"""A check that would miss a larger relative difference is no check: what it found equal may be anything. Twice what
repeats are recommended for, so that rounds as recommended pass also where chance makes them look noisier.
"""


@dataclass(frozen=True)
class Ratio:
    """A variant's time by the baseline's: the geometric mean over `n` rounds that both have, and its interval.

    `sd` is that of the ratios' logarithms, `p` that of their t test, `adjusted` the same after Holm, as one of so many
    `contrasts`.
    """

    mean: float | None
    low: float | None
    high: float | None
    sd: float | None
    n: int
    verdict: TimingVerdict
    p: float | None = None
    adjusted: float | None = None
    contrasts: int = 1

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes equality, and the number of contrasts does not explain it."""
        return self.verdict in ("faster", "slower")

    @property
    def holds_equality(self) -> bool:
        """Whether there is an interval and it holds equality."""
        return self.verdict == "no clear difference"

    @property
    def visible(self) -> float | None:
        """The relative slowdown that so many rounds at this noise find; None where there is no interval."""
        return None if self.sd is None else smallest_visible(self.sd, self.n, ALPHA / self.contrasts)

    @property
    def is_coarse(self) -> bool:
        """Whether more than `MOST_HIDDEN` would go unseen."""
        return self.visible is None or self.visible > MOST_HIDDEN

    def is_beyond(self, difference: float) -> bool:
        """Whether the whole interval is further from equality than a relative difference, to either side."""
        if self.low is None or self.high is None:
            return False
        return self.low > 1 + difference or self.high < 1 / (1 + difference)


def paired_ratio(variant: Mapping[int, float], baseline: Mapping[int, float]) -> Ratio:
    """The mean ratio of times over common rounds, with the 95 % t interval of their logarithms."""
    rounds = [each for each in sorted(variant.keys() & baseline.keys()) if variant[each] > 0 and baseline[each] > 0]
    summary = summarize(math.log(variant[each] / baseline[each]) for each in rounds)
    if summary.mean is None:
        return Ratio(None, None, None, None, 0, "no common round")
    if summary.sd is None:
        return Ratio(math.exp(summary.mean), None, None, None, 1, "single round")
    low, high = interval(summary.mean, summary.sd, summary.n)
    verdict: TimingVerdict = "no clear difference" if low <= 0 <= high else "faster" if high < 0 else "slower"
    p = two_sided_p(summary.mean, summary.sd, summary.n)
    return Ratio(math.exp(summary.mean), math.exp(low), math.exp(high), summary.sd, summary.n, verdict, p, p)
