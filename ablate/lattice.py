"""The whole number at which a quantity that only grows, or only shrinks, comes nearest to a goal.

Numbers that machines like come first: multiples of 64, then of 32, 16, … Not every number need be possible: those that
are stand close together between two bounds, or are the multiples of one number, or the divisors of one that is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from math import gcd, isqrt, lcm

GRAINS = (64, 32, 16, 8, 4, 2, 1)
MOST = 2**24
"""No dimension is larger."""

_SCANNED = 32
"""Numbers on each side that are looked at one by one where nothing says which are possible."""

_TRIED = 8
"""Multiples of a grain, of which one may be impossible and the next not."""

_ENOUGH = 3
"""Where it is the same at so many numbers it is the same everywhere."""

_LEAP = 8
"""So many times as far as before one looks where nothing is known beyond."""

_CONFIRMED = (1, 3, 4, 6)
"""A step that is possible so many times, and once more where no divisor lies, is one everywhere."""

At = Callable[[int], "float | None"]
"""The quantity at a number; None where that is impossible."""


@dataclass(frozen=True)
class Point:
    """A number, and the quantity there."""

    number: int
    reached: float


def nearest(at: At, start: Point, goal: float, tolerance: float, whole: Iterable[int] = ()) -> Point | None:
    """The point nearest to the goal on the coarsest grain that has one within the relative `tolerance`.

    `start` is a point that there is. Where possible numbers stand in no order, the divisors of `whole` are tried. Where
    no grain has one, the nearest of all; None where the quantity is the same at every number. Raises `CrookedError`
    where it is seen to go both ways.
    """
    search = _Search(at, start, goal, whole)
    if not search.orient():
        return None
    search.close_in()
    for grain in GRAINS:
        best = search.best(search.beside(grain, tolerance))
        if best is not None and mismatch(best.reached, goal) <= tolerance:
            return best
    search.look_beside()
    return search.best(search.points())


def mismatch(reached: float, goal: float) -> float:
    """How far off, in shares of the goal; infinite where that is 0 and not reached."""
    if reached == goal:
        return 0.0
    return abs(reached - goal) / goal if goal else float("inf")


class CrookedError(ValueError):
    """The quantity goes up and down: three points that show it."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.points = points
        super().__init__(", ".join(f"{point.reached:,.0f} at {point.number}" for point in points))


