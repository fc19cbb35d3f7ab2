"""Whole named architectures as data: one YAML file each, whose first line says what it is and where it comes from.

Some fix the choices only (`llama`), some the sizes too (`llama-7b`). `_default.yaml` is what an experiment without a
preset starts from, and what every preset is laid over.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from ablate.document import read

_HOME = Path(__file__).parent


@cache
def settings(name: str) -> dict[str, Any]:
    """What a preset says about the model, as plain data; it may start from another one (`preset: llama`)."""
    return read(_HOME / f"{name}.yaml").data
