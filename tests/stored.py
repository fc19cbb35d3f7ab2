"""What tests of the record store."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ablate.results import Store
from ablate.schema import SCHEMAS

CURVE: dict[str, list[Any]] = {"step": [1, 2], "split": ["val"] * 2, "metric": ["loss"] * 2, "value": [2.5, 2.0]}
PROFILE: dict[str, list[Any]] = {"phase": ["decode"], "metric": ["tokens_per_second"], "value": [100.0]}
ROUND: dict[str, list[Any]] = {
    "variant_id": ["a1", "a1"],
    "variant": ["baseline"] * 2,
    "is_partner": [False, True],
    "place": [1, 2],
    "seed": [0, 1],
    "status": ["ok", "crashed"],
    "metric": ["step_seconds", None],
    "value": [0.1, None],
}


def row(trial_id: str, **columns: Any) -> dict[str, Any]:
    return {"trial_id": trial_id, "variant": "baseline", "seed": 0, "status": "ok", **columns}


def frames(store: Store) -> dict[str, pd.DataFrame]:
    found = store.load()
    return {kind: getattr(found, kind) for kind in SCHEMAS}
