"""Times compared by their ranks alone, whatever their distribution is (Mann and Whitney 1947)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal, TypeVar

from ablate.stats.many import holm
from ablate.stats.student import ALPHA

Key = TypeVar("Key", bound=Hashable)

RankVerdict = Literal["faster", "slower", "no clear difference", "too few rounds"]


@dataclass(frozen=True)
class Ranks:
    """The two-sided Mann-Whitney test of the times of `n` rounds against as many of the baseline.

    `u` counts the pairs in which the baseline was faster; `adjusted` is p after Holm, as one of so many `contrasts`.
    """

    u: float
    p: float
    adjusted: float
    n: int
    contrasts: int

    @property
    def verdict(self) -> RankVerdict:
        """What the ranks say; nothing where not even times without any overlap could be told apart."""
        if self.n < rounds_to_decide(self.contrasts):
            return "too few rounds"
        if self.adjusted > ALPHA:
            return "no clear difference"
        return "slower" if self.u > self.n**2 / 2 else "faster"


def rounds_to_decide(contrasts: int) -> int:
    """The fewest rounds whose times, if none overlap, differ after Holm whatever the other contrasts say.

    Of n times against n there are C(2n, n) orders, each as likely as the other where nothing differs.
    """
    return next(n for n in range(1, 100) if 2 / comb(2 * n, n) <= ALPHA / contrasts)


def by_rank(pairs: Mapping[Key, tuple[Sequence[float], Sequence[float]]]) -> dict[Key, Ranks]:
    """Each contrast's times and the baseline's, compared; those without any are left out."""
    found = {key: (*_mann_whitney(*pair), len(pair[0])) for key, pair in pairs.items() if pair[0]}
    adjusted = holm([p for _, p, _ in found.values()])
    return {
        key: Ranks(u, p, each, n, len(found)) for (key, (u, p, n)), each in zip(found.items(), adjusted, strict=True)
    }


def _mann_whitney(times: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    if len({*times, *baseline}) == 1:
        return len(times) ** 2 / 2, 1.0
    from scipy.stats import mannwhitneyu

    exact = len({*times, *baseline}) == len(times) + len(baseline) and len(times) <= _MOST_EXACT
    found = mannwhitneyu(times, baseline, method="exact" if exact else "asymptotic")
    return float(found.statistic), float(found.pvalue)


_MOST_EXACT = 50
"""Of more rounds, or where two times are equal, the normal approximation tells p."""
