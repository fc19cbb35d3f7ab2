"""The record survives what happens to files: kills, foreign files, old schemas, readers while it is written."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ablate import shelf
from ablate.results import Store, load
from ablate.schema import CURVES, SCHEMA_VERSION, TRIALS
from ablate.tables import ResultsError, write_table

CURVE: dict[str, list[Any]] = {
    "step": [1, 2],
    "tokens": [64, 128],
    "split": ["val"] * 2,
    "metric": ["loss"] * 2,
    "value": [2.5, math.nan],
}
PROFILE: dict[str, list[Any]] = {
    "phase": ["decode"],
    "batch": [1],
    "context": [64],
    "metric": ["tokens_per_second"],
    "value": [100.0],
}


def row(trial_id: str, **columns: Any) -> dict[str, Any]:
    return {"trial_id": trial_id, "variant": "baseline", "seed": 0, "status": "ok", **columns}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    # The name looks like a partition of a data set, which must not become a column.
    return Store(tmp_path / "n_layers=2", create=True)


def test_a_row_comes_back_as_it_was_given(store: Store) -> None:
    started = datetime(2026, 5, 4, 3, 2, 1, 123456, tzinfo=UTC)
    given = row(
        "a1",
        val_loss=math.nan,
        train_loss=math.inf,
        params_total=2**53 + 1,
        steps=None,
        started_at=started,
        config="{}",
    )
    store.write_trial(given, CURVE, PROFILE)
    stored = store.trial("a1")
    assert stored is not None
    assert set(stored) == set(TRIALS.names)
    assert math.isnan(stored.pop("val_loss"))
    given.pop("val_loss")
    assert {name: value for name, value in stored.items() if value is not None} == {
        name: value for name, value in given.items() if value is not None
    }
    assert type(stored["params_total"]) is int


def test_nan_and_null_stay_apart_in_the_file(store: Store) -> None:
    store.write_trial(row("a1", val_loss=math.nan, train_loss=None), CURVE, {})
    table = pq.ParquetFile(store.folder / "trials" / "a1.parquet").read()
    assert table["val_loss"].null_count == 0
    assert table["train_loss"].null_count == 1
    assert pq.ParquetFile(store.folder / "curves" / "a1.parquet").read()["value"].null_count == 0


def test_pandas_reads_the_folder_itself(store: Store) -> None:
    store.write_trial(row("a1", seed=0), CURVE, {})
    store.write_trial(row("a2", seed=1, kv_cache_bytes_per_token=2**53 + 1, deterministic=True), CURVE, {})
    frame = pd.read_parquet(store.folder / "trials")
    assert len(frame) == 2
    assert list(frame.columns) == TRIALS.names
    assert str(frame["kv_cache_bytes_per_token"].dtype) == "Int64"
    assert frame["kv_cache_bytes_per_token"].tolist() == [pd.NA, 2**53 + 1]
    assert str(frame["deterministic"].dtype) == "boolean"
    assert str(frame["started_at"].dtype) == "datetime64[us, UTC]"
    assert pd.api.types.is_string_dtype(frame["variant"])


def test_files_hold_plain_types_and_name_their_schema(store: Store) -> None:
    store.write_trial(row("a1"), CURVE, PROFILE)
    for kind in ("trials", "curves", "profiles"):
        schema = pq.read_schema(store.folder / kind / "a1.parquet")
        assert schema.metadata[b"schema_version"] == str(SCHEMA_VERSION).encode()
        assert not [each for each in schema.types if pa.types.is_dictionary(each) or pa.types.is_nested(each)]


def test_load_gives_frames_with_whole_numbers(store: Store) -> None:
    store.write_trial(row("a1"), CURVE, PROFILE)
    loaded = load(store.folder)
    assert loaded.skipped == []
    assert str(loaded.trials["params_total"].dtype) == "Int64"
    assert loaded.curves["step"].tolist() == [1, 2]
    assert loaded.curves["trial_id"].tolist() == ["a1", "a1"]
    assert loaded.profiles["spread"].isna().all()


def test_load_of_an_empty_store_has_all_columns(store: Store) -> None:
    loaded = store.load()
    assert list(loaded.trials.columns) == TRIALS.names
    assert list(loaded.curves.columns) == CURVES.names
    assert len(loaded.trials) == 0


def test_load_says_where_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no results in"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"vall_loss": 1.0}, "vall_loss"),
        ({"params_total": 8.5}, "params_total"),
        ({"params_total": True}, "params_total"),
        ({"params_total": "8"}, "params_total"),
        ({"params_total": 2**70}, "params_total"),
        ({"val_loss": "low"}, "val_loss"),
        ({"val_loss": True}, "val_loss"),
        ({"config": {"d_model": 8}}, "config"),
        ({"config": "{'d_model': 8}"}, "config"),
        ({"module_metrics": '{"entropy": NaN}'}, "NaN"),
        ({"status": "finished"}, "finished"),
        ({"variant": None}, "variant"),
        ({"started_at": datetime(2026, 1, 1)}, "time zone"),
        ({"log": "../../etc/passwd"}, "outside"),
        ({"log": "/etc/passwd"}, "outside"),
    ],
)
def test_what_would_be_lost_or_bent_is_refused(store: Store, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ResultsError, match=message):
        store.write_trial(row("a1", **columns), CURVE, {})
    assert store.trial("a1") is None


@pytest.mark.parametrize(
    "curves",
    [{"stepp": [1]}, {"step": [1, 2], "value": [1.0]}, {"step": [1.5]}, {"trial_id": ["b2"], "step": [1]}],
)
def test_curves_that_do_not_fit_are_refused(store: Store, curves: dict[str, Any]) -> None:
    with pytest.raises(ResultsError):
        store.write_trial(row("a1"), curves, {})
    assert store.trial("a1") is None


@pytest.mark.parametrize("trial_id", ["", "../a1", "A1", "a1/b2", "a1.parquet", ".a1", "a" * 65, None, 7])
def test_an_id_cannot_leave_the_folder(store: Store, trial_id: Any) -> None:
    with pytest.raises(ResultsError, match="not a trial id"):
        store.write_trial(row(trial_id), CURVE, {})
    with pytest.raises(ResultsError, match="not a trial id"):
        store.log_path(trial_id)


def test_whole_numbers_given_as_floats_are_whole(store: Store) -> None:
    store.write_trial(row("a1", steps=8.0, flops_per_token=2**53 + 1), CURVE, {})
    stored = store.trial("a1")
    assert stored is not None
    assert repr(stored["steps"]) == "8"
    assert stored["flops_per_token"] == float(2**53 + 1)


def spoil(store: Store) -> dict[str, str]:
    """Puts files of all bad kinds beside the good ones; gives what each must be called."""
    trials, curves = store.folder / "trials", store.folder / "curves"
    whole = (trials / "a1.parquet").read_bytes()
    (trials / "b1.parquet").write_bytes(whole[:-5])
    (trials / "b2.parquet").write_bytes(b"")
    (trials / ".b3.parquet.77.tmp").write_bytes(whole[:100])
    (trials / "notes.txt").write_text("mine", encoding="utf-8")
    (trials / "b4.parquet").write_bytes(whole)
    (trials / "b5.parquet").mkdir()
    pq.write_table(pa.table({"trial_id": ["b6"]}), trials / "b6.parquet")
    (curves / "a1.parquet").write_bytes((curves / "a1.parquet").read_bytes()[:40])
    return {
        "trials/b1.parquet": "torn",
        "trials/b2.parquet": "zero bytes",
        "trials/.b3.parquet.77.tmp": "did not finish",
        "trials/notes.txt": "not a file of ablate",
        "trials/b4.parquet": "another trial",
        "trials/b5.parquet": "not a file of ablate",
        "trials/b6.parquet": "not written as a file of trials",
        "curves/a1.parquet": "torn",
    }


def test_bad_files_are_left_out_and_named(store: Store) -> None:
    store.write_trial(row("a1"), CURVE, {})
    store.write_trial(row("a2", seed=1), CURVE, {})
    expected = spoil(store)
    loaded = store.load()
    assert loaded.trials["trial_id"].tolist() == ["a1", "a2"]
    assert set(loaded.curves["trial_id"]) == {"a2"}
    reasons = dict(each.split(": ", 1) for each in loaded.skipped)
    assert reasons.keys() == expected.keys()
    assert [name for name, reason in expected.items() if reason not in reasons[name]] == []
    assert store.trial("b1") is None
    assert store.trial("b4") is None


def test_a_file_that_may_not_be_read_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_trial(row("a1"), CURVE, {})

    def refuse(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    # As root, who runs many a test, nothing is refused.
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "trials/a1.parquet: cannot be read: Permission denied" in store.load().skipped


def test_a_write_that_fails_leaves_the_old_row_and_no_litter(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_trial(row("a1", val_loss=1.0), CURVE, {})

    def full(_descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        store.write_trial(row("a1", val_loss=2.0), CURVE, {})
    stored = store.trial("a1")
    assert stored is not None
    assert stored["val_loss"] == 1.0
    assert store.load().skipped == []


def test_curves_of_another_attempt_are_not_shown_with_the_row(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_trial(row("a1", attempts=1), CURVE, {})
    written = []

    def stop_before_the_row(path: Path, table: Any) -> None:
        if path.parent.name == "trials":
            raise KeyboardInterrupt
        written.append(path)
        write(path, table)

    write = write_table
    monkeypatch.setattr(shelf, "write_table", stop_before_the_row)
    with pytest.raises(KeyboardInterrupt):
        store.write_trial(row("a1", attempts=2), {**CURVE, "value": [9.0, 9.0]}, {})
    assert len(written) == 2
    loaded = store.load()
    assert loaded.trials["attempts"].tolist() == [1]
    assert 9.0 not in loaded.curves["value"].tolist()
    assert "curves/a1.parquet: belongs to another attempt" in " ".join(loaded.skipped)
    assert len(store.curves("a1")) == 0


def test_a_writer_killed_at_any_moment_leaves_whole_rows(store: Store) -> None:
    store.write_trial(row("a1", val_loss=1.0), CURVE, {})
    script = (
        "import os, sys, ablate.results as r\n"
        "from pathlib import Path\n"
        "calls = 0\n"
        "def kill(_):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls == int(sys.argv[2]): os.kill(os.getpid(), 9)\n"
        "os.fsync = kill\n"
        "row = dict(trial_id='a1', variant='baseline', seed=0, status='ok', val_loss=2.0)\n"
        "r.Store(Path(sys.argv[1])).write_trial(row, {}, {})\n"
    )
    # Each file is synced before and its folder after the rename: the fifth is the row's own.
    for moment, value in (("1", 1.0), ("5", 1.0), ("6", 2.0)):
        ended = subprocess.run([sys.executable, "-c", script, str(store.folder), moment], check=False)
        assert ended.returncode == -9
        stored = store.trial("a1")
        assert stored is not None
        assert stored["val_loss"] == value
        assert len(store.load().trials) == 1


def test_an_older_schema_reads_with_nulls(store: Store) -> None:
    older = [each for each in TRIALS if each.name not in ("energy_joules_per_token", "corpus_sha256", "steps")]
    schema = pa.schema(older, metadata={b"schema_version": b"0", b"ablate_table": b"trials"})
    old = pa.Table.from_pylist([row("a0", seed=3)], schema=schema)
    store.write_trial(row("a1", steps=5), CURVE, {})
    pq.write_table(old, store.folder / "trials" / "a0.parquet")
    loaded = store.load()
    assert loaded.skipped == []
    by_id = loaded.trials.set_index("trial_id")
    assert by_id.loc["a0", "steps"] is pd.NA
    assert by_id.loc["a1", "steps"] == 5
    assert by_id.loc["a0", "seed"] == 3
    assert str(loaded.trials["steps"].dtype) == "Int64"


def test_a_column_that_meant_another_figure_is_read_as_that_figure(store: Store) -> None:
    metadata = {b"schema_version": b"1", b"ablate_table": b"trials", b"write_id": b"x"}
    names = [each for each in TRIALS if each.name not in ("hfu", "mfu_datasheet")]
    old = pa.Table.from_pylist([row("a0", mfu=0.4)], schema=pa.schema(names, metadata=metadata))
    store.write_trial(row("a1", mfu=0.6), {}, {})
    pq.write_table(old, store.folder / "trials" / "a0.parquet")
    found = store.load().trials.set_index("trial_id")
    assert found["mfu_datasheet"].to_dict() == {"a0": 0.4, "a1": pytest.approx(math.nan, nan_ok=True)}
    assert found["mfu"].to_dict() == {"a0": pytest.approx(math.nan, nan_ok=True), "a1": 0.6}


def test_a_newer_schema_is_named_not_guessed_at(store: Store) -> None:
    newer = TRIALS.with_metadata({**TRIALS.metadata, b"schema_version": b"999"})
    pq.write_table(pa.Table.from_pylist([row("a1")], schema=newer), store.folder / "trials" / "a1.parquet")
    assert "newer ablate" in store.load().skipped[0]


EXPERIMENT = {
    "name": "x",
    "variants": [
        {"name": "gqa", "is_baseline": False, "changes": {"attention": "gqa"}, "trials": {"1": "c1", "0": "c0"}},
        {"name": "baseline", "is_baseline": True, "changes": {}, "trials": {"0": "b0"}},
    ],
}


def test_rows_are_those_of_the_experiment_in_its_order_under_its_names(store: Store) -> None:
    for trial_id, seed in (("b0", 0), ("c0", 0), ("c1", 1), ("d0", 0)):
        store.write_trial(row(trial_id, variant="old name", seed=seed, changes="{}"), CURVE, PROFILE)
    assert len(store.load().trials) == 4
    store.write_experiment(EXPERIMENT)
    loaded = store.load()
    assert loaded.trials["trial_id"].tolist() == ["c0", "c1", "b0"]
    assert loaded.trials["variant"].tolist() == ["gqa", "gqa", "baseline"]
    assert loaded.trials["is_baseline"].tolist() == [False, False, True]
    assert json.loads(loaded.trials["changes"][0]) == {"attention": "gqa"}
    assert loaded.trials.dtypes.astype(str).to_dict() == store.load().trials.dtypes.astype(str).to_dict()
    assert set(loaded.curves["trial_id"]) == {"c0", "c1", "b0"}
    assert loaded.skipped == []
    assert (store.folder / "trials" / "d0.parquet").exists()


def test_an_experiment_without_any_row_yet_loads(store: Store) -> None:
    store.write_experiment(EXPERIMENT)
    loaded = store.load()
    assert len(loaded.trials) == 0
    assert str(loaded.trials["is_baseline"].dtype) == "boolean"


def test_documents_are_strict_json(store: Store) -> None:
    store.write_experiment({"name": "x"})
    with pytest.raises(ValueError, match="JSON compliant"):
        store.write_experiment({"name": "y", "value": math.nan})
    assert store.experiment() == {"name": "x"}


def test_an_unreadable_document_stops_no_reader(store: Store) -> None:
    store.write_trial(row("a1"), CURVE, {})
    for name in ("experiment.json", "mlflow.json"):
        (store.folder / name).write_text("[1, 2", encoding="utf-8")
    assert store.mlflow() is None
    assert len(store.load().trials) == 1
    assert "experiment.json" in store.load().skipped[0]
    with pytest.raises(ResultsError, match="cannot be read"):
        store.experiment()


TRIALS_NOT_IDS: list[Any] = ["abc", {"zero": "c0"}, {"0": 5}, {"0": "../c0"}]


@pytest.mark.parametrize(
    "document",
    [
        {"variants": 5},
        {"variants": [{}]},
        {"variants": [{"name": 5}]},
        *({"variants": [{"name": "a", "trials": trials}]} for trials in TRIALS_NOT_IDS),
        {"variants": [{"name": "a", "changes": []}]},
        {"variants": [{"name": "a", "kv_cache_bytes_by_tokens": [1]}]},
        {"invalid": 3},
        {"invalid": [{"variant": "a"}]},
        {"counts": {"raw": "many"}},
        {"machine": {"workers": "two"}},
        {"data": {"train_tokens": "1"}},
        {"train": 3},
        {"name": math.nan},
    ],
)
def test_an_experiment_of_another_shape_is_named_and_the_rows_remain(store: Store, document: Any) -> None:
    store.write_trial(row("c0"), CURVE, {})
    (store.folder / "experiment.json").write_text(json.dumps(document), encoding="utf-8")
    loaded = store.load()
    assert loaded.experiment == {}
    assert loaded.trials["trial_id"].tolist() == ["c0"]
    assert [each.split(":")[0] for each in loaded.skipped] == ["experiment.json"]
    with pytest.raises(ResultsError, match="cannot be read"):
        store.experiment()


@pytest.mark.parametrize(
    "document",
    [{"runs": {}}, {"experiment_id": "1"}, {"experiment_id": "1", "runs": 5}, {"experiment_id": 1, "runs": {}}],
)
def test_a_mirror_of_another_shape_is_none(store: Store, document: Any) -> None:
    store.write_mlflow(document)
    assert store.mlflow() is None


def test_the_mirror_is_that_of_the_present_trials(store: Store) -> None:
    store.write_mlflow({"experiment_id": "1", "runs": {"b0": "r1", "d0": "r2"}})
    assert store.mlflow() == {"experiment_id": "1", "runs": {"b0": "r1", "d0": "r2"}}
    store.write_experiment(EXPERIMENT)
    assert store.mlflow() == {"experiment_id": "1", "runs": {"b0": "r1"}}


def test_importing_it_brings_neither_torch_nor_mlflow() -> None:
    script = "import sys, ablate.results; print(sorted({'torch', 'mlflow', 'scipy', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