class _Search:
    """What is known of the quantity, and between which possible numbers it passes the goal."""

    def __init__(self, at: At, start: Point, goal: float, whole: Iterable[int]) -> None:
        self.at, self.start, self.goal, self.whole = at, start, goal, whole
        self.known: dict[int, float | None] = {start.number: start.reached}
        self.direction = 0
        self.low, self.high = 0, MOST + 1  # possible numbers before and behind the goal, or these where there are none
        self.floor, self.ceiling = 0, MOST + 1  # nothing is possible up to the one, and from the other on
        self.stride: int | None = None  # of what is possible; 0 where that stands in no order, None where not known

    def points(self) -> list[Point]:
        """All that were found possible, by their numbers."""
        return [Point(number, each) for number, each in sorted(self.known.items()) if each is not None]

    def best(self, points: Iterable[Point]) -> Point | None:
        """The nearest; of two as near the smaller number."""
        return min(points, key=lambda point: (mismatch(point.reached, self.goal), point.number), default=None)

    def orient(self) -> bool:
        """Find a second number at which it differs, and so which way it goes."""
        for guess in self._others():
            self._possible(guess)
            if other := next((point for point in self.points() if point.reached != self.start.reached), None):
                self.direction = 1 if (other.reached > self.start.reached) == (other.number > self.start.number) else -1
                for point in self.points():
                    self._place(point.number)
                return True
        return False

    def close_in(self) -> None:
        """Look until nothing that is possible is left between `low` and `high`."""
        for turn in count():
            guess = self._guess(turn)
            if guess is None:
                return
            if (number := self._possible(guess)) is not None or (number := self._found_between()) is not None:
                self._place(number)
            elif self.stride and self.high > MOST:
                self.ceiling = guess
            elif self.stride and self.low == 0:
                self.floor = guess
            else:
                return

    def look_beside(self) -> None:
        """One number further on each side: what is to be the nearest must not be so because of one odd number."""
        step = self.stride or 1
        self._look(self.low - step)
        self._look(self.high + step)
        self._check()

    def beside(self, grain: int, tolerance: float) -> list[Point]:
        """The grain's nearest possible multiples before and behind the goal, where they may be within the tolerance."""
        found = (self._multiple(self.low, grain, -1, tolerance), self._multiple(self.high, grain, 1, tolerance))
        return [point for point in found if point]

    def _multiple(self, start: int, grain: int, way: int, tolerance: float) -> Point | None:
        number = start
        for _ in range(_TRIED):
            step = lcm(grain, self.stride or 1)
            number = -way * (-way * number // step) * step
            if not 0 < number <= MOST or self._is_beyond(number, start, tolerance):
                return None
            if self._look(number) is not None:
                return Point(number, self._value(number))
            if self.stride and number % self.stride == 0:
                return None
            number += way
        return None

    def _is_beyond(self, number: int, start: int, tolerance: float) -> bool:
        """Whether one on the way there is known not to be near enough."""
        first, last = sorted((number, start))
        between = (point for point in self.points() if first <= point.number <= last)
        return any(mismatch(point.reached, self.goal) > tolerance for point in between)

    def _others(self) -> Iterator[int]:
        """Numbers other than the first, the most promising before."""
        first, value = self.start.number, self.start.reached
        yield min(max(round(first * self.goal / value), 1), _LEAP * first) if value else first + 1
        yield from (first + 1, first - 1, 2 * first, _LEAP * first, _LEAP**2 * first, first // 2, 1)
        if self.stride == 0 and len(self.points()) < _ENOUGH:
            yield from self._out_of_order(first, first)

    def _guess(self, turn: int) -> int | None:
        """Where a straight line through what is known passes the goal, the number before and behind it in turn; every
        third time the middle, which no curve deceives. None where nothing is left.
        """
        step, (low, high) = self.stride or 1, self._ends()
        high = high if high <= MOST else min(_LEAP * max(low, step), high)
        first, last = low // step + 1, (high - 1) // step
        if first > last:
            return None
        guess = (first + last) // 2 if turn % 3 == 2 else int(self._straight()) // step + turn % 3
        return min(max(guess, first), last) * step

    def _straight(self) -> float:
        one, *others = sorted(self.points(), key=lambda point: mismatch(point.reached, self.goal))
        other = next(point for point in others if point.reached != one.reached)
        slope = (other.number - one.number) / (other.reached - one.reached)
        return min(max(one.number + (self.goal - one.reached) * slope, 0.0), float(MOST))

    def _ends(self) -> tuple[int, int]:
        return max(self.low, self.floor), min(self.high, self.ceiling)

    def _place(self, number: int) -> None:
        self._check()
        if self.direction * (self._value(number) - self.goal) < 0:
            self.low = max(self.low, number)
        else:
            self.high = min(self.high, number)

    def _check(self) -> None:
        points = self.points()
        for before, point, behind in zip(points, points[1:], points[2:], strict=False):
            if (point.reached - before.reached) * (behind.reached - point.reached) < 0:
                raise CrookedError([before, point, behind])

    # --- Which numbers are possible -----------------------------------------------------------------------------------

    def _value(self, number: int) -> float:
        found = self.known[number]
        assert found is not None, "it is possible"
        return found

    def _look(self, number: int) -> float | None:
        """The quantity at a number. The first that is impossible makes one ask which are."""
        if not 0 < number <= MOST:
            return None
        if number not in self.known:
            self.known[number] = self.at(number)
        if self.known[number] is None and self.stride is None:
            self.stride = 0
            self.stride = next(filter(self._is_stride, _divisors(self.start.number)), 0)
        return self.known[number]

    def _is_stride(self, step: int) -> bool:
        return any(all(self._look(each) is not None for each in self._confirming(way)) for way in (step, -step))

    def _confirming(self, way: int) -> Iterator[int]:
        yield from (self.start.number + n * way for n in _CONFIRMED)
        further = (self.start.number + n * way for n in count(_CONFIRMED[-1] + 1))
        yield next(each for each in further if each not in self._divisors)

    @cached_property
    def _divisors(self) -> list[int]:
        return sorted({each for whole in set(self.whole) for each in _divisors(whole)})

    def _possible(self, guess: int) -> int | None:
        """The guess, or the number in order before or behind it."""
        if self._look(guess) is not None:
            return guess
        step, (low, high) = self.stride or 0, self._ends()
        near = (guess // step * step, (guess // step + 1) * step) if step else ()
        return next((each for each in near if low < each < high and self._look(each) is not None), None)

    def _found_between(self) -> int | None:
        """Of numbers that stand in no order one between `low` and `high`."""
        if self.stride:
            return None
        numbers = (each for each in self._out_of_order(self.low, self.high) if self.low < each < self.high)
        return next((each for each in numbers if self._look(each) is not None), None)

    def _out_of_order(self, low: int, high: int) -> Iterator[int]:
        """The divisors; then above the one and below the other the next multiples of what divides all that are
        possible, and the next numbers.
        """
        yield from self._divisors
        for step in dict.fromkeys((gcd(*(point.number for point in self.points())), 1)):
            first, last = low // step * step, -(-high // step) * step
            yield from range(first + step, first + _SCANNED * step + 1, step)
            yield from range(last - step, last - _SCANNED * step - 1, -step) if high <= MOST else ()


def _divisors(number: int) -> Iterator[int]:
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    yield from dict.fromkeys((*small, *(number // each for each in reversed(small))))
