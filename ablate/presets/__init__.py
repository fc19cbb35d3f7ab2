"""Whole named architectures as data: one YAML file each, whose first line says what it is and where it comes from.

Some fix the choices only (`llama`), some the sizes too (`llama-7b`); one may build on another (`preset: llama`).
`scales:` holds small versions of the same form, as changes to it. `_default.yaml` is what an experiment without a
preset starts from.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from ablate.document import read

_HOME = Path(__file__).parent


@cache
def _file(name: str) -> dict[str, Any]:
    return read(_HOME / f"{name}.yaml").data


def lineage(name: str) -> list[str]:
    """The presets that one builds on, the first of them first, and at last itself."""
    above = _file(name).get("preset")
    return [*(lineage(above) if above else []), name]


def settings(name: str) -> dict[str, Any]:
    """What a preset itself says about the model, as plain data."""
    return {key: value for key, value in _file(name).items() if key not in ("preset", "scales")}


def scales(name: str) -> list[str]:
    """The names of a preset's small versions, those that it has from others included."""
    return sorted({scale for each in lineage(name) for scale in _file(each).get("scales", {})})


def scaled(name: str, scale: str) -> list[dict[str, Any]]:
    """The changes that a small version is made by, one after the other."""
    return [_file(each)["scales"][scale] for each in lineage(name) if scale in _file(each).get("scales", {})]
