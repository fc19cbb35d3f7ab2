"""What was measured of a machine once and is kept for later runs: a file for each device, threads and version of torch.

A file that was torn, written by something else, or holds what no measurement gives counts as none: it is measured anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ablate.sealed import read_sealed, write_sealed

Kind = Literal["calibration", "aa"]

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Kept(BaseModel):
    """The shape that a file must have; whatever else is in it stays."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Product(_Kept):
    flops_per_second: Positive
    median_flops_per_second: Positive
    size: Positive


class _Calibration(_Kept):
    matmul: dict[str, _Product | dict[str, None]]
    timer_seconds: Positive | None
    copy_bytes_per_second: Positive | None = None


class _Figure(_Kept):
    ratio: Positive | None
    ratio_low: Positive | None
    ratio_high: Positive | None
    sd: Annotated[Finite, Field(ge=0)] | None
    n: int
    inside: bool


class _Check(_Kept):
    figures: dict[str, _Figure]
    measured_at: str
    repeats: int


_SHAPES: dict[Kind, type[_Kept]] = {"calibration": _Calibration, "aa": _Check}


CALM = 0.5
"""Fewer cores that are busy with other programs do not count."""

SPARE = 0.5
"""Nor do they as long as so large a share of the cores that were not asked for stays free."""


def disturbance(found: dict[str, Any]) -> float:
    """The cores that other programs kept busy while it was measured; 0 where they do not count, or nobody tells.

    A GPU's queue is filled well ahead, whatever keeps the processor busy.
    """
    if found.get("device") == "cuda":
        return 0.0
    others = found.get("other_load_cores") or 0.0
    spare = (found.get("cpus") or 0) - (found.get("threads") or 0)
    return others if others >= max(CALM, SPARE * spare) else 0.0


def folder() -> Path:
    """The user's cache folder, or where ABLATE_CACHE says."""
    if own := os.environ.get("ABLATE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ablate"


def read(kind: Kind, what: dict[str, Any]) -> dict[str, Any] | None:
    """What is kept of this kind for a machine with this identity; None where nothing is that makes sense."""
    try:
        known = read_sealed(_file(kind, what))
        _SHAPES[kind].model_validate(known)
        return known if all(known[key] == value for key, value in what.items()) else None
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        return None


def write(kind: Kind, what: dict[str, Any], found: dict[str, Any]) -> None:
    """Keep it, whole or not at all; in a home that cannot be written it is measured again the next time."""
    with contextlib.suppress(OSError):
        write_sealed(_file(kind, what), found)


def _file(kind: Kind, what: dict[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    return folder() / f"{kind}-{key}.json"
