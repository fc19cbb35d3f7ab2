"""A checkpoint as a file, without its tensors: whether it is whole and of the step in its name, and its plain data.

It is safetensors, with strict JSON in the header and a last tensor that is the SHA-256 of all bytes before it. Nothing
here needs torch, so that a store is checked without it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ablate.files import check_file

PLAIN, STEP, CHECKSUM = "ablate", "step", "sha256"
"""Where the header has the plain data and the step, and the name of the last tensor."""

DIGEST_BYTES = 32

_NAME = re.compile(r"step-([0-9]{12})\.safetensors")
_BLOCK_BYTES = 2**20
_MOST_HEADER_BYTES = 100_000_000  # as safetensors itself has it


class UnfitError(Exception):
    """Why a checkpoint is not used."""


def path_of(folder: Path, step: int) -> Path:
    """The file of a step."""
    return folder / f"step-{step:012d}.safetensors"


def files(folder: Path) -> list[Path]:
    """Those of a folder, the oldest first."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def plain_data(path: Path) -> dict[str, Any]:
    """What stands in the header of a file that is whole and of the step that its name says. Raises `UnfitError`, and
    whatever a header that is none may raise.
    """
    _check_sum(path)
    header = _metadata(path)
    if path_of(path.parent, int(header[STEP])) != path:
        raise UnfitError(f"of step {header[STEP]}, and has another step's name")
    found: dict[str, Any] = from_json(header[PLAIN])
    return found


def faults(folder: Path) -> Iterator[tuple[str, str]]:
    """The files of a folder that cannot be gone on from, each with what is wrong; one that goes meanwhile has none."""
    for path in files(folder):
        try:
            plain_data(path)
        except FileNotFoundError:
            continue
        except UnfitError as error:
            yield path.name, str(error)
        except Exception as error:  # whatever stands in the file
            yield path.name, f"cannot be read: {type(error).__name__}: {error}"


def _check_sum(path: Path) -> None:
    left = check_file(path) - DIGEST_BYTES
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(_BLOCK_BYTES, left))):
            digest.update(block)
            left -= len(block)
        if left or file.read() != digest.digest():
            raise UnfitError("torn, or changed since it was written")


def _metadata(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > _MOST_HEADER_BYTES:
            raise UnfitError(f"a header of {size:,} bytes")
        found: dict[str, str] = json.loads(file.read(size))["__metadata__"]
    return found


# --- Plain data -------------------------------------------------------------------------------------------------------

_FLOAT = "not finite"


def as_json(value: Any) -> str:
    """Plain data as strict JSON, in which a number that is not finite is an object."""
    return json.dumps(_strict(value), allow_nan=False, separators=(",", ":"))


def from_json(text: str) -> Any:
    """What `as_json` was given, with lists for tuples."""
    return json.loads(text, object_hook=lambda each: float(each[_FLOAT]) if each.keys() == {_FLOAT} else each)


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(each) for each in value]
    return {_FLOAT: repr(value)} if isinstance(value, float) and not math.isfinite(value) else value
