"""The record: one experiment's folder of Parquet files, written whole, read without trusting any of them.

Every file has all columns of its declared schema. A trial's row is written after its curves and profiles, so a trial
counts only when all of it is there. What cannot be read is left out and named in `Results.skipped`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ablate.schema import (
    CURVES,
    JSON_COLUMNS,
    PROFILES,
    RENAMED,
    REPEATS,
    SCHEMA_VERSION,
    SCHEMAS,
    STATUSES,
    TRIALS,
)

Columns = Mapping[str, Sequence[Any]]


class ResultsError(ValueError):
    """Results that are not there, or that would not come back as they were given."""


# Compact for long tables, and plain to every reader: only the strings are worth a dictionary.
_ENCODINGS = {
    **dict.fromkeys(("step", "tokens", "sample", "round", "place"), "DELTA_BINARY_PACKED"),
    "value": "BYTE_STREAM_SPLIT",
}


def is_trained(row: Mapping[str, Any]) -> bool:
    """Whether training steps were made for the sake of the weights, and not only to measure them."""
    return row.get("steps") is not None


def is_only_profiled(row: Mapping[str, Any]) -> bool:
    """Whether the row is of a trial that ended well without being trained, and so has no loss."""
    return row.get("status") == "ok" and not is_trained(row)


# --- Writing ----------------------------------------------------------------------------------------------------------


def _write_atomically(path: Path, write: Callable[[Any], None]) -> None:
    """`path` holds either what it held before or all of the new content, whatever happens on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    # Not every file system can; the rename is then as durable as that file system makes it.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    _write_atomically(path, lambda file: file.write(text.encode("utf-8")))


def _write_table(path: Path, table: Any) -> None:
    strings = [each.name for each in table.schema if each.type == pa.string()]
    encodings = {name: encoding for name, encoding in _ENCODINGS.items() if name in table.column_names}
    _write_atomically(
        path,
        lambda file: pq.write_table(table, file, compression="zstd", use_dictionary=strings, column_encoding=encodings),
    )


def _table(schema: Any, columns: Columns, rows: int, write_id: str) -> Any:
    """All columns of `schema` from those given; the rest null. Nothing is inferred and nothing is dropped."""
    unknown = sorted(set(columns) - set(schema.names))
    if unknown:
        kind = schema.metadata[b"ablate_table"].decode()
        raise ResultsError(f"unknown column in {kind}: {', '.join(unknown)}")
    arrays = [_array(each, columns.get(each.name), rows) for each in schema]
    return pa.Table.from_arrays(arrays, schema=schema.with_metadata({**schema.metadata, b"write_id": write_id}))


