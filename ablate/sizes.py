"""A model at a factor of its size: as wide, as deep and with as many heads in proportion, so that it keeps its form.

`scale: 2` doubles d_model, n_layers and n_heads, and what a choice says grows with them (`grows`): heads stay as wide,
and the ratio of width to depth is kept (a ladder of sizes as in Kaplan et al., 2020, arXiv:2001.08361). Every size has
to come out whole: none is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from ablate.choice import Faults, Settings, SettingsError, validated
from ablate.grid import FACTOR, SCALE
from ablate.settings import EncoderSettings, ModelSettings, VariantSettings, typed
from ablate.settings.layer import SLOT_OF

S = TypeVar("S", bound=Settings)

_OWN: Mapping[type[Settings], tuple[str, ...]] = {
    ModelSettings: ("d_model", "n_layers", "n_heads", "d_embed"),
    EncoderSettings: ("n_layers", "n_heads"),
}


def sized(tree: Mapping[str, Any]) -> VariantSettings:
    """The tree as typed settings, at its factor. Raises `Faults`."""
    return grown(typed(tree), tree)


def grown(settings: VariantSettings, tree: Mapping[str, Any]) -> VariantSettings:
    """Typed settings at the factor of the tree that they are of. Raises `Faults` where a size would not be whole."""
    factor = tree.get(FACTOR, 1)
    if factor == 1:
        return settings
    sizes = dict(_sizes(settings.model))
    for name, size in sizes.items():
        if not _is_whole(size * factor):
            message = f"scale {factor:g} makes {name} {size} to {size * factor:g}, which is not whole"
            raise Faults([SettingsError((SCALE,), message, _nearest(factor, math.gcd(*sizes.values())))])
    try:
        return settings.model_copy(update={"model": _grown(settings.model, factor)})
    except Faults as faults:
        message = f"scale {factor:g}: {faults.faults[0].message}"
        raise Faults([SettingsError((SCALE,), message, "write a smaller factor")]) from None


def _is_whole(value: float) -> bool:
    return value >= 1 and abs(value - round(value)) < 1e-6


def _nearest(factor: float, divisor: int) -> str:
    if divisor == 1:
        return "write a whole number"
    near = max(1, round(factor * divisor))
    return f"write {near / divisor:g}: the sizes have {divisor} as their greatest common divisor"


def _sizes(holder: Settings, path: str = "") -> Iterator[tuple[str, int]]:
    """Every size that grows, by its dotted path."""
    for name in _names(holder):
        if (size := getattr(holder, name)) is not None:
            yield f"{path}{name}", size
    for name, inner in _inside(holder):
        yield from _sizes(inner, f"{path}{name}.")


def _grown(holder: S, factor: float) -> S:
    own = {name: getattr(holder, name) for name in _names(holder)}
    updates: dict[str, Any] = {name: round(size * factor) for name, size in own.items() if size is not None}
    for name, inner in _inside(holder):
        key, _, place = name.partition(".")
        if place:
            updates[key] = [*updates.get(key, []), _grown(inner, factor)]
        else:
            updates[key] = _grown(inner, factor)
    return validated(type(holder), {**dict(holder), **updates}) if updates else holder


def _names(holder: Settings) -> tuple[str, ...]:
    return _OWN.get(type(holder), getattr(holder, "grows", ()))


def _inside(holder: Settings) -> Iterator[tuple[str, Settings]]:
    """What sizes stand in below it: choices, exceptions for some layers, an encoder."""
    for name in (*SLOT_OF, "encoder"):
        if (inner := getattr(holder, name, None)) is not None:
            yield name, inner
    for place, rule in enumerate(getattr(holder, "layers", None) or []):
        yield f"layers.{place}", rule
