"""Means over seeds, differences paired by seed, and verdicts that refuse to call a difference inside the noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ablate.metrics import Direction

Verdict = Literal[
    "better", "worse", "different", "no clear difference", "single seed", "no common seed", "another task"
]

CONFIDENCE = 0.95


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


def _verdict(low: float, high: float, direction: Direction | None) -> Verdict:
    if low <= 0 <= high:
        return "no clear difference"
    if direction is None:
        return "different"
    return "better" if (high < 0) == (direction == "lower") else "worse"


def _t_quantile(degrees: int) -> float:
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))
