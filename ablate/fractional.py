"""Fractions of all combinations of two-valued axes: the fewest runs of a resolution, and what they cannot tell apart.

A fraction's first axes go through all their combinations; each of the others is the sum modulo 2 of some of them, so
that the run in which every axis has its first value is always one of it. Effects that are equal in every run are
aliases: only their sum is estimated. In resolution 3 main effects are aliased with interactions of two axes, in 4 those
with one another, and from 5 on neither with either (Box and Hunter, 1961, Technometrics 3; no arXiv number).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

LETTERS = "ABCDEFGHJKLM"
"""Of the axes, in their order; I stands for the identity."""

LEAST_AXES, MOST_AXES = 3, len(LETTERS)
LEAST_RESOLUTION = 3

_DESIGNS: dict[int, tuple[str, ...]] = {
    3: ("AB",),
    4: ("ABC",),
    5: ("ABC AB", "ABCD"),
    6: ("ABC AB AC", "ABC ABD", "ABCDE"),
    7: ("ABC AB AC BC", "ABC ABD ACD", "ABCDEF"),
    8: ("ABC ABD ACD BCD", "ABCDE ABCF", "ABCDEFG"),
    9: ("ABCD ABC ABD ACD BCD", "ABCD ABCE ABDE ACDE", "ABCDE ABCFG", "ABCDEFGH"),
    10: (
        "ABCD ABC ABD ACD BCD AB",
        "ABCD ABCE ABDE ACDE BCDE",
        "ABCDEF ABCDG ABEFG",
        "ABCDEF ABCDGH",
        "ABCDEFGHJ",
    ),
    11: (
        "ABCD ABC ABD ACD BCD AB AC",
        "ABCDE ABC ABD ACD ABE ACE",
        "ABCDEFG ABCD ABEF ACEG",
        "ABCDEFG ABCDH ABEFH",
        "ABCDEFG ABCDHJ",
        "ABCDEFGHJK",
    ),
    12: (
        "ABCD ABC ABD ACD BCD AB AC AD",
        "ABCDE ABC ABD ACD BCD ABE ACE",
        "ABCDEFG ABCDH ABEFH ACEGH",
        "ABCDEFG ABCDHJK",
        "ABCDEFGHJKL",
    ),
}
"""By the number of axes, the generators of each fraction that has fewer runs than any other of its resolution.

They have minimum aberration: of all with so many runs the fewest words of the shortest length, then of the next (Fries
and Hunter, 1980, Technometrics 22). Found by looking at all; the tests look again.
"""

Word = frozenset[int]


@dataclass(frozen=True)
class Fraction:
    """A fraction for axes 0, 1, …: `generators` say for each of the last ones which of the first ones it is made of."""

    n_axes: int
    generators: tuple[Word, ...]

    @property
    def n_basic(self) -> int:
        """The axes that go through all their combinations."""
        return self.n_axes - len(self.generators)

    @property
    def n_runs(self) -> int:
        """How many combinations it has."""
        return 1 << self.n_basic

    def runs(self) -> Iterator[tuple[int, ...]]:
        """For each run 0 or 1 for each axis: its first or second value."""
        for basic in itertools.product((0, 1), repeat=self.n_basic):
            yield (*basic, *(sum(basic[axis] for axis in word) % 2 for word in self.generators))

    @cached_property
    def defining(self) -> frozenset[Word]:
        """The words that are constant over all runs, but the empty one."""
        found = {Word()}
        for axis, word in enumerate(self.generators, self.n_basic):
            found |= {each ^ word ^ {axis} for each in found}
        return frozenset(found - {Word()})

    @property
    def resolution(self) -> int:
        """The length of the shortest of them."""
        return min(map(len, self.defining))

    def sign(self, effect: Word, other: Word) -> int:
        """1 or -1 where the effects of these axes are the same or opposite in every run, else 0."""
        between = effect ^ other
        if between and between not in self.defining:
            return 0
        return -1 if len(between) % 2 else 1

    def aliases(self) -> list[list[tuple[int, Word]]]:
        """Main effects and interactions of two axes, those that only come together in one list, each with its sign."""
        effects = [Word(axes) for size in (1, 2) for axes in itertools.combinations(range(self.n_axes), size)]
        groups: list[list[tuple[int, Word]]] = []
        for effect in effects:
            group = next((each for each in groups if self.sign(each[0][1], effect)), None)
            if group is None:
                groups.append([(1, effect)])
            else:
                group.append((self.sign(group[0][1], effect), effect))
        return groups

    def words(self) -> list[str]:
        """The generators in letters: `D = ABC`, with a sign where two values are written as -1 and 1."""
        made = enumerate(self.generators, self.n_basic)
        return [f"{LETTERS[axis]} = {'' if len(word) % 2 else '-'}{letters(word)}" for axis, word in made]


def fraction(n_axes: int, resolution: int) -> Fraction | None:
    """The fewest runs that have at least the resolution; None where no fraction has."""
    found = (_fraction(n_axes, each) for each in _DESIGNS.get(n_axes, ()))
    return next((each for each in found if each.resolution >= resolution), None)


def _fraction(n_axes: int, generators: str) -> Fraction:
    return Fraction(n_axes, tuple(Word(map(LETTERS.index, word)) for word in generators.split()))


def letters(axes: Word) -> str:
    """The axes' letters: `ABC`."""
    return "".join(LETTERS[axis] for axis in sorted(axes))


def in_words(facts: Mapping[str, Any]) -> list[str]:
    """What a fraction, as `experiment.json` holds it, runs and what it does not tell apart, a line each."""
    together = [group for group in facts["aliases"] if len(group) > 1]
    mixed = "; ".join(_sum(group, facts["letters"]) for group in together)
    named = ", ".join(f"{letter} {axis['path']}" for letter, axis in zip(facts["letters"], facts["axes"], strict=True))
    return [
        f"fractional: {facts['runs']} of {facts['of']} runs, resolution {facts['resolution']}",
        f"{named}; {', '.join(facts['generators'])}",
        f"not told apart: {mixed}" if mixed else "main effects and interactions of two axes are all told apart",
    ]


def _sum(group: list[Mapping[str, Any]], names: list[str]) -> str:
    """`AB + CD`: what is estimated in the place of each."""
    terms = (("+" if each["sign"] > 0 else "-", "".join(names[axis] for axis in each["axes"])) for each in group)
    return " ".join(f"{sign} {term}" for sign, term in terms).removeprefix("+ ")
