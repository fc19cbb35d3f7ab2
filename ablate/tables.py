"""One Parquet file of the record: written with all columns of its declared schema, read without trusting it.

Nothing is inferred and nothing is dropped on the way in; what cannot be read says why. Each file holds the checksum of
all its bytes but those of the checksum, and each page its own, which other readers know to check.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ablate.files import check_fits, read_whole, write_bytes
from ablate.schema import JSON_COLUMNS, RENAMED, REQUIRED, SCHEMA_VERSION, SCHEMAS, STATUSES
from ablate.sealed import refuse_constant

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
    # Something that stands nowhere else in the file keeps the place of the checksum until all the rest is known.
    place = _SEAL + (uuid.uuid4().hex + uuid.uuid4().hex).encode()
    content = io.BytesIO()
    pq.write_table(
        table.replace_schema_metadata({**table.schema.metadata, b"checksum": place}),
        content,
        compression="zstd",
        use_dictionary=strings,
        column_encoding=encodings,
        write_page_checksum=True,
    )
    write_bytes(path, _sealed(content.getvalue()))


_SEAL = b"ablate-sha256:"
_SEALED = re.compile(_SEAL + rb"([0-9a-f]{64})")
_SEALED_SINCE = 3


def _sealed(content: bytes) -> bytes:
    start = content.rindex(_SEAL) + len(_SEAL)
    return content[:start] + _checksum(content, start).encode() + content[start + 64 :]


def _checksum(content: bytes, start: int) -> str:
    """Of all but the 64 bytes from `start`, where the checksum stands itself."""
    found = hashlib.sha256(memoryview(content)[:start])
    found.update(memoryview(content)[start + 64 :])
    return found.hexdigest()


def build_table(schema: Any, columns: Columns, rows: int, write_id: str) -> Any:
    """All columns of `schema` from those given; the rest null. Nothing is inferred and nothing is dropped."""
    unknown = sorted(set(columns) - set(schema.names))
    if unknown:
        kind = schema.metadata[b"ablate_table"].decode()
        raise ResultsError(f"unknown column in {kind}: {', '.join(unknown)}")
    arrays = [_array(each, columns.get(each.name), rows) for each in schema]
    table = pa.Table.from_arrays(arrays, schema=schema.with_metadata({**schema.metadata, b"write_id": write_id}))
    try:
        check_rows(table, schema.metadata[b"ablate_table"].decode())
    except UnreadableError as error:
        raise ResultsError(f"nobody would read this back: {error}") from error
    return table


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


_BROKEN = (pa.ArrowException, OSError, ValueError, KeyError, MemoryError)
"""What pyarrow says of bytes that are not what they should be."""


def _read(path: Path, kind: str) -> Any:
    """The table in `path` with the columns of today: those it lacks are null."""
    content = read_whole(path)
    if not content:
        raise UnreadableError("zero bytes")
    has_seal = _check_seal(content)
    try:
        file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
        metadata = file.metadata.metadata or {}
    except _BROKEN as error:
        raise UnreadableError("torn, or not a Parquet file") from error
    _check_origin(metadata, kind)
    if not has_seal and int(metadata[b"schema_version"]) >= _SEALED_SINCE:
        raise UnreadableError("damaged: it has lost its checksum")
    check_fits(file.metadata.num_rows * file.metadata.num_columns * 8, path)
    try:
        table = file.read(use_threads=False)  # for small files threads only wait for each other
        table.validate(full=True)
    except _BROKEN as error:
        raise UnreadableError("torn, or not a Parquet file") from error
    return _conform(_renamed(table, int(metadata[b"schema_version"])), SCHEMAS[kind], metadata)


def _check_seal(content: bytes) -> bool:
    """Whether there is a checksum. Before anything else is made of the bytes, which may be anything."""
    found = content.rfind(_SEAL)
    seal = _SEALED.match(content, found) if found >= 0 else None
    if seal is None:
        return False
    if _checksum(content, seal.start(1)) != seal[1].decode():
        raise UnreadableError("torn or damaged: its checksum is not that of what it holds")
    return True


def is_sealed(table: Any) -> bool:
    """Whether the file that it was read from holds a checksum: older ones do not."""
    return bool(table.schema.metadata[b"checksum"])


def _check_origin(metadata: Mapping[bytes, bytes], kind: str) -> None:
    version = metadata.get(b"schema_version", b"").decode(errors="replace")
    if metadata.get(b"ablate_table") != kind.encode() or not re.fullmatch("[0-9]{1,9}", version):
        raise UnreadableError(f"not written as a file of {kind} by ablate")
    if int(version) > SCHEMA_VERSION:
        raise UnreadableError(f"written by a newer ablate (schema {version}, this one knows {SCHEMA_VERSION})")


def _renamed(table: Any, version: int) -> Any:
    present = set(table.column_names)
    older = [renames for last, renames in RENAMED.items() if version <= last]
    names = {old: new for renames in older for old, new in renames.items() if new not in present}
    return table.rename_columns([names.get(name, name) for name in table.column_names])


def _conform(table: Any, schema: Any, metadata: Mapping[bytes, bytes]) -> Any:
    present = set(table.column_names)
    try:
        arrays = [
            table.column(each.name).cast(each.type) if each.name in present else pa.nulls(len(table), each.type)
            for each in schema
        ]
    except (pa.ArrowException, KeyError) as error:
        raise UnreadableError(f"a column has another type, or is there twice: {error}") from error
    kept = {name: metadata.get(name, b"") for name in (b"write_id", b"checksum", _PARTS)}
    return pa.Table.from_arrays(arrays, schema=schema.with_metadata({**schema.metadata, **kept}))


def check_rows(table: Any, kind: str) -> None:
    """Raises `UnreadableError` where a row does not say what it is about, or not in words that a reader knows."""
    if empty := [name for name in REQUIRED[kind] if table.column(name).null_count]:
        raise UnreadableError(f"rows without {', '.join(empty)}")
    if read := _READ_AS.get(kind):
        for row in _plain_rows(table.select(read)):
            _check_row(row, kind)


_READ_AS = {
    "trials": ["status", "started_at", "log", *JSON_COLUMNS],
    "repeats": ["status", "started_at", "variant_id", "metric", "value"],
}
"""Columns whose values can be something that no reader can use."""


def _plain_rows(table: Any) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = table.to_pylist()
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise UnreadableError(f"a value that nothing can be made of: {error}") from error
    return rows


def _check_row(row: Mapping[str, Any], kind: str) -> None:
    if row["status"] not in STATUSES:
        raise UnreadableError(f"unknown status: {row['status']!r}")
    if kind == "repeats":
        if not TRIAL_ID.fullmatch(row["variant_id"]):
            raise UnreadableError(f"not the id of a variant: {row['variant_id']!r}")
        if row["status"] == "ok" and None in (row["metric"], row["value"]):
            raise UnreadableError("rows without metric or value")
        return
    if row["log"] is not None and (PurePosixPath(row["log"]).is_absolute() or ".." in PurePosixPath(row["log"]).parts):
        raise UnreadableError(f"log is outside the experiment's folder: {row['log']}")
    for column in JSON_COLUMNS:
        if row[column] is not None:
            _check_json(column, row[column])


def _check_json(column: str, text: str) -> None:
    try:
        told = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"column {column} is not strict JSON text: {error}") from error
    if not isinstance(told, dict):
        raise UnreadableError(f"column {column} is not an object")


def read_table(path: Path, kind: str) -> Any:
    """The table of one trial's or round's file, which must be about the one that its name says.

    Raises `FileNotFoundError` where there is none, and `UnreadableError` where it does not count.
    """
    if path.name.startswith((".", "_")) or path.suffix == ".tmp":
        raise UnreadableError("left over from a write that did not finish")
    name = _ROUND if kind == "repeats" else TRIAL_ID
    if path.suffix != ".parquet" or not name.fullmatch(path.stem):
        raise UnreadableError("not a file of ablate")
    table = _read_file(path, kind)
    if any(each != path.stem for each in _names_of_file(table, kind)):
        raise UnreadableError(f"is about another {'round' if kind == 'repeats' else 'trial'} than its name says")
    if kind == "trials" and len(table) != 1:
        raise UnreadableError(f"has {len(table)} rows where one is due")
    return table


def _read_file(path: Path, kind: str) -> Any:
    try:
        if path.exists() and not path.is_file():
            raise UnreadableError("not a file of ablate")
        table = _read(path, kind)
    except FileNotFoundError:
        if path.is_symlink():
            raise UnreadableError("a link that leads nowhere") from None
        raise
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from error
    check_rows(table, kind)
    return table


def _names_of_file(table: Any, kind: str) -> list[str]:
    """What the file that a row stands in must be called, for each row."""
    if kind != "repeats":
        names: list[str] = table.column("trial_id").to_pylist()
        return names
    ids, rounds = (table.column(name).to_pylist() for name in ("timing_id", "round"))
    return [f"{timing_id}-{number}" for timing_id, number in zip(ids, rounds, strict=True)]


# --- Many files in one ------------------------------------------------------------------------------------------------

_PARTS = b"parts"
"""Says in a file that stands for many which they were: {name: [write id, rows]}, in the order of its rows."""


@dataclass(frozen=True)
class Part:
    """What was a file of its own: when it was written, and where its rows are now."""

    write_id: bytes
    start: int
    rows: int


@dataclass(frozen=True)
class Packed:
    """The rows of many files."""

    table: Any
    parts: Mapping[str, Part]

    def part(self, name: str) -> Any:
        """The table that was in the file of that name."""
        part = self.parts[name]
        return _with_write_id(self.table.slice(part.start, part.rows), part.write_id)

    def only(self, names: set[str]) -> Any:
        """The rows of these."""
        if names >= self.parts.keys():
            return self.table
        return self.table.filter(
            pa.array([name in names for name, part in self.parts.items() for _ in range(part.rows)])
        )


def _spread(parts: Mapping[str, Part]) -> list[str]:
    """The name of each row's part."""
    return [name for name, part in parts.items() for _ in range(part.rows)]


