"""The interval of a mean by resampling, beside the t interval, which decides."""

from __future__ import annotations

from collections.abc import Sequence

from ablate.stats.student import CONFIDENCE

LEAST_RESAMPLED = 10
"""Of fewer values resamples are too much alike: their intervals are too narrow and call too much a difference."""


def resampled_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % BCa bootstrap interval of the mean (Efron 1987), by a generator that is always the same.

    None of fewer than `LEAST_RESAMPLED` values, or of values without any spread.
    """
    if len(values) < LEAST_RESAMPLED or len(set(values)) == 1:
        return None
    import numpy as np
    from scipy.stats import bootstrap

    found = bootstrap(
        (np.asarray(values, dtype=float),),
        np.mean,
        confidence_level=CONFIDENCE,
        method="BCa",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)
