"""Few files in the place of many. At any moment each row is readable once: what a file of its own says wins over the
compacted one, which is whole before a small file goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ablate.results import Store, of_rows
from ablate.schema import SCHEMAS
from ablate.shelf import COMPACTED, Found


def compact(store: Store) -> dict[str, Any]:
    """Merge what counts; what does not stays where it is. Also while a run writes, which waits meanwhile.

    Raises `OSError`.
    """
    with store.alone(surely=True):
        looks = {kind: store.look(kind) for kind in SCHEMAS}
        rows = looks["trials"].write_ids()
        merged = {kind: _merge(store, kind, found, rows) for kind, found in looks.items()}
        removed = store.remove_leftovers()
    told = [path.relative_to(store.folder).as_posix() for path in removed]
    damaged = [f"{kind}/{name}".rstrip("/") for kind, found in looks.items() for name in sorted(found.faults)]
    return {"folder": str(store.folder), "merged": merged, "removed": told, "damaged": damaged}


def _merge(store: Store, kind: str, found: Found, rows: Mapping[str, bytes]) -> int:
    """The number of small files that were merged."""
    of_trials = kind in ("curves", "profiles")
    own = (of_rows(found, rows)[0] if of_trials else found).tables
    if COMPACTED in found.faults:  # what cannot be read here may be readable elsewhere: it is not overwritten
        return 0
    if own:
        packed = {name: found.packed.part(name) for name in found.packed.parts} if found.packed else {}
        store.shelves[kind].pack({**packed, **own})
        _remove([store.shelves[kind].path(name) for name in own])
    return len(own)


def _remove(paths: list[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # it says what the compacted one says
            path.unlink(missing_ok=True)
