"""How a loss falls with size, and whether the order of variants holds: power laws over the rungs of a ladder.

Each seed has a law of its own, and the interval of an exponent is over seeds (t). What no seed can tell is said by the
exponent between the two largest rungs: where it is clearly another, the points lie on no line. With a floor the law is
loss = floor + factor · x ** exponent (Hoffmann et al., 2022, arXiv:2203.15556), which needs more rungs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ablate.stats import Difference, corrected, paired_difference, power_law

LEAST_FOR_FLOOR = 5
"""Rungs: two more than the law with a floor has numbers."""

Points = Mapping[int, Sequence[tuple[float, float]]]
"""By seed: x and loss at every rung, the smallest x first."""


@dataclass(frozen=True)
class Law:
    """The exponent by seed, over all rungs and between the two largest."""

    points: Points
    rungs: int
    exponents: Mapping[int, float]
    last: Mapping[int, float]
    factors: Mapping[int, float]

    @cached_property
    def floors(self) -> Mapping[int, tuple[float, float]] | None:
        """Floor and exponent of every seed, or None: what only some seeds determine is not determined."""
        found = {}
        for seed, points in self.points.items():
            if (each := floored(points)) is None:
                return None
            found[seed] = each
        return found

    @property
    def exponent(self) -> Difference:
        """Its mean, with the interval over seeds."""
        return _over_seeds(self.exponents)

    @property
    def bend(self) -> Difference:
        """The last exponent minus that of all; clear where no straight line goes through the points."""
        return paired_difference(self.last, self.exponents, None)

    @property
    def floor(self) -> Difference | None:
        """The loss that no size gets below, with the interval over seeds."""
        return None if self.floors is None else _over_seeds({seed: floor for seed, (floor, _) in self.floors.items()})

    @property
    def above(self) -> Difference | None:
        """The exponent of what is above the floor."""
        return None if self.floors is None else _over_seeds({seed: each for seed, (_, each) in self.floors.items()})

    def loss(self, x: float) -> float:
        """The geometric mean over seeds of what the laws without a floor say at `x`."""
        logs = [math.log(self.factors[seed]) + self.exponents[seed] * math.log(x) for seed in self.exponents]
        return math.exp(math.fsum(logs) / len(logs))


def _over_seeds(values: Mapping[int, float]) -> Difference:
    return paired_difference(values, dict.fromkeys(values, 0.0), None)


def law(points: Points) -> Law | None:
    """The laws of all seeds; None where a seed has fewer than two different x, or something that is not positive."""
    found = {seed: power_law(*zip(*each, strict=True)) for seed, each in points.items() if each}
    known = {seed: each for seed, each in found.items() if each is not None}
    if not known or len(known) < len(points):
        return None
    return Law(
        points=points,
        rungs=min(each.n for each in known.values()),
        exponents={seed: each.exponent for seed, each in known.items()},
        last={seed: each.local for seed, each in known.items()},
        factors={seed: each.factor for seed, each in known.items()},
    )


def floored(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Floor and exponent of loss = floor + factor · x ** exponent, by least squares of the logarithm of the loss.

    None where there are too few different x, or where the best floor is none: zero, or the lowest loss itself.
    """
    import numpy as np
    from scipy.optimize import least_squares

    if len({x for x, _ in points}) < LEAST_FOR_FLOOR:
        return None
    x, loss = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    x, lowest = np.log(x / math.exp(float(np.log(x).mean()))), float(loss.min())

    def rest(numbers: object) -> object:
        floor, factor, exponent = np.asarray(numbers)
        return np.log(floor + np.exp(factor + exponent * x)) - np.log(loss)

    starts = [_start(x, loss, share * lowest) for share in (0.1, 0.5, 0.9)]
    bounds = ([0.0, -np.inf, -10.0], [lowest, np.inf, 0.0])
    fits = [least_squares(rest, start, bounds=bounds, x_scale="jac", max_nfev=300) for start in starts]
    best = min(fits, key=lambda fit: float(fit.cost))
    floor, _, exponent = (float(each) for each in best.x)
    inside = 1e-3 * lowest < floor < (1 - 1e-3) * lowest and -9.9 < exponent < -0.01
    return (floor, exponent) if inside else None


def _start(x: object, loss: object, floor: float) -> tuple[float, float, float]:
    """The straight line through the logarithms of what is above a floor."""
    import numpy as np

    exponent, factor = np.polyfit(np.asarray(x), np.log(np.asarray(loss) - floor), 1)
    return floor, float(factor), min(-1e-3, max(-9.0, float(exponent)))


# --- The order of variants --------------------------------------------------------------------------------------------


Losses = Mapping[float, Mapping[str, Mapping[int, float]]]
"""By rung, variant and seed."""


@dataclass(frozen=True)
class Order:
    """The variants from the lowest mean loss on, at each rung, and the pairs that do not keep it.

    `changed` are pairs whose means change sides between two rungs; `clear` those of them that are clearly different at
    both, after Holm over all pairs at all rungs. `tested` are the pairs and rungs, `told` how many are clear.
    """

    by_rung: Mapping[float, Sequence[str]]
    changed: Sequence[tuple[str, str]]
    clear: Sequence[tuple[str, str]]
    tested: int
    told: int

    @property
    def holds(self) -> bool:
        """Whether no mean changes sides."""
        return not self.changed


def order(losses: Losses) -> Order:
    """Of the variants that have a loss at every rung, paired by seed at each."""
    means = {rung: {name: _mean(each) for name, each in at.items()} for rung, at in losses.items()}
    names = sorted(set.intersection(*(set(at) for at in means.values())))
    pairs = list(itertools.combinations(names, 2))
    contrasts = corrected(
        {
            (rung, one, other): paired_difference(losses[rung][one], losses[rung][other], "lower")
            for rung in losses
            for one, other in pairs
        }
    )
    changed = [pair for pair in pairs if _sides({means[rung][pair[0]] - means[rung][pair[1]] for rung in losses})]
    verdicts = {pair: {contrasts[rung, *pair].verdict for rung in losses} for pair in pairs}
    return Order(
        by_rung={rung: sorted(names, key=lambda name, rung=rung: means[rung][name]) for rung in losses},  # type: ignore[misc]
        changed=changed,
        clear=[pair for pair in pairs if {"better", "worse"} <= verdicts[pair]],
        tested=len(contrasts),
        told=sum(each.is_clear for each in contrasts.values()),
    )


def _mean(values: Mapping[int, float]) -> float:
    return math.fsum(values.values()) / len(values)


def _sides(differences: set[float]) -> bool:
    return min(differences) < 0 < max(differences)
