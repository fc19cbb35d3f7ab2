"""One trial as MLflow is to see it: names, parameters, metrics and tags, made from the stored record alone.

MLflow takes few characters in names, no NaN, and becomes slow with long curves. So names are mapped reversibly, what is
not finite becomes a tag, and curves are thinned. Parquet keeps the truth.
"""

from __future__ import annotations

import hashlib
import json
import math
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import pandas as pd

from ablate.interleaved import Rounds
from ablate.schema import TRIALS

POINTS_PER_METRIC = 1000
_VALUE_LENGTH = 500
_KEY_LENGTH = 250

# --- Names ------------------------------------------------------------------------------------------------------------

_FOREIGN = re.compile(r"[^A-Za-z0-9_.\-/ ]|_(?=x)")
_PATH_SIGNS = re.compile(r"[./]")
_ESCAPE = re.compile(r"_x([0-9a-f]+)_")


def encode_name(name: str) -> str:
    """`name` in the characters that every MLflow store takes; two names never become the same one."""
    encoded = _FOREIGN.sub(_escaped, name)
    if posixpath.normpath(encoded) != encoded or encoded.startswith(("/", "..")) or encoded == ".":
        encoded = _PATH_SIGNS.sub(_escaped, encoded)
    return encoded


def decode_name(encoded: str) -> str:
    """The name that `encode_name` was given."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), encoded)


def _escaped(match: re.Match[str]) -> str:
    return f"_x{ord(match[0]):x}_"


# --- A run ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One value of a metric."""

    key: str
    value: float
    step: int


@dataclass(frozen=True)
class RunContent:
    """All that MLflow holds of one trial."""

    name: str
    status: str
    start_ms: int | None
    end_ms: int | None
    params: dict[str, str]
    tags: dict[str, str]
    points: list[Point]

    def fingerprint(self) -> str:
        """Equal for equal content: so that writing twice can be told from writing anew."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, allow_nan=False).encode()).hexdigest()

    def latest(self) -> dict[str, float]:
        """What MLflow must show as each metric's value."""
        ordered = sorted(self.points, key=lambda point: point.step)
        return {point.key: point.value for point in ordered}


def run_content(
    row: Mapping[str, Any],
    curves: pd.DataFrame,
    profiles: pd.DataFrame,
    experiment: Mapping[str, Any],
    variant: Mapping[str, Any],
) -> RunContent:
    """The run of the trial stored in `row`, under the name that `variant` has in `experiment` now."""
    config = json.loads(row["config"]) if row["config"] else {}
    flat = {"variant": variant["name"], "seed": row["seed"], **_flattened(config)}
    series = {**_series_of_curves(curves, row), **_series_of_profiles(profiles)}
    series.update(_series_of_columns(row, series), **_series_of_settings(flat, experiment, variant))
    start, end = _times(row)
    return RunContent(
        name=f"{variant['name']} seed={row['seed']}",
        status=_status(row["status"]),
        start_ms=start,
        end_ms=end,
        params={encode_name(key): _short(value) for key, value in flat.items() if _fits(key)},
        tags={**_tags(row, variant), **_tags_of_non_finite(series)},
        points=[point for key, values in series.items() if _fits(key) for point in _points(key, values)],
    )


def _status(outcome: str) -> str:
    if outcome == "ok":
        return "FINISHED"
    return "KILLED" if outcome in ("killed", "interrupted") else "FAILED"


def _times(row: Mapping[str, Any]) -> tuple[int | None, int | None]:
    started: datetime | None = row["started_at"]
    if started is None:
        return None, None
    seconds = row["wall_seconds"] if row["wall_seconds"] is not None else 0.0
    start = int(started.timestamp() * 1000)
    return start, start + int(seconds * 1000) if math.isfinite(seconds) else start


def _fits(key: str) -> bool:
    # What does not fit is in config.json and in Parquet; cut, it could be taken for another.
    return 0 < len(encode_name(key)) <= _KEY_LENGTH


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE_LENGTH else text[: _VALUE_LENGTH - 1] + "…"


