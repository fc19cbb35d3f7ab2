"""Damage to what is stored is found: a changed bit anywhere, rows that are about nothing, what is no file at all."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Expand
from stored import CURVE, PROFILE, ROUND, frames, row

from ablate.compact import compact
from ablate.documents import MLFLOW, read_json
from ablate.results import Store, load
from ablate.schema import CURVES, PROFILES, REPEATS, SCHEMAS, TRIALS
from ablate.sealed import read_sealed, write_sealed
from ablate.tables import ResultsError, UnreadableError, read_packed, read_table
from ablate.tasks import PHASES, tasks

FLIPS = 100


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "x", create=True)
    store.write_trial(row("a1", val_loss=1.5, config='{"d_model": 8}', log="logs/a1.log"), CURVE, PROFILE)
    store.write_trial(row("a2", seed=1, val_loss=2.5), CURVE, PROFILE)
    store.write_round("ab", 0, ROUND)
    return store


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def bits(content: bytes) -> list[int]:
    """Some of the whole file, and some of its end, where it says what it is."""
    chosen, size = random.Random(5), len(content) * 8
    return [chosen.randrange(size) for _ in range(FLIPS)] + [
        chosen.randrange(max(0, size - 2000), size) for _ in range(50)
    ]


@pytest.mark.parametrize("name", ["trials/a1", "curves/a1", "profiles/a1", "repeats/ab-0", "trials/compacted"])
def test_a_changed_bit_is_found_wherever_it_is(name: str, store: Store) -> None:
    if name.endswith("compacted"):
        compact(store)
    path = store.folder / f"{name}.parquet"
    whole = path.read_bytes()
    read = read_packed if name.endswith("compacted") else read_table
    for bit in bits(whole):
        path.write_bytes(flipped(whole, bit))
        with pytest.raises(UnreadableError):
            read(path, path.parent.name)
    assert [each for each in Store(store.folder).load().skipped if each.startswith(f"{name}.parquet: ")]
    path.write_bytes(whole)
    assert Store(store.folder).load().skipped == []


def test_a_changed_bit_in_a_document_is_found_or_says_nothing_else(tmp_path: Path) -> None:
    path, document = tmp_path / "mlflow.json", {"experiment_id": "1", "runs": {"a1": "r1", "a2": "é"}}
    write_sealed(path, document)
    whole, found = path.read_bytes(), 0
    for bit in range(len(whole) * 8):
        path.write_bytes(flipped(whole, bit))
        try:
            assert read_sealed(path) == document
        except ValueError:
            found += 1
    assert found > 0.8 * len(whole) * 8  # a blank may become another blank


def test_a_document_says_its_checksum_last_and_in_one_line(store: Store) -> None:
    store.write_experiment({"name": "x", "variants": []})
    told = (store.folder / "experiment.json").read_text(encoding="utf-8").splitlines()
    assert told[-2].startswith('  "checksum": "sha256:')
    assert store.experiment() == {"name": "x", "variants": []}
    (store.folder / "experiment.json").write_text('{"name": "y"}', encoding="utf-8")
    assert store.experiment() == {"name": "y"}, "older documents have none"


def test_a_file_from_before_there_were_checksums_still_reads(store: Store) -> None:
    before = frames(store)
    for kind, schema in SCHEMAS.items():
        for path in (store.folder / kind).iterdir():
            table = pq.ParquetFile(path).read()
            metadata = {**table.schema.metadata, b"schema_version": b"2"}
            del metadata[b"checksum"]
            assert table.schema.names == schema.names
            pq.write_table(table.replace_schema_metadata(metadata), path)
    assert store.load().skipped == []
    for kind, frame in frames(store).items():
        pd.testing.assert_frame_equal(frame, before[kind])


def test_a_file_of_today_without_its_checksum_does_not_count(store: Store) -> None:
    path = store.folder / "trials/a1.parquet"
    table = pq.ParquetFile(path).read()
    metadata = {name: value for name, value in table.schema.metadata.items() if name != b"checksum"}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    assert "lost its checksum" in store.load().skipped[0]


def test_other_readers_can_check_the_pages(store: Store) -> None:
    path = store.folder / "curves/a1.parquet"
    content = path.read_bytes()
    column = pq.ParquetFile(path).metadata.row_group(0).column(5)
    last = column.data_page_offset + column.total_compressed_size - 1
    path.write_bytes(flipped(content, last * 8))
    with pytest.raises(OSError, match="CRC"):
        pq.ParquetFile(path, page_checksum_verification=True).read()


# --- Rows that are about nothing --------------------------------------------------------------------------------------


def rewrite(path: Path, schema: Any, **columns: Any) -> None:
    """As an older ablate, or another program, could have written it: no checksum, any value."""
    table = pq.ParquetFile(path).read()
    for name, value in columns.items():
        kind = schema.field(name).type if value is None else None
        array = pa.array([value] * len(table), kind)
        table = table.set_column(schema.names.index(name), name, array)
    pq.write_table(table.replace_schema_metadata({**schema.metadata, b"schema_version": b"2", b"write_id": b""}), path)


@pytest.mark.parametrize(
    ("name", "schema", "columns"),
    [
        *(("trials/a1", TRIALS, {name: None}) for name in ("trial_id", "variant", "seed", "status")),
        ("trials/a1", TRIALS, {"status": "finished"}),
        ("trials/a1", TRIALS, {"config": "{'d_model': 8}"}),
        ("trials/a1", TRIALS, {"kernels": "[1]"}),
        ("trials/a1", TRIALS, {"config": "[" * 100_000}),
        ("trials/a1", TRIALS, {"seed": "many"}),
        ("trials/a1", TRIALS, {"log": "../../etc/passwd"}),
        ("trials/a1", TRIALS, {"log": "/etc/passwd"}),
        *(("curves/a1", CURVES, {name: None}) for name in ("trial_id", "step", "split", "metric")),
        *(("profiles/a1", PROFILES, {name: None}) for name in ("trial_id", "phase", "metric")),
        *(
            ("repeats/ab-0", REPEATS, {name: None})
            for name in ("timing_id", "variant_id", "variant", "is_partner", "round", "place", "status", "metric")
        ),
        ("repeats/ab-0", REPEATS, {"variant_id": "../a1"}),
        ("repeats/ab-0", REPEATS, {"status": "fine"}),
        ("repeats/ab-0", REPEATS, {"round": 7}),
    ],
)
def test_a_row_that_is_about_nothing_does_not_count(
    name: str, schema: Any, columns: dict[str, Any], store: Store
) -> None:
    rewrite(store.folder / f"{name}.parquet", schema, **columns)
    loaded = store.load()
    assert [each for each in loaded.skipped if each.startswith(f"{name}.parquet: ")]
    kind, _, stem = name.partition("/")
    frame = getattr(loaded, kind)
    assert stem not in set(frame["trial_id" if kind != "repeats" else "timing_id"])
    assert kind != "trials" or store.trial(stem) is None
    assert kind != "repeats" or store.rounds("ab") == []


@pytest.mark.parametrize("column", ["step", "split", "metric"])
def test_what_would_not_count_is_not_written(column: str, store: Store) -> None:
    with pytest.raises(ResultsError, match=column):
        store.write_trial(row("a3"), {**CURVE, column: [None, None]}, {})


# --- What is no file of ours ------------------------------------------------------------------------------------------


def folder(path: Path, _: Path) -> None:
    path.mkdir()


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def dangling(path: Path, _: Path) -> None:
    path.symlink_to("nowhere.parquet")


def circle(path: Path, _: Path) -> None:
    path.symlink_to(path.name)


def device(path: Path, _: Path) -> None:
    path.symlink_to("/dev/zero")


def twice(path: Path, whole: Path) -> None:
    table = pq.ParquetFile(whole).read()
    pq.write_table(
        table.append_column("seed", table["seed"]).replace_schema_metadata(
            {**TRIALS.metadata, b"schema_version": b"2"}
        ),
        path,
    )


def of_a_version(version: bytes) -> Callable[[Path, Path], None]:
    def write(path: Path, whole: Path) -> None:
        table = pq.ParquetFile(whole).read()
        pq.write_table(table.replace_schema_metadata({**TRIALS.metadata, b"schema_version": version}), path)

    return write


@pytest.mark.parametrize(
    "make",
    [
        *(folder, pipe, dangling, circle, device, twice),
        *map(of_a_version, (b"999", b"", b"two", b"9" * 5000, b"-1", b"\xff", "²".encode())),
    ],
)
def test_what_is_no_file_of_ours_is_named_and_left_out(make: Callable[[Path, Path], None], store: Store) -> None:
    (store.folder / "trials/b1.parquet").unlink(missing_ok=True)
    make(store.folder / "trials/b1.parquet", store.folder / "trials/a1.parquet")
    loaded = store.load()
    assert loaded.trials["trial_id"].tolist() == ["a1", "a2"]
    assert [each.split(": ")[0] for each in loaded.skipped] == ["trials/b1.parquet"]
    assert store.trial("b1") is None


def test_a_row_behind_a_link_counts(store: Store) -> None:
    path = store.folder / "trials/a1.parquet"
    path.rename(store.folder.parent / "elsewhere")
    path.symlink_to(store.folder.parent / "elsewhere")
    assert store.load().skipped == []
    assert len(store.load().trials) == 2


def test_a_file_in_the_place_of_a_folder_is_named(store: Store) -> None:
    (store.folder / "repeats/ab-0.parquet").unlink()
    (store.folder / "repeats").rmdir()
    (store.folder / "repeats").write_text("", encoding="utf-8")
    assert store.load().skipped == ["repeats: the folder cannot be read: Not a directory"]


def test_a_name_that_is_no_text_can_be_told(store: Store) -> None:
    os.close(os.open(os.fsencode(store.folder) + b"/trials/\xff.parquet", os.O_CREAT))
    "".join(store.load().skipped).encode("utf-8")


def test_what_does_not_fit_into_memory_is_not_read(store: Store) -> None:
    with (store.folder / "trials/b1.parquet").open("wb") as file:
        file.truncate(2**40)
    with (store.folder / "mlflow.json").open("wb") as file:
        file.truncate(2**40)
    assert "too large" in store.load().skipped[0]
    assert store.mlflow() is None


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "null", '{"experiment_id": "1", "runs": NaN}', "\x00", ""])
def test_a_document_that_is_none_is_none(text: str, store: Store) -> None:
    for name in ("mlflow.json", "experiment.json"):
        (store.folder / name).write_text(text, encoding="utf-8")
    assert store.mlflow() is None
    assert store.load().skipped[0].startswith("experiment.json: ")
    with pytest.raises((ValueError, TypeError)):
        read_json(store.folder / "mlflow.json", MLFLOW, {})


@pytest.mark.parametrize("make", [folder, pipe, dangling, circle])
def test_what_stands_in_the_place_of_a_document_is_named(make: Callable[[Path, Path], None], store: Store) -> None:
    make(store.folder / "experiment.json", store.folder)
    loaded = load(store.folder)
    assert [each.split(":")[0] for each in loaded.skipped] == ["experiment.json"]
    assert len(loaded.trials) == 2
    json.dumps(loaded.skipped)


# --- What is done about it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["trials", "curves", "profiles"])
@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"torn")])
def test_a_trial_of_which_something_cannot_be_read_is_done_again(
    kind: str, damage: Callable[[Path], object], expand: Expand, store: Store
) -> None:
    trial = expand().trials("cpu", 1)[0]
    whole = row(trial.trial_id, profile_id=trial.profile_id, steps=4, attempts=1)
    store.write_trial(whole, CURVE, PROFILE)
    assert tasks([trial], store, retry_failed=False) == []
    damage(store.shelves[kind].path(trial.trial_id))
    (task,) = tasks([trial], store, retry_failed=False)
    assert (task.phases, task.kept) == (PHASES, {})
