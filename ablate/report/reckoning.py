"""What the terms of a claim come to, by seed or round, and the interval of it.

`abs`, `min` and `max` choose. Seed by seed they would choose by noise: of two equal losses one is always the larger. So
each alternative is reckoned by itself, and the chosen one's interval lies between the chosen ends of theirs, which are
wider where there are more than two (Bonferroni).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Literal, TypeVar

from ablate.claims import Call, Chain, Figure, Negative, Number, Term, parts
from ablate.stats import CONFIDENCE, repeats_needed, summarize

T = TypeVar("T")


class Unclear(Exception):
    """Why a claim cannot be judged."""


Values = tuple[float, ...]
"""By seed or round."""

Kind = Literal["min", "max"]


@dataclass(frozen=True)
class _Choice:
    """The smallest or the largest of several."""

    kind: Kind
    parts: tuple[Value, ...]

    def chosen(self, values: Iterable[T]) -> T:
        """The one among values of its parts."""
        return min(values) if self.kind == "min" else max(values)  # type: ignore[type-var]


Value = Values | _Choice


def leaves(value: Value) -> Iterator[Values]:
    """All alternatives."""
    if isinstance(value, _Choice):
        for each in value.parts:
            yield from leaves(each)
    else:
        yield value


def _choice(kind: Kind, parts: Sequence[Value]) -> Value:
    """Known numbers are chosen from at once."""
    choice = _Choice(kind, tuple(parts))
    return _settled(choice) if all(len(set(leaf)) == 1 for leaf in leaves(choice)) else choice


def _settled(value: Value) -> Values:
    return value.chosen(map(_settled, value.parts)) if isinstance(value, _Choice) else value


def _turned(value: Value, function: Callable[[float], float]) -> Value:
    """A falling function of it."""
    if isinstance(value, _Choice):
        return _Choice("max" if value.kind == "min" else "min", tuple(_turned(each, function) for each in value.parts))
    return tuple(map(function, value))


def total(one: Value, other: Value) -> Value:
    """The sum."""
    if isinstance(one, _Choice):
        return _Choice(one.kind, tuple(total(each, other) for each in one.parts))
    if isinstance(other, _Choice):
        return total(other, one)
    return tuple(starmap(operator.add, zip(one, other, strict=True)))


def negative(value: Value) -> Value:
    """With the other sign."""
    return _turned(value, operator.neg)


def _product(one: Value, other: Value) -> Value:
    """A choice times what is nowhere below zero is the same choice among products."""
    if isinstance(one, _Choice):
        if _sign(other) < 0:
            return _product(negative(one), negative(other))
        return _Choice(one.kind, tuple(_product(each, other) for each in one.parts))
    if isinstance(other, _Choice):
        return _product(other, one)
    return tuple(starmap(operator.mul, zip(one, other, strict=True)))


def _sign(value: Value) -> int:
    every = [each for leaf in leaves(value) for each in leaf]
    if min(every) < 0 < max(every):
        raise Unclear("a choice of abs, min or max is multiplied by, or divides, what is above and below zero")
    return -1 if min(every) < 0 else 1


def _inverse(value: Value) -> Value:
    if any(each == 0 for leaf in leaves(value) for each in leaf):
        raise Unclear("it divides by zero")
    if isinstance(value, _Choice):
        _sign(value)
    return _turned(value, lambda each: 1 / each)


def reckoned(term: Term, given: Mapping[Figure, Values]) -> Value:
    """A term's values, where each figure has the given. Raises `Unclear`."""
    if isinstance(term, Number):
        return (term.value,) * len(next(iter(given.values())))
    if isinstance(term, Figure):
        return given[term]
    if isinstance(term, Negative):
        return negative(reckoned(term.inner, given))
    if isinstance(term, Call):
        return _called(term, [reckoned(each, given) for each in term.terms])
    found = reckoned(term.first, given)
    for sign, each in term.rest:
        found = _STEPS[sign](found, reckoned(each, given))
    return found


def size(term: Term, given: Mapping[Figure, Values]) -> float:
    """The size of its largest summand, which is what rounding is in proportion to."""
    if isinstance(term, Number | Figure) or (isinstance(term, Chain) and term.rest[0][0] in "*/"):
        return abs(estimate(reckoned(term, given), exact=True).value)
    return max(size(each, given) for each in parts(term))


def _called(call: Call, values: Sequence[Value]) -> Value:
    if call.name == "abs":
        return _choice("max", [values[0], negative(values[0])])
    return _choice("min" if call.name == "min" else "max", values)


_STEPS: Mapping[str, Callable[[Value, Value], Value]] = {
    "+": total,
    "-": lambda one, other: total(one, negative(other)),
    "*": _product,
    "/": lambda one, other: _product(one, _inverse(other)),
}


# --- Intervals --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, whose ends are None where one seed or round gives none."""

    value: float
    low: float | None
    high: float | None


def estimate(value: Value, *, exact: bool) -> Estimate:
    """The mean and its t interval; of a choice what is chosen among means, lower ends and upper ends."""
    alternatives = list(leaves(value))
    confidence = 0.0 if exact else 1 - (1 - CONFIDENCE) / max(1.0, len(alternatives) / 2)
    mean, low, high = _bounds(value, confidence)
    return Estimate(mean, low, high) if exact or len(alternatives[0]) > 1 else Estimate(mean, None, None)


def _bounds(value: Value, confidence: float) -> tuple[float, float, float]:
    if isinstance(value, _Choice):
        mean, low, high = map(value.chosen, zip(*(_bounds(each, confidence) for each in value.parts), strict=True))
        return (mean, *_mirrored(value, low, high))
    summary = summarize(value)
    assert summary.mean is not None
    half = _half_width(summary.sd, summary.n, confidence) if summary.sd and confidence else 0.0
    return summary.mean, summary.mean - half, summary.mean + half


def _mirrored(choice: _Choice, low: float, high: float) -> tuple[float, float]:
    """The bounds, but of a value and its mirror image, as `abs` has them, not beyond the mirror: it has no noise."""
    one, other = choice.parts[0], choice.parts[-1]
    if isinstance(one, _Choice) or isinstance(other, _Choice) or len(choice.parts) != 2:
        return low, high
    mirror, *rest = ((a + b) / 2 for a, b in zip(one, other, strict=True))
    if not all(math.isclose(each, mirror, rel_tol=1e-9, abs_tol=1e-9 * max(map(abs, one))) for each in rest):
        return low, high
    return (max(low, mirror), high) if choice.kind == "max" else (low, min(high, mirror))


def _half_width(sd: float, n: int, confidence: float) -> float:
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    return float(stdtrit(n - 1, (1 + confidence) / 2)) * sd / math.sqrt(n)


def further_needed(value: Value, n: int) -> int | None:
    """The seeds or rounds beyond `n` that would decide: of all alternatives, or of the first, as the choice has it."""
    needed = _needed(value, n, estimate(value, exact=True).value)
    return None if needed is None else max(1, needed - n)


def _needed(value: Value, n: int, side: float) -> int | None:
    """The sign of a largest value is known when one is above zero, or when all are below."""
    if isinstance(value, _Choice):
        parts = [each for each in value.parts if estimate(each, exact=True).value * side > 0]
        counts = [_needed(each, n, side) for each in parts]
        known = [count for count in counts if count is not None]
        if (value.kind == "max") == (side > 0):
            return min(known, default=None)
        return max(known) if known and len(known) == len(value.parts) else None
    summary = summarize(value)
    if summary.sd is None or not summary.mean:
        return None
    return repeats_needed(summary.sd / abs(summary.mean), n, math.expm1(1.0))
