"""Differences paired by seed: their interval, their p value, how large they are beside the noise, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ablate.metrics import Direction
from ablate.stats.power import seeds_needed, smallest_difference
from ablate.stats.student import ALPHA, interval, two_sided_p
from ablate.stats.values import summarize

Verdict = Literal[
    "better",
    "worse",
    "different",
    "no clear difference",
    "no clear difference (after Holm)",
    "single seed",
    "no common seed",
    "another task",
    "trained against only profiled",
]


_ROUNDING = 1e-12
"""Of a mean: less spread than this is that of numbers as a computer holds them."""


@dataclass(frozen=True)
class Difference:
    """Variant minus baseline over the seeds both have; the interval is None where `n` seeds give none.

    `p` is that of the paired t test, `adjusted` the same after Holm, as one of so many `contrasts`.
    """

    mean: float | None
    low: float | None
    high: float | None
    n: int
    verdict: Verdict
    sd: float | None = None
    p: float | None = None
    adjusted: float | None = None
    contrasts: int = 1

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero, and the number of contrasts does not explain it."""
        return self.verdict in ("better", "worse", "different")

    @property
    def level(self) -> float:
        """What p must not exceed to be declared whatever the other contrasts say: Holm's first step."""
        return ALPHA / self.contrasts

    @property
    def effect(self) -> float | None:
        """Hedges' g_z; None where there is none."""
        return None if self.mean is None or self.sd is None else hedges_g(self.mean, self.sd, self.n)

    @property
    def is_same(self) -> bool:
        """Whether both are equal with every one of several seeds: then no further one is to be expected to differ."""
        return self.mean == 0 and self.sd == 0

    @property
    def visible(self) -> float | None:
        """The true difference that so many seeds at this noise find with `POWER`; None where they show no noise."""
        if self.mean is None or self.sd is None or self.sd <= _ROUNDING * abs(self.mean):
            return None
        return smallest_difference(self.sd, self.n, self.level)

    def further_seeds(self) -> int | None:
        """How many more seeds find a difference as large as this with `POWER`; 0 where it is found already.

        None where `MOST_REPEATS` are too few, or no interval tells the noise.
        """
        if self.is_clear:
            return 0
        if self.mean is None or self.sd is None:
            return None
        total = seeds_needed(self.mean, self.sd, self.n, self.level)
        return None if total is None else max(1, total - self.n)

    def reversed(self) -> Difference:
        """Baseline minus variant."""
        opposite: dict[Verdict, Verdict] = {"better": "worse", "worse": "better"}
        mean, low, high = (None if each is None else -each for each in (self.mean, self.high, self.low))
        return replace(self, mean=mean, low=low, high=high, verdict=opposite.get(self.verdict, self.verdict))


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
    low, high = interval(summary.mean, summary.sd, summary.n)
    p = two_sided_p(summary.mean, summary.sd, summary.n)
    return Difference(summary.mean, low, high, summary.n, _verdict(low, high, direction), summary.sd, p, p)


def hedges_g(mean: float, sd: float, n: int) -> float | None:
    """The mean of `n` paired differences in units of their sd, corrected for few pairs (Hedges 1981, exact factor).

    None where two pairs, or no spread but that of rounding, give none: with one degree of freedom its expectation does
    not exist.
    """
    degrees = n - 1
    if degrees < 2 or sd <= _ROUNDING * abs(mean):
        return None
    factor = math.exp(math.lgamma(degrees / 2) - math.lgamma((degrees - 1) / 2)) / math.sqrt(degrees / 2)
    return factor * mean / sd


def _verdict(low: float, high: float, direction: Direction | None) -> Verdict:
    if low <= 0 <= high:
        return "no clear difference"
    if direction is None:
        return "different"
    return "better" if (high < 0) == (direction == "lower") else "worse"
