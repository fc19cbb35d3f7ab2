"""The JSON documents beside the tables: what a reader relies on is as declared here, or the document does not count."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ablate.sealed import read_sealed
from ablate.tables import TRIAL_ID

# A type: a value of it. A pattern: text that it matches whole. [shape]: a list of such. {pattern: shape}: an object
# whose values fit where their names match. {name: shape}: an object that may have these, and others as well.
_TEXT, _NUMBER, _NAME, _SEED = (
    (str, type(None)),
    (int, float, type(None)),
    re.compile(r"(?s).*"),
    re.compile("-?[0-9]+"),
)
_TOLD = (int, float, str, type(None))

_VARIANT = {
    "name": str,
    "is_baseline": bool,
    "changes": dict,
    "groups": [str],
    "trials": {_SEED: TRIAL_ID},
    "kv_cache_bytes_by_tokens": [[_NUMBER]],
    "kv_cache_bytes_by_devices": {re.compile("[0-9]+"): _NUMBER},
    "notes": [str],
}
_POINT = {"point": dict, "is_added": bool, "trials": {_SEED: TRIAL_ID}}
_TUNED = {"points": [_POINT], "chosen": (int, type(None)), "edges": [str]}
EXPERIMENT = {
    "name": _TEXT,
    "question": _TEXT,
    "command": _TEXT,
    "seeds": list,
    "counts": {_NAME: _NUMBER},
    "machine": {"workers": _NUMBER, "memory_bytes": _NUMBER},
    "data": {"train_tokens": _NUMBER, "validation_tokens": _NUMBER},
    "train": dict,
    "tuning": {
        "settings": dict,
        "sampler": str,
        "seeds": list,
        "is_over": bool,
        "data": dict,
        "variants": {_NAME: _TUNED},
    },
    "timing": {"timing_id": TRIAL_ID, "members": {TRIAL_ID: str}},
    "variants": [_VARIANT],
    "invalid": [{"variant": str, "reason": str}],
    "claims": [{"claim": str, "says": _TEXT, "source": _TEXT, "means": {_NAME: str}}],
}
NOTES = {"device": str, "torch": str, "memory_bytes": (int, type(None)), "tries": {TRIAL_ID: [[_TOLD]]}}
"""Of the search for the largest step."""

MLFLOW = {"experiment_id": str, "owner": str, "runs": {TRIAL_ID: str}, "attempts": {TRIAL_ID: _NUMBER}}


def read_json(path: Path, shape: Mapping[str, Any], required: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The object in `path`: what a reader relies on is as declared. `required` names what objects must have."""
    document = read_sealed(path)
    _check_shape(document, shape, "")
    for where, names in required.items():
        holders = document.get(where, []) if where else [document]
        if any(name not in holder for holder in holders for name in names):
            raise ValueError(f"{where or 'it'} must have {', '.join(names)}")
    return document


def _check_shape(value: Any, shape: Any, where: str) -> None:
    if isinstance(shape, dict):
        _check_shape(value, dict, where)
        for key, each in value.items():
            _check_shape(each, _shape_of(key, shape, where), f"{where}.{key}".lstrip("."))
    elif isinstance(shape, list):
        _check_shape(value, list, where)
        for place, each in enumerate(value):
            _check_shape(each, shape[0], f"{where}[{place}]")
    elif isinstance(shape, re.Pattern):
        if not isinstance(value, str) or not shape.fullmatch(value):
            raise ValueError(f"{where or 'it'} is not as it must be: {str(value)[:40]!r}")
    elif not isinstance(value, shape):
        raise TypeError(f"{where or 'it'} cannot be {type(value).__name__}")


def _shape_of(key: str, shape: Mapping[Any, Any], where: str) -> Any:
    for name, each in shape.items():
        if isinstance(name, re.Pattern):
            _check_shape(key, name, f"a name in {where}")
            return each
    return shape.get(key, object)
