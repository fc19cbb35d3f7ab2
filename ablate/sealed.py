"""JSON documents that end with a checksum of themselves: one that something else has changed does not count.

A document without one was written before there were any, and counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ablate.files import read_whole, write_json

_KEY, _PREFIX = "checksum", "sha256:"


def write_sealed(path: Path, document: Mapping[str, Any]) -> None:
    """An object as strict JSON, and its checksum as the last entry."""
    write_json(path, {**document, _KEY: _checksum(document)})


def read_sealed(path: Path) -> dict[str, Any]:
    """The object in `path` without its checksum. Raises `OSError`, and `ValueError` for all that it cannot be."""
    try:
        return _unsealed(json.loads(read_whole(path).decode("utf-8"), parse_constant=refuse_constant))
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _unsealed(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ValueError(f"it is not an object but {type(document).__name__}")
    # A changed bit may be in the name of the entry as well as in it.
    seals = [key for key, value in document.items() if key == _KEY or _is_checksum(value)]
    plain = {key: value for key, value in document.items() if key not in seals}
    if seals and (seals != [_KEY] or document[_KEY] != _checksum(plain)):
        raise ValueError("its checksum is not that of what it says: it was changed after it was written")
    return plain


def _is_checksum(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(_PREFIX)


def _checksum(document: Mapping[str, Any]) -> str:
    """Of what is said, in its order; blanks and line ends have no part in it."""
    as_read = json.loads(json.dumps(document, allow_nan=False))
    return _PREFIX + hashlib.sha256(json.dumps(as_read).encode("ascii")).hexdigest()


def refuse_constant(word: str) -> NoReturn:
    """For `json.loads`: NaN and infinities are not JSON."""
    raise ValueError(f"{word} is not JSON")
