"""One Parquet file of the record: written with all columns of its declared schema, read without trusting it.

Nothing is inferred and nothing is dropped on the way in; what cannot be read says why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ablate.files import write_atomically
from ablate.schema import RENAMED, SCHEMA_VERSION, SCHEMAS

Columns = Mapping[str, Sequence[Any]]


class ResultsError(ValueError):
    """Results that are not there, or that would not come back as they were given."""


TRIAL_ID = re.compile(r"[0-9a-f]{1,64}")
_ROUND = re.compile(r"[0-9a-f]{1,64}-[0-9]{1,9}")


def checked_id(trial_id: object) -> str:
    """File names come from trial ids, so that an id must not be able to name another place."""
    if not isinstance(trial_id, str) or not TRIAL_ID.fullmatch(trial_id):
        raise ResultsError(f"not a trial id (lower-case hex digits): {trial_id!r}")
    return trial_id


# Compact for long tables, and plain to every reader: only the strings are worth a dictionary.
_ENCODINGS = {
    **dict.fromkeys(("step", "tokens", "sample", "round", "place"), "DELTA_BINARY_PACKED"),
    "value": "BYTE_STREAM_SPLIT",
}


# --- Writing ----------------------------------------------------------------------------------------------------------


def write_table(path: Path, table: Any) -> None:
    """The file holds all of the table, or what it held before."""
    strings = [each.name for each in table.schema if each.type == pa.string()]
    encodings = {name: encoding for name, encoding in _ENCODINGS.items() if name in table.column_names}
    write_atomically(
        path,
        lambda file: pq.write_table(table, file, compression="zstd", use_dictionary=strings, column_encoding=encodings),
    )


def build_table(schema: Any, columns: Columns, rows: int, write_id: str) -> Any:
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


def build_long_table(schema: Any, trial_id: str, columns: Columns, write_id: str) -> Any:
    """As `build_table`, of curves or profiles of one trial."""
    rows = len(next(iter(columns.values()))) if columns else 0
    ids = columns.get("trial_id", [trial_id] * rows)
    if any(each != trial_id for each in ids):
        raise ResultsError(f"rows of another trial among those of {trial_id}")
    return build_table(schema, {**columns, "trial_id": ids}, rows, write_id)


# --- Reading ----------------------------------------------------------------------------------------------------------


class UnreadableError(Exception):
    """Why one file does not count."""


def _read(path: Path, kind: str) -> Any:
    """The table in `path` with the columns of today: those it lacks are null."""
    if path.stat().st_size == 0:
        raise UnreadableError("zero bytes")
    try:
        table = pq.ParquetFile(path).read()
    except PermissionError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadableError("torn, or not a Parquet file") from error
    _check_origin(table.schema.metadata or {}, kind)
    return _conform(_renamed(table), SCHEMAS[kind])


def _check_origin(metadata: Mapping[bytes, bytes], kind: str) -> None:
    version = metadata.get(b"schema_version", b"").decode(errors="replace")
    if metadata.get(b"ablate_table") != kind.encode() or not version.isdecimal():
        raise UnreadableError(f"not written as a file of {kind} by ablate")
    if int(version) > SCHEMA_VERSION:
        raise UnreadableError(f"written by a newer ablate (schema {version}, this one knows {SCHEMA_VERSION})")


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
        raise UnreadableError(f"a column has another type: {error}") from error
    write_id = (table.schema.metadata or {}).get(b"write_id", b"")
    return pa.Table.from_arrays(arrays, schema=schema.with_metadata({**schema.metadata, b"write_id": write_id}))


def read_table(path: Path, kind: str) -> Any:
    """The table of one trial's or round's file, which must be about the one that its name says."""
    if path.name.startswith((".", "_")) or path.suffix == ".tmp":
        raise UnreadableError("left over from a write that did not finish")
    name = _ROUND if kind == "repeats" else TRIAL_ID
    if path.suffix != ".parquet" or not name.fullmatch(path.stem) or not path.is_file():
        raise UnreadableError("not a file of ablate")
    try:
        table = _read(path, kind)
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from error
    if any(each != path.stem for each in _names_of_file(table, kind)):
        raise UnreadableError(f"is about another {'round' if kind == 'repeats' else 'trial'} than its name says")
    if kind == "trials" and len(table) != 1:
        raise UnreadableError(f"has {len(table)} rows where one is due")
    return table


def _names_of_file(table: Any, kind: str) -> list[str]:
    """What the file that a row stands in must be called, for each row."""
    if kind != "repeats":
        names: list[str] = table.column("trial_id").to_pylist()
        return names
    ids, rounds = (table.column(name).to_pylist() for name in ("timing_id", "round"))
    return [f"{timing_id}-{number}" for timing_id, number in zip(ids, rounds, strict=True)]


def write_id_of(table: Any) -> bytes:
    """What files have in common that were written together."""
    written: bytes = table.schema.metadata[b"write_id"]
    return written


def frame_of(kind: str, tables: Sequence[Any]) -> pd.DataFrame:
    """The rows of all tables, with the types of the schema."""
    schema = SCHEMAS[kind]
    plain = [table.replace_schema_metadata(schema.metadata) for table in tables]
    frame: pd.DataFrame = pa.concat_tables([schema.empty_table(), *plain]).to_pandas()
    return frame
