"""Many contrasts at once: how sure each is when all of them were looked at (Holm 1979)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

from ablate.stats.paired import Difference
from ablate.stats.ratios import Ratio
from ablate.stats.student import ALPHA

Key = TypeVar("Key", bound=Hashable)
Contrast = TypeVar("Contrast", Difference, Ratio)


def holm(ps: Sequence[float], pending: int = 0) -> list[float]:
    """The p values, each adjusted so that any at all is 5 % or less in 5 % of experiments without a difference.

    `pending` contrasts more have no p value yet: they count as if it were 1.
    """
    order = sorted(range(len(ps)), key=ps.__getitem__)
    total = len(ps) + pending
    steps = accumulate(((total - rank) * ps[place] for rank, place in enumerate(order)), max)
    found = {place: min(1.0, step) for place, step in zip(order, steps, strict=True)}
    return [found[place] for place in range(len(ps))]


def corrected(contrasts: Mapping[Key, Contrast], pending: int = 0) -> dict[Key, Contrast]:
    """The same contrasts with p values after Holm, which take the verdict from what only their number let through."""
    known = {key: each.p for key, each in contrasts.items() if each.p is not None}
    adjusted = dict(zip(known, holm(list(known.values()), pending), strict=True))
    total = len(known) + pending
    return {key: each if each.p is None else _corrected(each, adjusted[key], total) for key, each in contrasts.items()}


def _corrected(contrast: Contrast, adjusted: float, total: int) -> Contrast:
    told = replace(contrast, adjusted=adjusted, contrasts=total)
    if total > 1 and contrast.is_clear and adjusted > ALPHA:
        return replace(told, verdict="no clear difference (after Holm)")
    return told
