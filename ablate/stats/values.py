"""Which numbers compete, and their mean and spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation over `n` seeds; `sd` is None where one seed gives none."""

    mean: float | None
    sd: float | None
    n: int


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
