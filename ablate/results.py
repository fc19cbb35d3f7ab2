"""The record: one experiment's folder of Parquet files, written whole, read without trusting any of them.

Every file has all columns of its declared schema. A trial's row is written after its curves and profiles, so a trial
counts only when all of it is there. What cannot be read is left out and named in `Results.skipped`.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd

from ablate.documents import EXPERIMENT, MLFLOW, read_json, refuse_constant
from ablate.files import write_json
from ablate.schema import CURVES, JSON_COLUMNS, PROFILES, REPEATS, SCHEMAS, STATUSES, TRIALS
from ablate.tables import (
    Columns,
    ResultsError,
    UnreadableError,
    build_long_table,
    build_table,
    checked_id,
    frame_of,
    read_table,
    write_id_of,
    write_table,
)


def is_trained(row: Mapping[str, Any]) -> bool:
    """Whether training steps were made for the sake of the weights, and not only to measure them."""
    return row.get("steps") is not None


def is_only_profiled(row: Mapping[str, Any]) -> bool:
    """Whether the row is of a trial that ended well without being trained, and so has no loss."""
    return row.get("status") == "ok" and not is_trained(row)


# --- What may be written ----------------------------------------------------------------------------------------------


def _check_row(row: Mapping[str, Any]) -> None:
    if row.get("status") not in STATUSES:
        raise ResultsError(f"unknown status: {row.get('status')!r}")
    if not isinstance(row.get("variant"), str):
        raise ResultsError("a trial's row needs its variant")
    started = row.get("started_at")
    if isinstance(started, datetime) and started.tzinfo is None:
        raise ResultsError("started_at has no time zone")
    log = row.get("log")
    if log is not None and (PurePosixPath(log).is_absolute() or ".." in PurePosixPath(log).parts):
        raise ResultsError(f"log is outside the experiment's folder: {log}")
    for column in JSON_COLUMNS:
        if row.get(column) is not None:
            _check_json(column, row[column])


def _check_json(column: str, text: Any) -> None:
    try:
        json.loads(text, parse_constant=refuse_constant)
    except (TypeError, ValueError) as error:
        raise ResultsError(f"column {column} is not strict JSON text: {error}") from error


# --- Reading ----------------------------------------------------------------------------------------------------------


def _tables(folder: Path, kind: str, skipped: list[str]) -> Iterator[tuple[str, Any]]:
    if not (folder / kind).is_dir():
        return
    for path in sorted((folder / kind).iterdir()):
        try:
            yield path.stem, read_table(path, kind)
        except UnreadableError as fault:
            skipped.append(f"{kind}/{path.name}: {fault}")


def _long_tables(folder: Path, kind: str, rows: Mapping[str, Any], skipped: list[str]) -> list[Any]:
    """The curves or profiles that were written together with the rows given."""
    tables = []
    for trial_id, table in _tables(folder, kind, skipped):
        if trial_id not in rows:
            skipped.append(f"{kind}/{trial_id}.parquet: its trial has no row")
        elif write_id_of(table) != write_id_of(rows[trial_id]):
            skipped.append(f"{kind}/{trial_id}.parquet: belongs to another attempt than its trial's row")
        else:
            tables.append(table)
    return tables


# --- The variants in use now ------------------------------------------------------------------------------------------


def places(experiment: Mapping[str, Any]) -> dict[str, tuple[int, int, Mapping[str, Any]]]:
    """trial id -> (its variant's place in the experiment, seed, the variant): in this order trials are shown."""
    return {
        trial_id: (place, int(seed), variant)
        for place, variant in enumerate(experiment.get("variants", []))
        for seed, trial_id in variant.get("trials", {}).items()
    }


def _as_named_now(trials: pd.DataFrame, experiment: Mapping[str, Any]) -> pd.DataFrame:
    """Rows of the present experiment in its order, under the names and differences that it gives them."""
    place = places(experiment)
    named = trials[trials["trial_id"].isin(list(place))]
    variants = [place[trial_id][2] for trial_id in named["trial_id"]]
    changes = [
        json.dumps(variant["changes"], ensure_ascii=False) if "changes" in variant else stored
        for variant, stored in zip(variants, named["changes"], strict=True)
    ]
    named = named.assign(
        variant=[variant["name"] for variant in variants],
        is_baseline=[bool(variant.get("is_baseline")) for variant in variants],
        changes=changes,
    ).astype(trials.dtypes.to_dict())
    order = sorted(range(len(named)), key=lambda row: place[named["trial_id"].iloc[row]][:2])
    return named.iloc[order].reset_index(drop=True)


def _of_trials(frame: pd.DataFrame, trials: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["trial_id"].isin(trials["trial_id"])].reset_index(drop=True)


def _rounds_of(repeats: pd.DataFrame, experiment: Mapping[str, Any]) -> pd.DataFrame:
    """The rounds that the present experiment's variants are compared by, under the names that it gives them."""
    if experiment:
        timing = experiment.get("timing") or {"timing_id": None, "members": {}}
        repeats = repeats[repeats["timing_id"] == timing["timing_id"]]
        named = [timing["members"].get(each) for each in repeats["variant_id"]]
        repeats = repeats.assign(variant=named).astype(repeats.dtypes.to_dict())
    return repeats.sort_values(["timing_id", "place"], ignore_index=True, kind="stable")


# --- The doors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """What is stored of one experiment, as pandas frames. Whole numbers are `Int64`: a missing one stays missing."""

    folder: Path
    experiment: dict[str, Any]
    trials: pd.DataFrame
    curves: pd.DataFrame
    profiles: pd.DataFrame
    skipped: list[str] = field(default_factory=list)
    repeats: pd.DataFrame = field(default_factory=lambda: frame_of("repeats", []))


class Store:
    """The folder of one experiment's results."""

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        self.folder = Path(folder)
        if create:
            for part in (*SCHEMAS, "logs"):
                (self.folder / part).mkdir(parents=True, exist_ok=True)

    def log_path(self, trial_id: str) -> Path:
        """Where the output of a trial's process goes."""
        return self.folder / "logs" / f"{checked_id(trial_id)}.log"

    def checkpoints_path(self, trial_id: str) -> Path:
        """Where a training that is under way is kept."""
        return self.folder / "checkpoints" / checked_id(trial_id)

    def drop_checkpoints(self, trial_id: str) -> None:
        """There is nothing to go on with."""
        shutil.rmtree(self.checkpoints_path(trial_id), ignore_errors=True)

    def are_checkpoints_left(self, trial_id: str) -> bool:
        """Whether there are some from before the row that is stored; of a newer attempt they are none of its."""
        try:
            row, folder = self._path("trials", checked_id(trial_id)), self.checkpoints_path(trial_id)
            return folder.stat().st_mtime <= row.stat().st_mtime
        except OSError:
            return False

    def write_trial(self, row: Mapping[str, Any], curves: Columns, profiles: Columns) -> None:
        """Stores one trial whole, in place of what was there. The row comes last: it says that all is there."""
        trial_id = checked_id(row.get("trial_id"))
        _check_row(row)
        write_id = uuid.uuid4().hex
        tables = {
            "curves": build_long_table(CURVES, trial_id, curves, write_id),
            "profiles": build_long_table(PROFILES, trial_id, profiles, write_id),
            "trials": build_table(TRIALS, {name: [value] for name, value in row.items()}, 1, write_id),
        }
        for kind, table in tables.items():
            write_table(self._path(kind, trial_id), table)

    def write_round(self, timing_id: str, number: int, columns: Columns) -> None:
        """Stores one round whole, in place of what was there."""
        rows = len(next(iter(columns.values())))
        identity: dict[str, list[Any]] = {"timing_id": [checked_id(timing_id)] * rows, "round": [number] * rows}
        table = build_table(REPEATS, {**columns, **identity}, rows, uuid.uuid4().hex)
        write_table(self._path("repeats", f"{timing_id}-{number}"), table)

    def rounds(self, timing_id: str) -> list[dict[str, Any]]:
        """The rows of the readable rounds that are stored under the identity."""
        paths = sorted((self.folder / "repeats").glob(f"{checked_id(timing_id)}-*.parquet"))
        tables = [table for path in paths if (table := self._readable(path, "repeats")) is not None]
        return [row for table in tables for row in table.to_pylist()]

    def trial(self, trial_id: str) -> dict[str, Any] | None:
        """The stored row as plain Python (None for null, NaN stays NaN), or None where no readable one is."""
        table = self._stored("trials", trial_id)
        if table is None:
            return None
        row: dict[str, Any] = table.to_pylist()[0]
        return row

    def curves(self, trial_id: str) -> pd.DataFrame:
        """The curves that belong to the stored row; no rows where there are none."""
        return self._long("curves", trial_id)

    def profiles(self, trial_id: str) -> pd.DataFrame:
        """The profiles that belong to the stored row; no rows where there are none."""
        return self._long("profiles", trial_id)

    def _long(self, kind: str, trial_id: str) -> pd.DataFrame:
        row, table = self._stored("trials", trial_id), self._stored(kind, trial_id)
        belongs = row is not None and table is not None and write_id_of(row) == write_id_of(table)
        return frame_of(kind, [table] if belongs else [])

    def _stored(self, kind: str, trial_id: str) -> Any | None:
        return self._readable(self._path(kind, checked_id(trial_id)), kind)

    def _readable(self, path: Path, kind: str) -> Any | None:
        try:
            return read_table(path, kind)
        except UnreadableError:
            return None

    def _path(self, kind: str, name: str) -> Path:
        return self.folder / kind / f"{name}.parquet"

    def write_experiment(self, document: Mapping[str, Any]) -> None:
        """Stores what the experiment is now: its resolved file, its variants and their trials."""
        write_json(self.folder / "experiment.json", document)

    def note_timing(self, timing: Mapping[str, Any] | None) -> None:
        """Stores which rounds the present experiment's variants are compared by, and what they are called."""
        document = self.experiment()
        noted = {key: value for key, value in document.items() if key != "timing"}
        noted |= {"timing": timing} if timing else {}
        if noted != document:
            self.write_experiment(noted)

    def experiment(self) -> dict[str, Any]:
        """What `write_experiment` stored; `ResultsError` where that is missing or unreadable."""
        path = self.folder / "experiment.json"
        try:
            return read_json(path, EXPERIMENT, {"variants": ["name"], "invalid": ["variant", "reason"]})
        except FileNotFoundError as error:
            raise ResultsError(f"no experiment.json in {self.folder}") from error
        except (OSError, TypeError, ValueError) as error:
            raise ResultsError(f"{path} cannot be read: {error}") from error

    def write_mlflow(self, document: Mapping[str, Any]) -> None:
        """Stores where the experiment is mirrored."""
        write_json(self.folder / "mlflow.json", document)

    def mlflow(self) -> dict[str, Any] | None:
        """Where the present experiment's trials are mirrored, or None: the mirror can always be made again."""
        try:
            noted = read_json(self.folder / "mlflow.json", MLFLOW, {"": list(MLFLOW)})
        except (OSError, TypeError, ValueError):
            return None
        present = self.present()
        return {**noted, "runs": {key: run for key, run in noted["runs"].items() if present is None or key in present}}

    def present(self) -> Mapping[str, tuple[int, int, Mapping[str, Any]]] | None:
        """The `places` of the present experiment's trials; None where no experiment.json says which they are."""
        try:
            return places(self.experiment())
        except ResultsError:
            return None

    def load(self) -> Results:
        """All that is readable, at any moment, also while trials are being written."""
        skipped: list[str] = []
        experiment = self._experiment_if_readable(skipped)
        rows = dict(_tables(self.folder, "trials", skipped))
        curves, profiles = (_long_tables(self.folder, kind, rows, skipped) for kind in ("curves", "profiles"))
        rounds = [table for _, table in _tables(self.folder, "repeats", skipped)]
        trials = frame_of("trials", list(rows.values()))
        if experiment:
            trials = _as_named_now(trials, experiment)
        else:
            trials = trials.sort_values(["variant", "seed", "trial_id"], ignore_index=True)
        return Results(
            folder=self.folder,
            experiment=experiment,
            trials=trials,
            curves=_of_trials(frame_of("curves", curves), trials),
            profiles=_of_trials(frame_of("profiles", profiles), trials),
            skipped=skipped,
            repeats=_rounds_of(frame_of("repeats", rounds), experiment),
        )

    def _experiment_if_readable(self, skipped: list[str]) -> dict[str, Any]:
        if not (self.folder / "experiment.json").exists():
            return {}
        try:
            return self.experiment()
        except ResultsError as error:
            skipped.append(f"experiment.json: {error}")
            return {}


def load(path: str | Path) -> Results:
    """The results in one experiment's folder: `ablate.load("results/quickstart")`."""
    folder = Path(path)
    if not (folder / "experiment.json").exists() and not (folder / "trials").is_dir():
        raise ResultsError(f"no results in {folder}")
    return Store(folder).load()
