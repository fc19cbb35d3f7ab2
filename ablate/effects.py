"""Main effects and interactions of two axes, for each seed a number: contrasts of the means over all other axes.

A main effect is one value's mean less the reference's, an interaction the change of one axis' effect where another axis
has its other value (a difference of differences). Every combination of the other axes' values weighs the same. What a
combination lacks is not guessed: it is left out of the mean for all seeds, and counted with its reason. A fraction is
told whole or not at all: its estimates are sums of aliases (Box, Hunter, Hunter, 2005, Statistics for Experimenters).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Values = Mapping[str, Mapping[int, float]]
"""By variant and seed; a variant without a result has none."""

SAME = "the same variant"
NO_RESULT = "no result"


@dataclass(frozen=True)
class Effect:
    """A contrast of one axis' value with the reference, or of two axes' values; in a fraction with its aliases.

    `averaged` of `combinations` of the other axes' values are in it, the rest is `lost` for these reasons.
    """

    axes: tuple[int, ...]
    levels: tuple[int, ...]
    by_seed: Mapping[int, float]
    averaged: int
    combinations: int
    lost: Mapping[str, int] = field(default_factory=dict)
    aliases: tuple[tuple[int, tuple[int, ...]], ...] = ()


def effects(design: Mapping[str, Any], values: Values) -> list[Effect]:
    """All that a design, as `experiment.json` holds it, tells apart: main effects first. Empty for `one_at_a_time`."""
    if "aliases" in design:
        return _of_fraction(design, values)
    return list(_of_product(design, values)) if design["combine"] == "product" else []


# --- All combinations -------------------------------------------------------------------------------------------------


def _of_product(design: Mapping[str, Any], values: Values) -> Iterator[Effect]:
    cells = {tuple(cell["levels"]): cell for cell in design["cells"]}
    axes = design["axes"]
    others = [[i for i in range(len(axis["levels"])) if i != axis["reference"]] for axis in axes]
    for size in (1, 2):
        for chosen in itertools.combinations(range(len(axes)), size):
            for levels in itertools.product(*(others[axis] for axis in chosen)):
                yield _of_corners(chosen, levels, axes, cells, values)


def _of_corners(
    chosen: tuple[int, ...],
    levels: tuple[int, ...],
    axes: Sequence[Mapping[str, Any]],
    cells: Mapping[tuple[int, ...], Mapping[str, Any]],
    values: Values,
) -> Effect:
    strata = list(itertools.product(*([None] if i in chosen else range(len(a["levels"])) for i, a in enumerate(axes))))
    corners = [[(sign, cells[place]) for sign, place in _corners(stratum, chosen, levels, axes)] for stratum in strata]
    reasons = [_reason([cell for _, cell in each], values) for each in corners]
    usable = [each for each, reason in zip(corners, reasons, strict=True) if reason is None]
    terms = [(sign / len(usable), values[cell["variant"]]) for each in usable for sign, cell in each]
    lost = Counter(reason for reason in reasons if reason)
    return Effect(chosen, levels, _summed(terms), len(usable), len(strata), dict(sorted(lost.items())))


def _corners(
    stratum: tuple[int | None, ...], chosen: tuple[int, ...], levels: tuple[int, ...], axes: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The combinations that are compared where the other axes have these values, each with its sign."""
    for moved in itertools.product((True, False), repeat=len(chosen)):
        at = {
            axis: level if is_moved else axes[axis]["reference"]
            for axis, level, is_moved in zip(chosen, levels, moved, strict=True)
        }
        place = tuple(at[i] if level is None else level for i, level in enumerate(stratum))
        yield math.prod(1 if is_moved else -1 for is_moved in moved), place


def _reason(cells: Sequence[Mapping[str, Any]], values: Values) -> str | None:
    """Why these combinations cannot be compared; None where they can."""
    if missing := next((cell["missing"] for cell in cells if cell["missing"]), None):
        return str(missing)
    if len({cell["variant"] for cell in cells}) < len(cells):
        return SAME
    return None if all(values.get(cell["variant"]) for cell in cells) else NO_RESULT


def _summed(terms: Sequence[tuple[float, Mapping[int, float]]]) -> dict[int, float]:
    """For each seed that all have, the weighted sum."""
    seeds = set.intersection(*(set(each) for _, each in terms)) if terms else set()
    return {seed: math.fsum(weight * each[seed] for weight, each in terms) for seed in sorted(seeds)}


# --- A fraction of them -----------------------------------------------------------------------------------------------


def _of_fraction(design: Mapping[str, Any], values: Values) -> list[Effect]:
    reasons = Counter(reason for cell in design["cells"] if (reason := _reason([cell], values)))
    return [_of_runs(group, design["cells"], values, dict(sorted(reasons.items()))) for group in design["aliases"]]


def _of_runs(
    group: Sequence[Mapping[str, Any]],
    cells: Sequence[Mapping[str, Any]],
    values: Values,
    lost: Mapping[str, int],
) -> Effect:
    """The first effect of a group with all others that come with it; without a run there is no estimate of any."""
    axes = tuple(group[0]["axes"])
    terms = []
    for cell in cells if not lost else ():
        sign = math.prod(2 * cell["levels"][axis] - 1 for axis in axes)
        terms.append((sign * 2 ** len(axes) / len(cells), values[cell["variant"]]))
    aliases = tuple((each["sign"], tuple(each["axes"])) for each in group[1:])
    return Effect(axes, (1,) * len(axes), _summed(terms), len(cells) - sum(lost.values()), len(cells), lost, aliases)
