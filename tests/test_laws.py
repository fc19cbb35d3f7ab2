"""Power laws over sizes: planted ones are found with the coverage that is promised, and orders that hold or do not."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from ablate.laws import LEAST_FOR_FLOOR, Points, floored, law, order

XS = [1e5, 2e5, 4e5, 8e5, 1.6e6, 3.2e6]


def planted(seeds: int, noise: float, floor: float = 0.0, xs: list[float] = XS, start: int = 0) -> Points:
    random = np.random.default_rng(start)
    return {
        seed: [(x, (floor + 8.0 * x**-0.1) * float(np.exp(noise * random.normal()))) for x in xs]
        for seed in range(seeds)
    }


def test_an_exact_law_is_found() -> None:
    found = law(planted(3, 0.0))
    assert found is not None
    assert found.exponents == pytest.approx(dict.fromkeys(range(3), -0.1))
    assert found.loss(1e6) == pytest.approx(8.0 * 1e6**-0.1)
    assert found.rungs == len(XS)


def test_the_interval_is_that_of_the_seeds_own_lines() -> None:
    points = planted(5, 0.01)
    found = law(points)
    assert found is not None
    lines = [scipy.stats.linregress(*np.log(np.array(each)).T).slope for each in points.values()]
    interval = scipy.stats.t.interval(0.95, 4, np.mean(lines), scipy.stats.sem(lines))
    assert (found.exponent.low, found.exponent.high) == pytest.approx(interval, abs=1e-10)


def test_the_interval_holds_the_planted_exponent_as_often_as_it_promises() -> None:
    held = 0
    for start in range(200):
        found = law(planted(4, 0.01, start=start))
        assert found is not None
        assert found.exponent.low is not None
        assert found.exponent.high is not None
        held += found.exponent.low <= -0.1 <= found.exponent.high
    assert scipy.stats.binomtest(held, 200, 0.95).pvalue > 0.01


def test_a_bend_is_clear_only_where_there_is_one() -> None:
    straight, bent = law(planted(4, 1e-3)), law(planted(4, 1e-3, floor=2.0))
    assert straight is not None
    assert bent is not None
    assert not straight.bend.is_clear
    assert bent.bend.is_clear
    assert (bent.bend.mean or 0) > 0, "it flattens"


def test_a_floor_is_found_where_the_points_suffice() -> None:
    found = law(planted(3, 1e-5, floor=1.5, xs=[10.0**n for n in range(3, 10)]))
    assert found is not None
    assert found.floor is not None
    assert found.above is not None
    assert found.floor.mean == pytest.approx(1.5, abs=0.02)
    assert found.above.mean == pytest.approx(-0.1, abs=0.01)


def test_no_floor_is_told_where_the_points_do_not_suffice() -> None:
    few = planted(2, 0.0, floor=1.5, xs=XS[: LEAST_FOR_FLOOR - 1])
    assert law(few).floors is None  # type: ignore[union-attr]
    assert floored([(x, 8.0 * x**-0.1) for x in XS]) is None, "its best floor is zero"
    assert floored([(x, 2.0) for x in XS]) is None, "nothing falls"


@pytest.mark.parametrize(
    "points",
    [{}, {0: []}, {0: [(1.0, 2.0)]}, {0: [(1.0, 2.0), (1.0, 3.0)]}, {0: [(1.0, 2.0), (2.0, 0.0)]}],
)
def test_what_has_no_law(points: Points) -> None:
    assert law(points) is None


def losses(at: dict[float, dict[str, float]], noise: float = 0.001) -> dict[float, dict[str, dict[int, float]]]:
    random = np.random.default_rng(0)
    return {
        rung: {name: {seed: mean + noise * float(random.normal()) for seed in range(4)} for name, mean in means.items()}
        for rung, means in at.items()
    }


def test_an_order_that_holds() -> None:
    found = order(losses({0.5: {"a": 3.0, "b": 3.1, "c": 3.2}, 1: {"a": 2.0, "b": 2.1, "c": 2.2}}))
    assert found.holds
    assert found.by_rung == {0.5: ["a", "b", "c"], 1: ["a", "b", "c"]}
    assert (found.tested, found.told) == (6, 6)


def test_an_order_that_clearly_does_not_hold() -> None:
    found = order(losses({0.5: {"a": 3.0, "b": 3.1}, 1: {"a": 2.2, "b": 2.0}}))
    assert found.changed == found.clear == [("a", "b")]


def test_an_order_that_changes_inside_the_noise() -> None:
    found = order(losses({0.5: {"a": 3.0, "b": 3.1}, 1: {"a": 2.0005, "b": 2.0}}, noise=0.01))
    assert found.clear == []


def test_a_variant_that_lacks_a_rung_has_no_order() -> None:
    found = order({1: {"a": {0: 1.0}, "b": {0: 2.0}}, 2: {"a": {0: 1.0}}})
    assert (found.by_rung, found.tested) == ({1: ["a"], 2: ["a"]}, 0)
