"""Effects of a design: against published examples, against least squares, and where combinations are missing."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from ablate.effects import Effect, effects
from ablate.fractional import LETTERS, fraction

Levels = tuple[int, ...]


def product(*sizes: int, reference: int = 0, **missing: str) -> dict[str, Any]:
    """A design with all combinations, each variant named by its levels; `missing` says by name which are none."""
    axes = [
        {"path": LETTERS[i], "levels": [str(level) for level in range(size)], "reference": reference}
        for i, size in enumerate(sizes)
    ]
    return {"combine": "product", "axes": axes, "cells": [cell(each, missing) for each in places(*sizes)]}


def places(*sizes: int) -> list[Levels]:
    return list(itertools.product(*map(range, sizes)))


def name(levels: Levels) -> str:
    return "v" + "".join(map(str, levels))


def cell(levels: Levels, missing: dict[str, str]) -> dict[str, Any]:
    why = missing.get(name(levels))
    return {"levels": list(levels), "idle": [], "variant": None if why else name(levels), "missing": why}


def by_name(found: list[Effect]) -> dict[tuple[Levels, Levels], Effect]:
    return {(each.axes, each.levels): each for each in found}


def mean(effect: Effect) -> float:
    return sum(effect.by_seed.values()) / len(effect.by_seed)


# The filtration rate of a chemical, by temperature, pressure, concentration and stirring rate: the 2^4 of Montgomery
# (Design and Analysis of Experiments, 8th ed., example 6.2), in standard order, the first factor fastest.
RATES = (45, 71, 48, 65, 68, 60, 80, 65, 43, 100, 45, 104, 75, 86, 70, 96)
PUBLISHED = {"A": 21.625, "B": 3.125, "C": 9.875, "D": 14.625}
PUBLISHED |= {"AB": 0.125, "AC": -18.125, "AD": 16.625, "BC": 2.375, "BD": -0.375, "CD": -1.125}


def rate(levels: Levels) -> float:
    return RATES[sum(level << place for place, level in enumerate(levels))]


def test_effects_are_those_of_a_published_factorial() -> None:
    design = product(2, 2, 2, 2)
    found = effects(design, {name(each): {0: rate(each)} for each in places(2, 2, 2, 2)})
    told = {"".join(LETTERS[axis] for axis in each.axes): each.by_seed[0] for each in found}
    # A text-book's interaction is half of the difference of differences.
    assert told == {word: value * len(word) for word, value in PUBLISHED.items()}
    assert all((each.averaged, each.combinations) == (16 // 2 ** len(each.axes),) * 2 for each in found)


def test_effects_of_a_published_fraction_are_sums_of_aliases() -> None:
    """The half fraction D = ABC of the same (Montgomery, example 8.1): its estimates, and what they are sums of."""
    part = fraction(4, 4)
    assert part is not None
    runs = list(part.runs())
    design = fractional(4, 4)
    found = effects(design, {name(run): {0: rate(run)} for run in runs})
    told = {"".join(LETTERS[axis] for axis in each.axes): each.by_seed[0] for each in found}
    assert told == {"A": 19.0, "B": 1.5, "C": 14.0, "D": 16.5, "AB": 2 * -1.0, "AC": 2 * -18.5, "AD": 2 * 19.0}
    aliases = {"".join(LETTERS[axis] for axis in each.axes): each.aliases for each in found}
    assert aliases["AB"] == ((1, (2, 3)),)
    assert aliases["A"] == ()


def fractional(n_axes: int, resolution: int, **missing: str) -> dict[str, Any]:
    part = fraction(n_axes, resolution)
    assert part is not None
    aliases = [[{"axes": sorted(word), "sign": sign} for sign, word in group] for group in part.aliases()]
    cells = [cell(run, missing) for run in part.runs()]
    return {**product(*[2] * n_axes), "combine": "fractional", "cells": cells, "aliases": aliases}


@pytest.mark.parametrize(("n_axes", "resolution"), [(3, 3), (5, 3), (5, 5), (6, 4), (7, 3), (8, 4)])
def test_a_fraction_estimates_the_sum_that_it_names(n_axes: int, resolution: int) -> None:
    """With effects that are known, of a fraction and of all combinations: what is told is their sum, sign by sign."""
    random = np.random.default_rng(n_axes)
    words = [axes for size in (1, 2) for axes in itertools.combinations(range(n_axes), size)]
    size = dict(zip(words, random.normal(size=len(words)), strict=True))

    def loss(levels: Levels) -> float:
        signs = {axes: np.prod([2 * levels[axis] - 1 for axis in axes]) for axes in words}
        return float(sum(signs[axes] * size[axes] for axes in words))

    whole = effects(product(*[2] * n_axes), {name(each): {0: loss(each)} for each in places(*[2] * n_axes)})
    assert {each.axes: each.by_seed[0] for each in whole} == pytest.approx({a: size[a] * 2 ** len(a) for a in words})
    part = fraction(n_axes, resolution)
    assert part is not None
    for each in effects(fractional(n_axes, resolution), {name(run): {0: loss(run)} for run in part.runs()}):
        total = size[each.axes] + sum(sign * size[axes] for sign, axes in each.aliases)
        assert each.by_seed[0] == pytest.approx(total * 2 ** len(each.axes))


def test_axes_of_several_values_as_least_squares_has_them() -> None:
    """In a balanced design without noise the means over the rest are what the full model is fitted to."""
    random = np.random.default_rng(0)
    losses = {place: {seed: float(random.normal()) for seed in range(3)} for place in places(3, 2, 2)}
    found = by_name(effects(product(3, 2, 2), {name(each): values for each, values in losses.items()}))
    assert len(found) == (2 + 1 + 1) + (2 + 2 + 1)
    for seed in range(3):
        table = np.array([losses[each][seed] for each in places(3, 2, 2)]).reshape(3, 2, 2)
        assert found[(0,), (2,)].by_seed[seed] == pytest.approx(table[2].mean() - table[0].mean())
        change = (table[2, 1] - table[0, 1]) - (table[2, 0] - table[0, 0])
        assert found[(0, 1), (2, 1)].by_seed[seed] == pytest.approx(change.mean())


def test_the_reference_is_what_the_others_are_held_to() -> None:
    losses = {name(each): {0: float(10 * each[0] + each[1])} for each in places(2, 2)}
    found = by_name(effects(product(2, 2, reference=1), losses))
    assert {key: each.by_seed[0] for key, each in found.items()} == {
        ((0,), (0,)): -10.0,
        ((1,), (0,)): -1.0,
        ((0, 1), (0, 0)): 0.0,
    }


@pytest.mark.parametrize("why", ["invalid", "excluded"])
def test_a_missing_combination_is_left_out_and_counted(why: str) -> None:
    losses = {name(each): {0: float(each[0] + 100 * each[0] * each[1])} for each in places(2, 3)}
    del losses["v12"]
    found = by_name(effects(product(2, 3, v12=why), losses))
    main = found[(0,), (1,)]
    assert main.by_seed == {0: (1 + 101) / 2}, "over the two combinations that have both"
    assert (main.averaged, main.combinations, main.lost) == (2, 3, {why: 1})
    assert found[(1,), (2,)].by_seed == {0: 0.0}, "where the first axis has its first value alone"
    nothing = found[(0, 1), (1, 2)]
    assert (nothing.by_seed, nothing.averaged, nothing.lost) == ({}, 0, {why: 1})


def test_a_value_that_makes_no_difference_somewhere_is_left_out_there() -> None:
    """As `feed_forward.n_experts` where the feed-forward has no experts: two combinations are one variant."""
    design = product(2, 2)
    design["cells"][1]["variant"] = "v00"
    found = by_name(effects(design, {"v00": {0: 1.0}, "v10": {0: 5.0}, "v11": {0: 7.0}}))
    assert found[(0,), (1,)].by_seed == {0: 5.0}, "the mean of 4 and 6"
    second = found[(1,), (1,)]
    assert (second.by_seed, second.averaged, second.lost) == ({0: 2.0}, 1, {"the same variant": 1})
    assert found[(0, 1), (1, 1)].by_seed == {}, "two axes that do not cross do not interact"


def test_a_variant_without_a_result_is_left_out_for_all_seeds_and_a_failed_seed_for_all_variants() -> None:
    losses = {name(each): {seed: float(each[0]) for seed in range(4)} for each in places(2, 3)}
    losses["v12"] = {}
    del losses["v00"][3]
    found = by_name(effects(product(2, 3), losses))
    assert found[(0,), (1,)].lost == {"no result": 1}
    assert list(found[(0,), (1,)].by_seed) == [0, 1, 2]
    assert list(found[(1,), (2,)].by_seed) == [0, 1, 2]
    assert found[(1,), (1,)].lost == {}


def test_seeds_that_no_two_have_in_common_give_nothing() -> None:
    found = effects(product(2, 1), {"v00": {0: 1.0}, "v10": {1: 2.0}})
    assert [(each.by_seed, each.averaged, each.lost) for each in found] == [({}, 1, {})]


@pytest.mark.parametrize("gap", ["missing", "no result"])
def test_a_fraction_tells_nothing_without_one_of_its_runs(gap: str) -> None:
    design = fractional(4, 4, v0011="invalid") if gap == "missing" else fractional(4, 4)
    losses = {each["variant"]: {0: 1.0} for each in design["cells"] if each["variant"]}
    if gap == "no result":
        losses["v0011"] = {}
    for each in effects(design, losses):
        assert each.by_seed == {}
        assert (each.averaged, each.combinations) == (7, 8)
        assert each.lost == {"invalid" if gap == "missing" else "no result": 1}


def test_one_at_a_time_has_no_effects_beyond_its_contrasts() -> None:
    design = {**product(2, 2), "combine": "one_at_a_time"}
    assert effects(design, {}) == []
