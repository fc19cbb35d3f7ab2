"""The record: one experiment's folder of Parquet files, written whole, read without trusting any of them.

Every file has all columns of its declared schema. A trial's row is written after its curves and profiles, so a trial
counts only when all of it is there. What cannot be read is left out and named in `Results.skipped`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock

from ablate.documents import EXPERIMENT, MLFLOW, read_json
from ablate.files import remove_leftovers
from ablate.schema import CURVES, PROFILES, REPEATS, SCHEMAS, TRIALS
from ablate.sealed import write_sealed
from ablate.shelf import COMPACTED, Found, Shelf, shown
from ablate.tables import (
    Columns,
    ResultsError,
    build_long_table,
    build_table,
    checked_id,
    frame_of,
    write_id_of,
)

CHECKPOINTS = "checkpoints"
"""The folder with what trainings go on from, a folder a trial."""

LOCK = "store.lock"
_SECONDS_TO_WAIT = 30.0
"""For another writer, who is done in a moment, or for a compaction."""


def is_trained(row: Mapping[str, Any]) -> bool:
    """Whether training steps were made for the sake of the weights, and not only to measure them."""
    return row.get("steps") is not None


def is_only_profiled(row: Mapping[str, Any]) -> bool:
    """Whether the row is of a trial that ended well without being trained, and so has no loss."""
    return row.get("status") == "ok" and not is_trained(row)


# --- What may be written ----------------------------------------------------------------------------------------------


def _check_row(row: Mapping[str, Any]) -> None:
    started = row.get("started_at")
    if isinstance(started, datetime) and started.tzinfo is None:
        raise ResultsError("started_at has no time zone")


# --- Reading ----------------------------------------------------------------------------------------------------------


def told(kind: str, name: str, fault: str) -> str:
    """What is said of a file that does not count, or of all of its folder."""
    return f"{kind}/{shown(name)}: {fault}" if name else f"{kind}: {fault}"


def _frame(kind: str, found: Found, rows: Mapping[str, bytes]) -> pd.DataFrame:
    """The rows in the order of their names: the compacted file has its own, and small ones come beside it."""
    packed = found.packed_ids()
    if kind in ("curves", "profiles"):
        packed = {name: write_id for name, write_id in packed.items() if rows.get(name) == write_id}
    tables = [found.packed.only(set(packed))] if found.packed and packed else []
    own = [found.tables[name] for name in sorted(found.tables)]
    frame = frame_of(kind, [*tables, *own])
    is_mixed = tables and own and kind != "repeats"
    return frame.sort_values("trial_id", ignore_index=True, kind="stable") if is_mixed else frame


def of_rows(found: Found, rows: Mapping[str, bytes]) -> tuple[Found, list[str]]:
    """The curves or profiles that were written together with the rows given, and what is to say of the others."""
    belonging = {name: table for name, table in found.tables.items() if rows.get(name) == write_id_of(table)}
    strange = [
        f"{name}.parquet: "
        + ("belongs to another attempt than its trial's row" if name in rows else "its trial has no row")
        for name in sorted(found.tables.keys() - belonging.keys())
    ]
    if found.packed and (without := found.packed.parts.keys() - rows.keys()):
        strange.append(f"{COMPACTED}: of {len(without)} trials no row is there")
    return Found(belonging, found.packed, {}), strange


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


def tuning_places(experiment: Mapping[str, Any]) -> dict[str, tuple[int, int, int]]:
    """tuning trial id -> (its variant's place among those that are tuned, its point's place, seed): the first of a
    point that a sampler has drawn again.
    """
    variants = (experiment.get("tuning") or {}).get("variants", {})
    found: dict[str, tuple[int, int, int]] = {}
    for place, each in enumerate(variants.values()):
        for number, point in enumerate(each.get("points", [])):
            for seed, trial_id in point.get("trials", {}).items():
                found.setdefault(trial_id, (place, number, int(seed)))
    return found


def _tuning_of(trials: pd.DataFrame, experiment: Mapping[str, Any]) -> pd.DataFrame:
    """The rows of the search of the present experiment, in its order, with the point that each was tried at."""
    place = tuning_places(experiment)
    named = trials[trials["trial_id"].isin(list(place))]
    named = named.iloc[sorted(range(len(named)), key=lambda row: place[named["trial_id"].iloc[row]])]
    tuning = experiment.get("tuning") or {}
    names, searched = list(tuning.get("variants", {})), list(tuning.get("variants", {}).values())
    where = [place[trial_id] for trial_id in named["trial_id"]]
    points = [searched[variant]["points"][point] for variant, point, _ in where]
    columns: dict[str, list[Any]] = {
        "variant": [names[variant] for variant, _, _ in where],
        "is_added": [point.get("is_added", False) for point in points],
        "is_chosen": [searched[variant].get("chosen") == point for variant, point, _ in where],
        **{path: [point["point"].get(path) for point in points] for path in tuning.get("settings", {})},
    }
    return named.reset_index(drop=True).assign(**{name: pd.Series(values) for name, values in columns.items()})


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
    tuning: pd.DataFrame = field(default_factory=lambda: frame_of("trials", []))
    """The trials that settings were chosen by, none of which is among `trials`: in columns more the point of each, as
    `train.lr`, whether the grid had to grow for it (`is_added`), and whether it is what was chosen (`is_chosen`)."""


def nothing_stored(experiment: Mapping[str, Any]) -> Results:
    """An experiment of which there is no row yet."""
    trials, curves, profiles = (frame_of(kind, []) for kind in ("trials", "curves", "profiles"))
    return Results(Path(), dict(experiment), trials, curves, profiles)


class Store:
    """The folder of one experiment's results."""

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        self.folder = Path(folder)
        self.shelves = {kind: Shelf(self.folder, kind) for kind in SCHEMAS}
        if create:
            for each in self.folders():
                each.mkdir(parents=True, exist_ok=True)

    def folders(self) -> list[Path]:
        """Where a run writes."""
        return [self.folder, *(self.folder / part for part in (*SCHEMAS, "logs"))]

    @contextlib.contextmanager
    def alone(self, *, surely: bool = False) -> Iterator[None]:
        """Nobody else writes rows meanwhile, nor compacts them: `surely`, or as far as the file system knows locks.

        A lock that nobody gives up in time is an `OSError`.
        """
        lock = FileLock(self.folder / LOCK, timeout=_SECONDS_TO_WAIT)
        try:
            lock.acquire()
        except NotImplementedError as error:
            if surely:
                raise OSError(errno.ENOLCK, "this file system has no locks", lock.lock_file) from error
        try:
            yield
        finally:
            lock.release()

    def log_path(self, trial_id: str) -> Path:
        """Where the output of a trial's process goes."""
        return self.folder / "logs" / f"{checked_id(trial_id)}.log"

    def checkpoints_path(self, trial_id: str) -> Path:
        """Where a training that is under way is kept."""
        return self.folder / CHECKPOINTS / checked_id(trial_id)

    def drop_checkpoints(self, trial_id: str) -> None:
        """There is nothing to go on with."""
        shutil.rmtree(self.checkpoints_path(trial_id), ignore_errors=True)

    def are_checkpoints_left(self, trial_id: str) -> bool:
        """Whether there are some from before the row that is stored; of a newer attempt they are none of its."""
        try:
            row, folder = self.shelves["trials"].path(checked_id(trial_id)), self.checkpoints_path(trial_id)
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
        with self.alone():
            for kind, table in tables.items():
                self.shelves[kind].write(trial_id, table)
            self._forget(tables, trial_id)

    def _forget(self, kinds: Iterable[str], name: str) -> None:
        """What is stored is stored, also where the compacted file cannot be written, whose rows no longer count."""
        for kind in kinds:
            with contextlib.suppress(OSError):
                self.shelves[kind].forget({name})

    def write_round(self, timing_id: str, number: int, columns: Columns) -> None:
        """Stores one round whole, in place of what was there."""
        rows = len(next(iter(columns.values())))
        identity: dict[str, list[Any]] = {"timing_id": [checked_id(timing_id)] * rows, "round": [number] * rows}
        table = build_table(REPEATS, {**columns, **identity}, rows, uuid.uuid4().hex)
        with self.alone():
            self.shelves["repeats"].write(f"{timing_id}-{number}", table)
            self._forget(["repeats"], f"{timing_id}-{number}")

    def rounds(self, timing_id: str) -> list[dict[str, Any]]:
        """The rows of the readable rounds that are stored under the identity."""
        shelf = self.shelves["repeats"]
        tables = [
            table for name in shelf.names(f"{checked_id(timing_id)}-") if (table := shelf.first(name)) is not None
        ]
        return [row for table in tables if table is not None for row in table.to_pylist()]

    def trial(self, trial_id: str) -> dict[str, Any] | None:
        """The stored row as plain Python (None for null, NaN stays NaN), or None where no readable one is."""
        table = self.shelves["trials"].first(checked_id(trial_id))
        if table is None:
            return None
        row: dict[str, Any] = table.to_pylist()[0]
        return row

    def is_whole(self, trial_id: str) -> bool:
        """Whether a row is stored, and the curves and profiles that were written with it can be read."""
        row = self.shelves["trials"].first(checked_id(trial_id))
        return row is not None and all(
            any(write_id_of(each) == write_id_of(row) for each in self.shelves[kind].named(trial_id))
            for kind in ("curves", "profiles")
        )

    def curves(self, trial_id: str) -> pd.DataFrame:
        """The curves that belong to the stored row; no rows where there are none."""
        return self._long("curves", trial_id)

    def profiles(self, trial_id: str) -> pd.DataFrame:
        """The profiles that belong to the stored row; no rows where there are none."""
        return self._long("profiles", trial_id)

    def _long(self, kind: str, trial_id: str) -> pd.DataFrame:
        row = self.shelves["trials"].first(checked_id(trial_id))
        tables = self.shelves[kind].named(trial_id) if row is not None else ()
        belonging = (table for table in tables if write_id_of(table) == write_id_of(row))
        return frame_of(kind, [table for table in [next(belonging, None)] if table is not None])

    def look(self, kind: str) -> Found:
        """Everything of one kind, and what of it does not count."""
        return self.shelves[kind].look()

    def remove_leftovers(self) -> list[Path]:
        """Removes what killed writers left, and tells of it."""
        return [path for folder in self.folders() for path in remove_leftovers(folder)]

    def write_experiment(self, document: Mapping[str, Any]) -> None:
        """Stores what the experiment is now: its resolved file, its variants and their trials."""
        write_sealed(self.folder / "experiment.json", document)

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
            return read_json(
                path, EXPERIMENT, {"variants": ["name"], "invalid": ["variant", "reason"], "claims": ["claim"]}
            )
        except FileNotFoundError as error:
            raise ResultsError(f"no experiment.json in {self.folder}") from error
        except (OSError, TypeError, ValueError) as error:
            raise ResultsError(f"{path} cannot be read: {error}") from error

    def write_mlflow(self, document: Mapping[str, Any]) -> None:
        """Stores where the experiment is mirrored."""
        write_sealed(self.folder / "mlflow.json", document)

    def mlflow(self) -> dict[str, Any] | None:
        """Where the present experiment's trials are mirrored, or None: the mirror can always be made again."""
        try:
            noted = read_json(self.folder / "mlflow.json", MLFLOW, {"": ["experiment_id", "runs"]})
        except (OSError, TypeError, ValueError):
            return None
        present = self.mirrored()
        by_trial = {name: noted[name] for name in ("runs", "attempts") if name in noted}
        return noted | {
            name: {key: value for key, value in each.items() if present is None or key in present}
            for name, each in by_trial.items()
        }

    def compared(self) -> dict[str, Any] | None:
        """The same with the runs alone that are compared, which those of tuning are not."""
        noted, tried = self.mlflow(), tuning_places(self.experiment()) if self.present() is not None else {}
        return noted and noted | {"runs": {key: run for key, run in noted["runs"].items() if key not in tried}}

    def present(self) -> Mapping[str, tuple[int, int, Mapping[str, Any]]] | None:
        """The `places` of the present experiment's trials; None where no experiment.json says which they are."""
        try:
            return places(self.experiment())
        except ResultsError:
            return None

    def mirrored(self) -> list[str] | None:
        """The ids of the present experiment's trials, those of its tuning among them; None where nothing says it."""
        try:
            experiment = self.experiment()
        except ResultsError:
            return None
        return [*places(experiment), *tuning_places(experiment)]

    def load(self, experiment: Mapping[str, Any] | None = None) -> Results:
        """All that is readable, at any moment, also while trials are being written: of the experiment as it is stored,
        or as it is given.
        """
        skipped: list[str] = []
        document = self._experiment_if_readable(skipped) if experiment is None else dict(experiment)
        looks = {kind: self.look(kind) for kind in SCHEMAS}
        rows = looks["trials"].write_ids()
        for kind, found in looks.items():
            skipped += [told(kind, name, fault) for name, fault in found.faults.items()]
            if kind in ("curves", "profiles"):
                looks[kind], strange = of_rows(found, rows)
                skipped += [f"{kind}/{each}" for each in strange]
        trials, curves, profiles, repeats = (_frame(kind, found, rows) for kind, found in looks.items())
        tuning = _tuning_of(trials, document)
        trials = trials[~trials["is_for_tuning"].fillna(False).astype(bool)]
        if document:
            trials = _as_named_now(trials, document)
        else:
            trials = trials.sort_values(["variant", "seed", "trial_id"], ignore_index=True)
        return Results(
            folder=self.folder,
            experiment=document,
            trials=trials,
            curves=_of_trials(curves, trials),
            profiles=_of_trials(profiles, trials),
            skipped=skipped,
            repeats=_rounds_of(repeats, document),
            tuning=tuning,
        )

    def _experiment_if_readable(self, skipped: list[str]) -> dict[str, Any]:
        if not os.path.lexists(self.folder / "experiment.json"):
            return {}
        try:
            return self.experiment()
        except ResultsError as error:
            skipped.append(f"experiment.json: {error}")
            return {}


def is_store(folder: Path) -> bool:
    """Whether an experiment's results are there, in whatever state."""
    return (folder / "experiment.json").exists() or (folder / "trials").is_dir()


def load(path: str | Path) -> Results:
    """The results in one experiment's folder: `ablate.load("results/quickstart")`."""
    folder = Path(path)
    if not is_store(folder):
        raise ResultsError(f"no results in {folder}")
    return Store(folder).load()
