"""The whole number at which a quantity that only grows, or only shrinks, comes nearest to a goal.

Numbers that machines like come first: multiples of 64, then of 32, 16, … Not every number need be possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

GRAINS = (64, 32, 16, 8, 4, 2, 1)
MOST = 2**24
"""No dimension is larger."""

_TRIES = 128
"""Multiples on each side of a guess that may be impossible before it is given up."""

_LEAP = 8
"""So many times as far as before one looks where nothing is known beyond."""

At = Callable[[int], "float | None"]
"""The quantity at a number; None where that is impossible."""


@dataclass(frozen=True)
class Point:
    """A number, and the quantity there."""

    number: int
    reached: float


def nearest(at: At, start: int, goal: float, tolerance: float) -> Point | None:
    """The point nearest to the goal on the coarsest grain that has one within the relative `tolerance`.

    Where none has, the nearest of all; None where the quantity is the same at every number, or no number is possible.
    """
    search, best = _Search(at, start, goal), None
    for grain in GRAINS:
        search.narrow(grain)
        best = search.best(grain)
        if best is not None and mismatch(best.reached, goal) <= tolerance:
            return best
    return best if search.direction else None


def mismatch(reached: float, goal: float) -> float:
    """How far off, in shares of the goal; infinite where that is 0 and not reached."""
    if reached == goal:
        return 0.0
    return abs(reached - goal) / goal if goal else float("inf")


class _Search:
    """What is known of the quantity, and between which numbers it passes the goal.

    A grain's multiples are those of all finer ones too, so that what is known stays of use.
    """

    def __init__(self, at: At, start: int, goal: float) -> None:
        self.at, self.start, self.goal = at, start, goal
        self.known: dict[int, float | None] = {}
        self.direction = 0
        self.low = 0
        self.high = self.far = MOST + 1  # nothing possible was seen from `far` on

    def best(self, grain: int) -> Point | None:
        """The nearest known point; of two as near the smaller number."""
        points = (point for point in self._points() if point.number % grain == 0)
        return min(points, key=lambda point: (mismatch(point.reached, self.goal), point.number), default=None)

    def narrow(self, grain: int) -> None:
        """Look among the grain's multiples until none is left between `low` and `high`.

        What is impossible lies at the far end: a bound, most often. A finer grain looks a little beyond it again.
        """
        if not self.direction and not self._orient(grain):
            return
        for turn in count():
            guess = self._guess(grain, turn)
            number = self._possible(guess, grain)
            if number is not None:
                self._place(number)
            elif (self._end - self.low) // grain <= _TRIES:
                self.far = min(self._end + _TRIES * grain, MOST + 1)
                return
            else:
                self.far = guess

    @property
    def _end(self) -> int:
        return min(self.high, self.far)

    def _points(self) -> list[Point]:
        return [Point(number, each) for number, each in sorted(self.known.items()) if each is not None]

    def _orient(self, grain: int) -> bool:
        """Find two numbers at which it differs, and so which way it goes."""
        first = max(self.start, grain)
        for guess in (first, 2 * first, _LEAP * first, first // 2, 1):
            self._possible(guess, grain)
            points = self._points()
            if points and points[0].reached != points[-1].reached:
                self.direction = 1 if points[-1].reached > points[0].reached else -1
                for point in points:
                    self._place(point.number)
                return True
        return False

    def _place(self, number: int) -> None:
        if self.direction * ((self.known[number] or 0.0) - self.goal) < 0:
            self.low = max(self.low, number)
        else:
            self.high = min(self.high, number)

    def _guess(self, grain: int, turn: int) -> int:
        """Where a straight line through what is known passes the goal, the multiple before and after it in turn; every
        third time the middle, which no curve deceives.
        """
        far = self._end if self._end <= MOST else min(_LEAP * max(self.low, grain), self._end)
        if turn % 3 == 2:
            return (self.low + far) // 2
        by_nearness = sorted(self._points(), key=lambda point: mismatch(point.reached, self.goal))
        one = by_nearness[0]
        other = next(point for point in by_nearness if point.reached != one.reached)
        slope = (other.number - one.number) / (other.reached - one.reached)
        straight = one.number + (self.goal - one.reached) * slope
        multiple = (int(min(max(straight, 0), MOST)) // grain + turn % 3) * grain
        return min(max(multiple, self.low + 1), far - 1)

    def _possible(self, guess: int, grain: int) -> int | None:
        """The possible multiple nearest to the guess and strictly between `low` and `high`, looked at."""
        for number in self._around(guess, grain):
            if number not in self.known:
                self.known[number] = self.at(number)
            if self.known[number] is not None:
                return number
        return None

    def _around(self, guess: int, grain: int) -> Iterator[int]:
        middle = (guess + grain // 2) // grain
        for step in range(_TRIES + 1):
            for multiple in (middle + step, middle - step)[: 2 if step else 1]:
                if self.low < multiple * grain < self._end:
                    yield multiple * grain
