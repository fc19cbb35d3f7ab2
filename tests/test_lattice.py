"""The whole number nearest to a goal, against a look at every number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ablate.lattice import GRAINS, MOST, Point, mismatch, nearest

LIMIT = 700


class Counted:
    """A quantity, with how often it was asked for."""

    def __init__(self, at: Callable[[int], float | None]) -> None:
        self.at, self.asked = at, 0

    def __call__(self, number: int) -> float | None:
        self.asked += 1
        return self.at(number)


def by_hand(at: Callable[[int], float | None], goal: float, tolerance: float) -> float | None:
    """The smallest mismatch on the coarsest grain that is good enough, or of all numbers."""
    known = {number: value for number in range(1, LIMIT + 1) if (value := at(number)) is not None}
    for grain in GRAINS:
        off = [mismatch(value, goal) for number, value in known.items() if number % grain == 0]
        if off and min(off) <= tolerance:
            return min(off)
    return min((mismatch(value, goal) for value in known.values()), default=None)


SHAPES: dict[str, Callable[[float, float], Callable[[int], float]]] = {
    "straight": lambda a, b: lambda n: a * n + b,
    "square": lambda a, b: lambda n: a * n * n + b,
    "root": lambda a, b: lambda n: a * n**0.5 + b,
    "falling": lambda a, b: lambda n: 1e7 - a * n - b,
    "inverse": lambda a, b: lambda n: b + 1e6 * a / n,
    "stairs": lambda a, b: lambda n: a * (n // 24) + b,
}


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(SHAPES)),
    st.floats(0.5, 100),
    st.floats(1, 1e5),
    st.integers(1, LIMIT),
    st.integers(1, LIMIT),
    st.sampled_from([1, 2, 3, 7, 16, 24, 96]),
    st.sampled_from([0.0, 1e-3, 1e-2, 0.05]),
)
def test_what_is_found_is_the_best_there_is(
    shape: str, a: float, b: float, start: int, target: int, period: int, tolerance: float
) -> None:
    quantity = SHAPES[shape](a, b)

    def at(number: int) -> float | None:
        return quantity(number) if number % period == 0 and number <= LIMIT else None

    goal, start = quantity(target), max(period, start - start % period)
    counted = Counted(at)
    found = nearest(counted, Point(start, quantity(start)), goal, tolerance)
    assert found is not None
    assert at(found.number) == found.reached
    assert mismatch(found.reached, goal) == pytest.approx(by_hand(at, goal, tolerance), abs=1e-12)


@settings(max_examples=40)
@given(st.integers(1, 10**6), st.integers(1, 200), st.integers(1, 10**4), st.integers(0, 10**9))
def test_a_straight_line_takes_few_looks(start: int, slope: int, target: int, rest: int) -> None:
    """Parameters and FLOPs are straight lines over most settings."""
    counted = Counted(lambda number: float(slope * number + rest))
    found = nearest(counted, Point(start, slope * start + rest), slope * target + rest, 0.0)
    assert found == Point(target, slope * target + rest)
    assert counted.asked <= 45


def test_a_goal_that_is_met_twice_over_takes_the_rounder_number() -> None:
    assert nearest(float, Point(100, 100.0), 1000.0, 0.05) == Point(1024, 1024.0)
    assert nearest(float, Point(100, 100.0), 1000.0, 0.01) == Point(992, 992.0)
    assert nearest(float, Point(100, 100.0), 1001.0, 0.0) == Point(1001, 1001.0)


def test_few_possible_numbers_are_all_found() -> None:
    heads = [1, 2, 3, 4, 6, 12]
    for each in heads:
        for start in heads:
            found = nearest(lambda n: 10.0 * n if n in heads else None, Point(start, 10.0 * start), 10.0 * each, 0.0)
            assert found == Point(each, 10.0 * each)


def test_a_bound_far_below_a_guess_is_found() -> None:
    found = nearest(lambda n: float(n) if n <= 257 else None, Point(1, 1.0), 1e7, 0.01)
    assert found == Point(257, 257.0)


def test_what_nothing_changes_has_no_answer() -> None:
    assert nearest(lambda number: 7.0, Point(64, 7.0), 8.0, 0.01) is None
    assert nearest(lambda number: None, Point(64, 7.0), 8.0, 0.01) is None
    assert nearest(lambda number: 7.0 if number == 64 else None, Point(64, 7.0), 8.0, 0.01) is None


def test_a_goal_of_nothing_is_met_only_exactly() -> None:
    assert mismatch(0.0, 0.0) == 0.0
    assert mismatch(1.0, 0.0) == float("inf")
    assert nearest(lambda number: float(number - 8), Point(1, -7.0), 0.0, 0.5) == Point(8, 0.0)


def test_no_number_is_beyond_what_a_dimension_can_be() -> None:
    seen: list[int] = []
    found = nearest(lambda number: float(seen.append(number) or number), Point(64, 64.0), 1e12, 0.01)
    assert found == Point(MOST, float(MOST))
    assert max(seen) == MOST
