"""Fractions of two-level designs: against brute force, against published word lengths, against a full factorial."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

import pytest

from ablate.fractional import LETTERS, MOST_AXES, Fraction, Word, fraction, letters

ALL = {
    (n_axes, found.n_runs): found
    for n_axes in range(3, MOST_AXES + 1)
    for resolution in range(3, n_axes + 1)
    if (found := fraction(n_axes, resolution))
}


def lengths(found: Fraction) -> tuple[int, ...]:
    """How many constant words of each length there are, from 1."""
    count = Counter(map(len, found.defining))
    return tuple(count[n] for n in range(1, found.n_axes + 1))


def every_fraction(n_axes: int, n_basic: int, resolution: int) -> Iterator[Fraction]:
    """All with so many runs and at least the resolution, but for the order of axes among the generated ones."""
    sizes = range(resolution - 1, n_basic + 1)
    words = [Word(axes) for size in sizes for axes in itertools.combinations(range(n_basic), size)]

    def go_on(chosen: tuple[Word, ...], start: int) -> Iterator[Fraction]:
        if len(chosen) == n_axes - n_basic:
            yield Fraction(n_axes, chosen)
            return
        for i in range(start, len(words)):
            found = Fraction(n_basic + len(chosen) + 1, (*chosen, words[i]))
            if found.resolution >= resolution:
                yield from go_on((*chosen, words[i]), i + 1)

    return go_on((), 0)


@pytest.mark.parametrize("n_axes", range(3, 9))
def test_no_other_fraction_has_fewer_runs_or_less_aberration(n_axes: int) -> None:
    for resolution in range(3, n_axes + 1):
        found = fraction(n_axes, resolution)
        assert found is not None
        assert found.resolution >= resolution
        fewer = (n for n in range(2, found.n_basic) if 2**n > n_axes)
        assert not any(True for n in fewer for _ in every_fraction(n_axes, n, resolution))
        assert lengths(found) == min(map(lengths, every_fraction(n_axes, found.n_basic, resolution)))


# Words of length 3, 4, 5, … of minimum aberration designs, as Chen, Sun and Wu (1993, Int. Stat. Rev. 61) list them.
@pytest.mark.parametrize(
    ("n_axes", "n_runs", "published"),
    [
        (5, 8, (2, 1)),
        (6, 8, (4, 3)),
        (7, 8, (7, 7, 0, 0, 1)),
        (6, 16, (0, 3)),
        (7, 16, (0, 7)),
        (8, 16, (0, 14, 0, 0, 0, 1)),
        (9, 16, (4, 14, 8, 0, 4, 1)),
        (9, 32, (0, 6, 8, 0, 0, 1)),
        (10, 32, (0, 10, 16, 0, 0, 5)),
        (11, 32, (0, 25, 0, 27, 0, 10, 0, 1)),
        (12, 32, (0, 38, 0, 52, 0, 33, 0, 4)),
        (8, 64, (0, 0, 2, 1)),
    ],
)
def test_word_lengths_are_the_published_ones(n_axes: int, n_runs: int, published: tuple[int, ...]) -> None:
    assert lengths(ALL[n_axes, n_runs])[2:] == (*published, *[0] * (n_axes - 2 - len(published)))


@pytest.mark.parametrize(
    ("n_axes", "resolution", "n_runs"),
    [(3, 3, 4), (4, 3, 8), (4, 4, 8), (7, 3, 8), (8, 4, 16), (6, 5, 32), (11, 5, 128), (12, 5, 256), (12, 4, 32)],
)
def test_the_fewest_runs_of_a_resolution(n_axes: int, resolution: int, n_runs: int) -> None:
    found = fraction(n_axes, resolution)
    assert found is not None
    assert found.n_runs == n_runs


@pytest.mark.parametrize(("n_axes", "resolution"), [(2, 3), (1, 3), (0, 3), (4, 5), (12, 13), (13, 3)])
def test_what_no_fraction_has(n_axes: int, resolution: int) -> None:
    assert fraction(n_axes, resolution) is None


@pytest.mark.parametrize("found", ALL.values(), ids=lambda each: f"{each.n_axes} axes, {each.n_runs} runs")
def test_runs_are_balanced_and_aliases_are_what_the_runs_say(found: Fraction) -> None:
    runs = [[2 * level - 1 for level in run] for run in found.runs()]
    assert runs[0] == [-1] * found.n_axes, "all first values are a run"
    assert len({tuple(run) for run in runs}) == len(runs) == found.n_runs
    columns = {
        Word(axes): tuple(math.prod(run[axis] for axis in axes) for run in runs)
        for size in (1, 2)
        for axes in itertools.combinations(range(found.n_axes), size)
    }
    alike: dict[tuple[int, ...], list[tuple[int, Word]]] = {}
    for effect, column in columns.items():
        first = next((known for known in alike if known in (column, tuple(-each for each in column))), column)
        alike.setdefault(first, []).append((1 if first == column else -1, effect))
        assert sum(column) == 0, "so many runs of either value, of one axis and of the product of two"
    assert found.aliases() == list(alike.values())


def test_generators_in_letters() -> None:
    found = fraction(5, 5)
    assert found is not None
    assert found.words() == ["E = -ABCD"]
    assert all(math.prod(2 * each - 1 for each in run[:4]) == -(2 * run[4] - 1) for run in found.runs())
    other = fraction(4, 4)
    assert other is not None
    assert other.words() == ["D = ABC"]
    assert letters(Word((0, 9))) == "AK"
    assert "I" not in LETTERS
