"""The choices and presets that exist, by looking at files alone: nothing is run, and nothing slow is imported."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

SLOTS = ("attention", "position", "feed_forward", "norm", "block")
SOURCES = ("data",)
PRESET, PRESETS = "preset", "presets"
_HOME = Path(__file__).parent


def names(slot: str) -> list[str]:
    """The built-in choices of a slot, or the presets: THE FILE IS THE NAME."""
    return list(_names(slot))


@cache
def _names(slot: str) -> tuple[str, ...]:
    files = (_HOME / slot).glob("*.yaml" if slot == PRESETS else "*.py")
    return tuple(sorted(file.stem for file in files if not file.stem.startswith("_")))


def text(slot: str, name: str) -> str:
    """What a choice's or preset's file says of itself at its top."""
    if slot == PRESETS:
        source = (_HOME / PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
        return source.partition("\n")[0].removeprefix("#").strip()
    source = (_HOME / slot / f"{name}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def listing(slot: str | None = None) -> dict[str, dict[str, str]]:
    """Name -> first line, by slot. Raises `Faults` for a slot that does not exist."""
    slot = PRESETS if slot == PRESET else slot
    slots = (*SLOTS, *SOURCES, PRESETS)
    if slot is not None and slot not in slots:
        from ablate.choice import Faults, unknown

        raise Faults([unknown(slot, slots, "slot", ())])
    wanted = [each for each in slots if slot in (None, each)]
    return {each: {name: text(each, name).partition("\n")[0] for name in names(each)} for each in wanted}
