"""How the axes of an experiment combine, and which variant stands at each of their combinations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ablate.choice import Faults, Path, SettingsError, as_whole, unknown
from ablate.fractional import LEAST_AXES, LEAST_RESOLUTION, LETTERS, MOST_AXES, Fraction, fraction

PRODUCT, ONE_AT_A_TIME, FRACTIONAL = "product", "one_at_a_time", "fractional"
_RESOLUTION = re.compile(r"resolution (\d+)")


@dataclass(frozen=True)
class Axis:
    """What varies, with its values and how they are written; `reference` is the one that the others are held to."""

    path: str
    values: Sequence[Any]
    labels: Sequence[str]
    reference: int


@dataclass(frozen=True)
class Cell:
    """A combination: a level for each axis, None for one that it leaves at the baseline.

    The axes in `idle` make no difference there. `variant` is None where the combination is none: `missing` says why.
    """

    levels: tuple[int | None, ...]
    idle: tuple[int, ...] = ()
    variant: str | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Design:
    """The axes, how they combine, and every combination; `fraction` where these are a part of all."""

    combine: str
    axes: Sequence[Axis]
    cells: Sequence[Cell]
    fraction: Fraction | None = None

    def facts(self, standing: Mapping[str, str]) -> dict[str, Any]:
        """As `plan --json` and `experiment.json` give it: with the variant that stands for the cell's own. A cell
        without one is invalid.
        """
        return {
            "combine": self.combine,
            "axes": [
                {"path": each.path, "levels": each.labels, "values": each.values, "reference": each.reference}
                for each in self.axes
            ],
            **(_fraction_facts(self.fraction) if self.fraction else {}),
            "cells": [_cell_facts(each, standing) for each in self.cells],
        }


def _fraction_facts(found: Fraction) -> dict[str, Any]:
    return {
        "resolution": found.resolution,
        "runs": found.n_runs,
        "of": 2**found.n_axes,
        "letters": list(LETTERS[: found.n_axes]),
        "generators": found.words(),
        "aliases": [[{"axes": sorted(word), "sign": sign} for sign, word in group] for group in found.aliases()],
    }


def _cell_facts(cell: Cell, standing: Mapping[str, str]) -> dict[str, Any]:
    variant = standing.get(cell.variant) if cell.variant else None
    missing = None if variant else cell.missing or "invalid"
    return {"levels": list(cell.levels), "idle": list(cell.idle), "variant": variant, "missing": missing}


# --- What a file asks for ---------------------------------------------------------------------------------------------


def fraction_of(design: str | Mapping[str, Any], axes: Mapping[str, Sequence[Any]]) -> Fraction | None:
    """The fraction that a file's `design` asks for; None where it combines axes in another way. Raises `Faults`."""
    if isinstance(design, str):
        if design not in (PRODUCT, ONE_AT_A_TIME):
            raise _fault(("design",), f"{_KINDS} (it is '{design}')", _nearest(design))
        return None
    if wrong := [key for key in design if key != FRACTIONAL]:
        raise Faults(unknown(str(key), [FRACTIONAL], "setting", ("design", key)) for key in wrong)
    if FRACTIONAL not in design:
        raise _fault(("design",), _KINDS, "write product, or for example {fractional: 4}")
    place = ("design", FRACTIONAL)
    return _checked(_resolution(design[FRACTIONAL], place), axes, place)


_KINDS = f"'design': must be '{PRODUCT}' or '{ONE_AT_A_TIME}', or {{{FRACTIONAL}: a resolution}}"


def _nearest(word: str) -> str:
    if word == FRACTIONAL:
        return "write {fractional: 4}"
    cure = unknown(word, [PRODUCT, ONE_AT_A_TIME], "design", ()).cure
    return cure if cure.startswith("did") else f"write {PRODUCT}"


def _resolution(value: Any, place: Path) -> int:
    """`4`, also written `resolution 4`."""
    match = _RESOLUTION.fullmatch(value) if isinstance(value, str) else None
    number = int(match[1]) if match else None if isinstance(value, str | bool) else as_whole(value)
    if not isinstance(number, int) or number < LEAST_RESOLUTION:
        message = f"'design.fractional': a resolution is a whole number from {LEAST_RESOLUTION} on (it is {value!r})"
        raise _fault(place, message, "write 3, 4 or 5: what each keeps apart stands in docs/comparing.md")
    return number


def _checked(resolution: int, axes: Mapping[str, Sequence[Any]], place: Path) -> Fraction:
    for path, values in axes.items():
        if (again := _given_twice(values)) is not None:
            message = f"a fraction has axes of two values each, and '{path}' has one twice ({values[again]!r})"
            raise _fault(("vary", path), message, "give two that differ")
        if len(values) != 2:
            message = f"a fraction has axes of two values each, and '{path}' has {len(values)}"
            raise _fault(("vary", path), message, f"give it two, or write design: {PRODUCT}")
    if not LEAST_AXES <= len(axes) <= MOST_AXES:
        message = f"there are fractions of {LEAST_AXES} to {MOST_AXES} axes, not of {len(axes)}"
        raise _fault(place, message, f"write design: {PRODUCT}" if len(axes) < LEAST_AXES else "take axes out")
    if found := fraction(len(axes), resolution):
        return found
    message = f"no fraction of {len(axes)} axes has resolution {resolution}"
    raise _fault(place, message, f"the highest is {len(axes)}; design: {PRODUCT} keeps all effects apart")


def _given_twice(values: Sequence[Any]) -> int | None:
    """The place of the first value that stands before as well; yes is no 1."""
    told = [(isinstance(value, bool), value) for value in values]
    return next((place for place, value in enumerate(told) if value in told[:place]), None)


def check_fraction(design: Design) -> None:
    """Every run of a fraction is needed, and every axis in each of them. Raises `Faults`."""
    for cell in design.cells if design.fraction else ():
        where = ", ".join(_setting(design, cell, axis) for axis in range(len(design.axes)) if axis not in cell.idle)
        if cell.idle:
            path = design.axes[cell.idle[0]].path
            message = f"'{path}' makes no difference in a run of the fraction ({where})"
            raise _fault(("vary", path), message, f"write design: {PRODUCT}, or vary what every run has")
        if cell.missing == "excluded":
            message = f"a run of the fraction is excluded ({where}), and without it no effect can be told"
            raise _fault(("exclude",), message, f"take the rule out, or write design: {PRODUCT}")


def _setting(design: Design, cell: Cell, axis: int) -> str:
    level = cell.levels[axis]
    return f"{design.axes[axis].path}={design.axes[axis].labels[level or 0]}"


def _fault(path: Path, message: str, cure: str) -> Faults:
    return Faults([SettingsError(path, message, cure)])