def _with_write_id(table: Any, write_id: bytes) -> Any:
    return table.replace_schema_metadata({**table.schema.metadata, b"write_id": write_id})


def pack(kind: str, tables: Mapping[str, Any]) -> Any:
    """One table of those that are in the files of these names."""
    schema = SCHEMAS[kind]
    parts = {name: [write_id_of(table).decode(errors="replace"), len(table)] for name, table in sorted(tables.items())}
    plain = [tables[name].replace_schema_metadata(schema.metadata) for name in parts]
    together = pa.concat_tables([schema.empty_table(), *plain]).combine_chunks()
    return together.replace_schema_metadata({**schema.metadata, b"write_id": b"", _PARTS: json.dumps(parts).encode()})


def read_packed(path: Path, kind: str) -> Packed:
    """Raises what `read_table` raises."""
    table = _read_file(path, kind)
    parts = dict(_parts(table.schema.metadata[_PARTS]))
    names = _spread(parts)
    known = _ROUND if kind == "repeats" else TRIAL_ID
    if names != _names_of_file(table, kind) or not all(map(known.fullmatch, parts)):
        raise UnreadableError("does not hold what it says it holds")
    if kind == "trials" and any(part.rows != 1 for part in parts.values()):
        raise UnreadableError("does not have one row a trial")
    return Packed(table, parts)


def _parts(told: bytes) -> Iterator[tuple[str, Part]]:
    start = 0
    try:
        for name, (write_id, rows) in json.loads(told).items():
            yield name, Part(write_id.encode(), start, int(rows))
            start += int(rows)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableError("does not say which files it stands for") from error


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