def _array(column: Any, values: Sequence[Any] | None, rows: int) -> Any:
    if values is None:
        return pa.nulls(rows, column.type)
    if len(values) != rows:
        raise ResultsError(f"column {column.name} has {len(values)} values, others have {rows}")
    try:
        return _EXACT.get(column.type, _as_given)(values, column.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ResultsError(f"column {column.name}: {error}") from error


def _as_given(values: Sequence[Any], arrow_type: Any) -> Any:
    return pa.array(values, type=arrow_type, from_pandas=False)


def _whole_numbers(values: Sequence[Any], arrow_type: Any) -> Any:
    # Asked for whole numbers directly, pyarrow cuts 8.5 to 8 without a word; a safe cast refuses.
    inferred = pa.array(values, from_pandas=False)
    kind = inferred.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
        raise TypeError(f"whole numbers are due, not {kind}")
    return inferred.cast(arrow_type)


def _real_numbers(values: Sequence[Any], arrow_type: Any) -> Any:
    if any(isinstance(each, bool) for each in values):
        raise TypeError("numbers are due, not bool")
    # pyarrow refuses a whole number that a float rounds; in a column of floats rounding is what one expects.
    floats = [float(each) if isinstance(each, int) else each for each in values]
    # Without from_pandas a NaN stays a NaN: a diverged loss is not a missing one.
    return pa.array(floats, type=arrow_type, from_pandas=False)


_EXACT = {pa.int64(): _whole_numbers, pa.float64(): _real_numbers}


def _long_table(schema: Any, trial_id: str, columns: Columns, write_id: str) -> Any:
    rows = len(next(iter(columns.values()))) if columns else 0
    ids = columns.get("trial_id", [trial_id] * rows)
    if any(each != trial_id for each in ids):
        raise ResultsError(f"rows of another trial among those of {trial_id}")
    return _table(schema, {**columns, "trial_id": ids}, rows, write_id)


# --- What may be written ----------------------------------------------------------------------------------------------

_TRIAL_ID = re.compile(r"[0-9a-f]{1,64}")
_ROUND = re.compile(r"[0-9a-f]{1,64}-[0-9]{1,9}")


def _checked_id(trial_id: object) -> str:
    """File names come from trial ids, so that an id must not be able to name another place."""
    if not isinstance(trial_id, str) or not _TRIAL_ID.fullmatch(trial_id):
        raise ResultsError(f"not a trial id (lower-case hex digits): {trial_id!r}")
    return trial_id


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
        json.loads(text, parse_constant=_refuse_constant)
    except (TypeError, ValueError) as error:
        raise ResultsError(f"column {column} is not strict JSON text: {error}") from error


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


# --- Reading ----------------------------------------------------------------------------------------------------------


class _UnreadableError(Exception):
    """Why one file does not count."""


def _read(path: Path, kind: str) -> Any:
    """The table in `path` with the columns of today: those it lacks are null."""
    if path.stat().st_size == 0:
        raise _UnreadableError("zero bytes")
    try:
        table = pq.ParquetFile(path).read()
    except PermissionError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _UnreadableError("torn, or not a Parquet file") from error
    _check_origin(table.schema.metadata or {}, kind)
    return _conform(_renamed(table), SCHEMAS[kind])


def _check_origin(metadata: Mapping[bytes, bytes], kind: str) -> None:
    version = metadata.get(b"schema_version", b"").decode(errors="replace")
    if metadata.get(b"ablate_table") != kind.encode() or not version.isdecimal():
        raise _UnreadableError(f"not written as a file of {kind} by ablate")
    if int(version) > SCHEMA_VERSION:
        raise _UnreadableError(f"written by a newer ablate (schema {version}, this one knows {SCHEMA_VERSION})")


def _renamed(table: Any) -> Any:
    version, present = int(table.schema.metadata[b"schema_version"]), set(table.column_names)
    older = [renames for last, renames in RENAMED.items() if version <= last]
    names = {old: new for renames in older for old, new in renames.items() if new not in present}
    renamed = table.rename_columns([names.get(name, name) for name in table.column_names])
    return renamed.replace_schema_metadata(table.schema.metadata)


def _conform(table: Any, schema: Any) -> Any:
    present = set(table.column_names)
    try:
        arrays = [
            table.column(each.name).cast(each.type) if each.name in present else pa.nulls(len(table), each.type)
            for each in schema
        ]
    except pa.ArrowException as error:
        raise _UnreadableError(f"a column has another type: {error}") from error
    write_id = (table.schema.metadata or {}).get(b"write_id", b"")
    return pa.Table.from_arrays(arrays, schema=schema.with_metadata({**schema.metadata, b"write_id": write_id}))


def _checked_table(path: Path, kind: str) -> Any:
    """The table of one trial's or round's file, which must be about the one that its name says."""
    if path.name.startswith((".", "_")) or path.suffix == ".tmp":
        raise _UnreadableError("left over from a write that did not finish")
    name = _ROUND if kind == "repeats" else _TRIAL_ID
    if path.suffix != ".parquet" or not name.fullmatch(path.stem) or not path.is_file():
        raise _UnreadableError("not a file of ablate")
    try:
        table = _read(path, kind)
    except OSError as error:
        raise _UnreadableError(f"cannot be read: {error.strerror or error}") from error
    if any(each != path.stem for each in _names_of_file(table, kind)):
        raise _UnreadableError(f"is about another {'round' if kind == 'repeats' else 'trial'} than its name says")
    if kind == "trials" and len(table) != 1:
        raise _UnreadableError(f"has {len(table)} rows where one is due")
    return table


def _names_of_file(table: Any, kind: str) -> list[str]:
    """What the file that a row stands in must be called, for each row."""
    if kind != "repeats":
        names: list[str] = table.column("trial_id").to_pylist()
        return names
    ids, rounds = (table.column(name).to_pylist() for name in ("timing_id", "round"))
    return [f"{timing_id}-{number}" for timing_id, number in zip(ids, rounds, strict=True)]


def _write_id(table: Any) -> bytes:
    written: bytes = table.schema.metadata[b"write_id"]
    return written


def _tables(folder: Path, kind: str, skipped: list[str]) -> Iterator[tuple[str, Any]]:
    if not (folder / kind).is_dir():
        return
    for path in sorted((folder / kind).iterdir()):
        try:
            yield path.stem, _checked_table(path, kind)
        except _UnreadableError as fault:
            skipped.append(f"{kind}/{path.name}: {fault}")


def _long_tables(folder: Path, kind: str, rows: Mapping[str, Any], skipped: list[str]) -> list[Any]:
    """The curves or profiles that were written together with the rows given."""
    tables = []
    for trial_id, table in _tables(folder, kind, skipped):
        if trial_id not in rows:
            skipped.append(f"{kind}/{trial_id}.parquet: its trial has no row")
        elif _write_id(table) != _write_id(rows[trial_id]):
            skipped.append(f"{kind}/{trial_id}.parquet: belongs to another attempt than its trial's row")
        else:
            tables.append(table)
    return tables


def _frame(kind: str, tables: Sequence[Any]) -> pd.DataFrame:
    schema = SCHEMAS[kind]
    plain = [table.replace_schema_metadata(schema.metadata) for table in tables]
    frame: pd.DataFrame = pa.concat_tables([schema.empty_table(), *plain]).to_pandas()
    return frame


# --- The documents beside the tables ----------------------------------------------------------------------------------

# A type: a value of it. A pattern: text that it matches whole. [shape]: a list of such. {pattern: shape}: an object
# whose values fit where their names match. {name: shape}: an object that may have these, and others as well.
_TEXT, _NUMBER, _NAME, _SEED = (
    (str, type(None)),
    (int, float, type(None)),
    re.compile(r"(?s).*"),
    re.compile("-?[0-9]+"),
)

_VARIANT = {
    "name": str,
    "is_baseline": bool,
    "changes": dict,
    "groups": [str],
    "trials": {_SEED: _TRIAL_ID},
    "kv_cache_bytes_by_tokens": [[_NUMBER]],
    "kv_cache_bytes_by_devices": {re.compile("[0-9]+"): _NUMBER},
    "notes": [str],
}
_EXPERIMENT = {
    "name": _TEXT,
    "question": _TEXT,
    "command": _TEXT,
    "seeds": list,
    "counts": {_NAME: _NUMBER},
    "machine": {"workers": _NUMBER, "memory_bytes": _NUMBER},
    "data": {"train_tokens": _NUMBER, "validation_tokens": _NUMBER},
    "train": dict,
    "timing": {"timing_id": _TRIAL_ID, "members": {_TRIAL_ID: str}},
    "variants": [_VARIANT],
    "invalid": [{"variant": str, "reason": str}],
}
_MLFLOW = {"experiment_id": str, "runs": {_TRIAL_ID: str}}


def _read_json(path: Path, shape: Mapping[str, Any], required: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The object in `path`: what a reader relies on is as declared. `required` names what objects must have."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
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
    repeats: pd.DataFrame = field(default_factory=lambda: _frame("repeats", []))


class Store:
    """The folder of one experiment's results."""

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        self.folder = Path(folder)
        if create:
            for part in (*SCHEMAS, "logs"):
                (self.folder / part).mkdir(parents=True, exist_ok=True)

    def log_path(self, trial_id: str) -> Path:
        """Where the output of a trial's process goes."""
        return self.folder / "logs" / f"{_checked_id(trial_id)}.log"

    def write_trial(self, row: Mapping[str, Any], curves: Columns, profiles: Columns) -> None:
        """Stores one trial whole, in place of what was there. The row comes last: it says that all is there."""
        trial_id = _checked_id(row.get("trial_id"))
        _check_row(row)
        write_id = uuid.uuid4().hex
        tables = {
            "curves": _long_table(CURVES, trial_id, curves, write_id),
            "profiles": _long_table(PROFILES, trial_id, profiles, write_id),
            "trials": _table(TRIALS, {name: [value] for name, value in row.items()}, 1, write_id),
        }
        for kind, table in tables.items():
            _write_table(self._path(kind, trial_id), table)

    def write_round(self, timing_id: str, number: int, columns: Columns) -> None:
        """Stores one round whole, in place of what was there."""
        rows = len(next(iter(columns.values())))
        identity: dict[str, list[Any]] = {"timing_id": [_checked_id(timing_id)] * rows, "round": [number] * rows}
        table = _table(REPEATS, {**columns, **identity}, rows, uuid.uuid4().hex)
        _write_table(self._path("repeats", f"{timing_id}-{number}"), table)

    def rounds(self, timing_id: str) -> list[dict[str, Any]]:
        """The rows of the readable rounds that are stored under the identity."""
        paths = sorted((self.folder / "repeats").glob(f"{_checked_id(timing_id)}-*.parquet"))
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
        belongs = row is not None and table is not None and _write_id(row) == _write_id(table)
        return _frame(kind, [table] if belongs else [])

    def _stored(self, kind: str, trial_id: str) -> Any | None:
        return self._readable(self._path(kind, _checked_id(trial_id)), kind)

    def _readable(self, path: Path, kind: str) -> Any | None:
        try:
            return _checked_table(path, kind)
        except _UnreadableError:
            return None

    def _path(self, kind: str, name: str) -> Path:
        return self.folder / kind / f"{name}.parquet"

    def write_experiment(self, document: Mapping[str, Any]) -> None:
        """Stores what the experiment is now: its resolved file, its variants and their trials."""
        _write_json(self.folder / "experiment.json", document)

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
            return _read_json(path, _EXPERIMENT, {"variants": ["name"], "invalid": ["variant", "reason"]})
        except FileNotFoundError as error:
            raise ResultsError(f"no experiment.json in {self.folder}") from error
        except (OSError, TypeError, ValueError) as error:
            raise ResultsError(f"{path} cannot be read: {error}") from error

    def write_mlflow(self, document: Mapping[str, Any]) -> None:
        """Stores where the experiment is mirrored."""
        _write_json(self.folder / "mlflow.json", document)

    def mlflow(self) -> dict[str, Any] | None:
        """Where the present experiment's trials are mirrored, or None: the mirror can always be made again."""
        try:
            noted = _read_json(self.folder / "mlflow.json", _MLFLOW, {"": list(_MLFLOW)})
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
        trials = _frame("trials", list(rows.values()))
        if experiment:
            trials = _as_named_now(trials, experiment)
        else:
            trials = trials.sort_values(["variant", "seed", "trial_id"], ignore_index=True)
        return Results(
            folder=self.folder,
            experiment=experiment,
            trials=trials,
            curves=_of_trials(_frame("curves", curves), trials),
            profiles=_of_trials(_frame("profiles", profiles), trials),
            skipped=skipped,
            repeats=_rounds_of(_frame("repeats", rounds), experiment),
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