def _flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted paths; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flattened(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _tags(row: Mapping[str, Any], variant: Mapping[str, Any]) -> dict[str, str]:
    config = (row["config"] or "").encode("utf-8")
    tags = {
        "ablate.variant": variant["name"],
        "ablate.seed": row["seed"],
        "ablate.baseline": bool(variant.get("is_baseline")),
        "ablate.tuning": row["is_for_tuning"] or None,
        "ablate.attempt": row["attempts"],
        "ablate.outcome": row["status"],
        "ablate.phase": row["phase"],
        "ablate.compiled": row["compiled"],
        "ablate.compile_fault": row["compile_fault"],
        "ablate.config_sha256": hashlib.sha256(config).hexdigest(),
        "ablate.git_commit": row["git_commit"],
        "ablate.git_dirty": row["git_dirty"],
        "mlflow.source.git.commit": row["git_commit"],
        "mlflow.note.content": row["reason"],
    }
    return {key: _short(value) for key, value in tags.items() if value is not None}


# --- Metrics ----------------------------------------------------------------------------------------------------------

Series = Sequence[tuple[int, float]]

_NUMBERS = tuple(column.name for column in TRIALS if str(column.type) in ("int64", "double"))


def _points(key: str, series: Series) -> list[Point]:
    finite = [(step, value) for step, value in series if math.isfinite(value)]
    return [Point(encode_name(key), float(value), int(step)) for step, value in thinned(finite)]


def thinned(series: Series) -> Series:
    """About `POINTS_PER_METRIC` of the values, in order: always the first, the last and the lowest."""
    if len(series) <= POINTS_PER_METRIC:
        return series
    last = len(series) - 1
    keep = {round(place * last / (POINTS_PER_METRIC - 2)) for place in range(POINTS_PER_METRIC - 1)}
    keep.add(min(range(len(series)), key=lambda place: series[place][1]))
    return [series[place] for place in sorted(keep)]


def _series_of_curves(curves: pd.DataFrame, row: Mapping[str, Any]) -> dict[str, Series]:
    present = curves.dropna(subset=["step", "split", "metric"])
    series: dict[str, Series] = {}
    for (split, metric), group in present.groupby(["split", "metric"], sort=True):
        by_step = group.drop_duplicates("step", keep="last").sort_values("step")
        values = zip(by_step["step"].tolist(), by_step["value"].tolist(), strict=True)
        series[_curve_name(str(split), str(metric), row)] = list(values)
    return series


def _curve_name(split: str, metric: str, row: Mapping[str, Any]) -> str:
    """A curve shares a column's name only where that column has the curve's outcome.

    A trial that diverged has no loss to compete with; the last value of its curve must not be taken for one.
    """
    column = f"{split}_{metric}"
    if column not in _NUMBERS:
        return f"{split}/{metric}"
    value = row[column]
    return column if value is not None and math.isfinite(value) else f"unfinished/{column}"


def _series_of_columns(row: Mapping[str, Any], curves: Mapping[str, Series]) -> dict[str, Series]:
    """The row's numbers under their own names; a number with a curve is the curve's last point."""
    series: dict[str, Series] = {}
    for name in _NUMBERS:
        if row[name] is None:
            continue
        curve = curves.get(name, [])
        last = max([row["steps"] or 0, *(step for step, _ in curve)]) if curve else 0
        series[name] = [*(point for point in curve if point[0] < last), (last, row[name])]
    return series


_CELL = ("batch", "context", "new_tokens", "path")
"""What names a cell of a profile."""


def _series_of_profiles(profiles: pd.DataFrame) -> dict[str, Series]:
    series: dict[str, Series] = {}
    figures = profiles[profiles["sample"].isna()]
    for each in figures.dropna(subset=["metric", "value"]).to_dict("records"):
        place = " ".join(f"{name} {each[name]}" for name in _CELL if pd.notna(each[name]))
        parts = ["profile", str(each["phase"]), place, str(each["metric"])]
        series["/".join(part for part in parts if part)] = [(0, float(each["value"]))]
    return series


def metrics_of_rounds(rounds: Rounds, variant: str) -> tuple[dict[str, float], dict[str, str]]:
    """What the interleaved repeats say of a variant's times by the baseline's: numbers, and verdicts as tags.

    They are no part of `RunContent`: the rounds come after the trials, and each round changes them.
    """
    metrics: dict[str, float] = {}
    verdicts: dict[str, str] = {}
    for kind in rounds.timings if variant in rounds.members and variant != rounds.baseline else ():
        ratio, name = rounds.against_baseline(kind, variant), f"repeats/{kind}_time_ratio"
        told = {name: ratio.mean, f"{name}_low": ratio.low, f"{name}_high": ratio.high, f"{name}_rounds": ratio.n}
        metrics |= {key: float(value) for key, value in told.items() if value is not None}
        verdicts[f"ablate.verdict.{kind}_time"] = rounds.verdict(kind, variant)
    return metrics, verdicts


def _series_of_settings(
    flat: Mapping[str, Any], experiment: Mapping[str, Any], variant: Mapping[str, Any]
) -> dict[str, Series]:
    """Numbers that the experiment varies, also as metrics: MLflow sorts parameters as text."""
    varied = {path for each in experiment.get("variants", []) for path in each.get("changes", {})}
    own = {**flat, **variant.get("changes", {})}
    return {f"setting/{path}": [(0, own[path])] for path in sorted(varied) if _is_number(own.get(path))}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _tags_of_non_finite(series: Mapping[str, Series]) -> dict[str, str]:
    return dict(_first_non_finite(series))


def _first_non_finite(series: Mapping[str, Series]) -> Iterator[tuple[str, str]]:
    for key, values in series.items():
        bad = next(((step, value) for step, value in values if not math.isfinite(value)), None)
        if bad and _fits(f"{key}_nonfinite"):
            yield f"{encode_name(key)}_nonfinite", f"{bad[1]}@{bad[0]}"
