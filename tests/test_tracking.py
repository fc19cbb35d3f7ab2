"""MLflow holds what Parquet holds, one run a trial, and no trouble with it reaches the training."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import signal
import socket
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate import tracking
from ablate.mlflow_address import TrackingError, default_uri, is_server
from ablate.mlflow_run import POINTS_PER_METRIC, decode_name, encode_name, run_content, thinned
from ablate.mlflow_view import comparison_links, run_colour, view_state
from ablate.results import Store, places
from ablate.schema import TRIALS
from ablate.tracking import Tracker

STEPS = 2500
LOWEST = 1234


def trial_row(trial_id: str, variant: str, seed: int, **columns: Any) -> dict[str, Any]:
    config = {"d_model": 64, "attention": {"name": variant, "n_kv_heads": 2, "x[0]@..": [1, 2]}, "note": "é" * 9000}
    return {
        "experiment": "small",
        "variant": variant,
        "trial_id": trial_id,
        "seed": seed,
        "status": "ok",
        "attempts": 1,
        "config": json.dumps(config),
        "started_at": datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC),
        "wall_seconds": 2.5,
        "steps": STEPS,
        "val_loss": 1.5 + seed,
        "train_loss": 1.25,
        "params_total": 123_456_789,
        "kv_cache_bytes_per_token": 1024,
        "git_commit": "c0ffee",
        "log": f"logs/{trial_id}.log",
        **columns,
    }


def curves(bad_step: int | None = None) -> dict[str, list[Any]]:
    steps = list(range(STEPS))
    losses = [5 - step / STEPS for step in steps]
    losses[LOWEST] = 0.125
    if bad_step is not None:
        losses[bad_step:] = [math.nan] * (STEPS - bad_step)
    return {
        "step": steps * 2,
        "split": ["val"] * STEPS + ["train"] * STEPS,
        "metric": ["loss"] * STEPS + ["lr"] * STEPS,
        "value": losses + [1e-3] * STEPS,
    }


PROFILE: dict[str, list[Any]] = {
    "phase": ["decode"],
    "batch": [8],
    "context": [64],
    "metric": ["tokens_per_second"],
    "value": [640.0],
}


def document(name: str = "small") -> dict[str, Any]:
    gqa = {"attention": "gqa", "attention.n_kv_heads": 2}
    return {
        "name": name,
        "question": "Does it mirror?",
        "variants": [
            {"name": "baseline", "is_baseline": True, "changes": {}, "trials": {"0": "b0", "1": "b1"}},
            {"name": "gqa", "is_baseline": False, "changes": gqa, "trials": {"0": "c0"}},
        ],
    }


def write_small(root: Path, name: str = "small") -> Store:
    store = Store(root / name, create=True)
    store.write_experiment(document(name))
    store.write_trial(trial_row("b0", "baseline", 0), curves(), PROFILE)
    store.write_trial(trial_row("b1", "baseline", 1, status="killed", val_loss=None), {}, {})
    diverged = {"status": "diverged", "val_loss": math.nan, "diverged_step": 2000, "reason": "loss was nan"}
    store.write_trial(trial_row("c0", "gqa", 0, **diverged), curves(bad_step=2000), {})
    store.log_path("b0").write_text("step 1\n", encoding="utf-8")
    return store


@pytest.fixture(autouse=True)
def no_tracking_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    # What a surrounding run would leave behind.
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "77")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One MLflow store for all tests here: making one takes seconds. Each test has an experiment of its own."""
    return tmp_path_factory.mktemp("re sults")


@pytest.fixture(scope="module")
def mirrored(root: Path) -> tuple[Store, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        store = write_small(root)
        tracker = Tracker.connect(root, store)
        for trial_id in places(store.experiment()):
            tracker.mirror(trial_id)
    return store, tracker._client


def runs_of(client: Any, store: Store) -> dict[str, Any]:
    runs = client.search_runs([store.mlflow()["experiment_id"]])  # type: ignore[index]
    assert len({run.data.tags["ablate.trial_id"] for run in runs}) == len(runs)
    return {run.data.tags["ablate.trial_id"]: run for run in runs}


def dump(client: Any, store: Store) -> dict[str, Any]:
    return {trial_id: run.to_dictionary() for trial_id, run in runs_of(client, store).items()}


# --- What MLflow holds ------------------------------------------------------------------------------------------------


def test_one_flat_finished_run_a_trial(mirrored: tuple[Store, Any]) -> None:
    store, client = mirrored
    runs = runs_of(client, store)
    assert {key: (run.info.run_name, run.info.status) for key, run in runs.items()} == {
        "b0": ("baseline seed=0", "FINISHED"),
        "b1": ("baseline seed=1", "KILLED"),
        "c0": ("gqa seed=0", "FAILED"),
    }
    assert not [run for run in runs.values() if "mlflow.parentRunId" in run.data.tags]
    assert store.mlflow() == {
        "experiment_id": runs["b0"].info.experiment_id,
        "owner": tracking.owner_of(store),
        "runs": {key: runs[key].info.run_id for key in ("b0", "b1", "c0")},
        "attempts": dict.fromkeys(("b0", "b1", "c0"), 1),
    }


def test_times_and_tags_are_the_records(mirrored: tuple[Store, Any]) -> None:
    store, client = mirrored
    run = runs_of(client, store)["c0"]
    start = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC).timestamp() * 1000
    assert (run.info.start_time, run.info.end_time) == (start, start + 2500)
    expected = {
        "ablate.variant": "gqa",
        "ablate.attempt": "1",
        "ablate.outcome": "diverged",
        "ablate.git_commit": "c0ffee",
        "mlflow.source.git.commit": "c0ffee",
        "mlflow.note.content": "loss was nan",
    }
    assert expected.items() <= run.data.tags.items()


def test_every_number_of_the_row_is_a_metric_of_the_same_name(mirrored: tuple[Store, Any]) -> None:
    store, client = mirrored
    runs = runs_of(client, store)
    numbers = [each.name for each in TRIALS if str(each.type) in ("int64", "double")]
    for trial_id, run in runs.items():
        stored = store.trial(trial_id)
        assert stored is not None
        finite = {name: stored[name] for name in numbers if stored[name] is not None and math.isfinite(stored[name])}
        assert {name: run.data.metrics[name] for name in finite} == finite
        assert not (set(numbers) - finite.keys()) & run.data.metrics.keys()


def test_a_curve_is_thinned_and_ends_in_the_rows_value(mirrored: tuple[Store, Any]) -> None:
    store, client = mirrored
    run_id = runs_of(client, store)["b0"].info.run_id
    history = {point.step: point.value for point in client.get_metric_history(run_id, "val_loss")}
    assert 900 < len(history) <= POINTS_PER_METRIC + 1
    assert history[0] == 5.0
    assert history[LOWEST] == 0.125
    assert max(history) == STEPS
    assert history[STEPS] == 1.5


def test_what_is_not_finite_is_a_tag_and_competes_with_nobody(mirrored: tuple[Store, Any]) -> None:
    store, client = mirrored
    run = runs_of(client, store)["c0"]
    assert "val_loss" not in run.data.metrics
    assert run.data.tags["val_loss_nonfinite"] == "nan@0"
    assert run.data.tags["unfinished/val_loss_nonfinite"] == "nan@2000"
    assert run.data.metrics["unfinished/val_loss"] == 5 - 1999 / STEPS
    assert [key for key, value in run.data.metrics.items() if not math.isfinite(value)] == []


def test_settings_are_short_params_and_varied_numbers_metrics(mirrored: tuple[Store, Any]) -> None:
    store, client = mirrored
    data = runs_of(client, store)["b0"].data
    assert data.params["variant"] == "baseline"
    assert data.params["attention.n_kv_heads"] == "2"
    decoded = {decode_name(key): value for key, value in data.params.items()}
    assert decoded["attention.x[0]@.."] == "[1, 2]"
    assert len(decoded["note"]) == 500
    assert data.metrics["setting/attention.n_kv_heads"] == 2
    assert data.metrics["profile/decode/batch 8 context 64/tokens_per_second"] == 640.0


def test_the_whole_config_and_the_log_are_artifacts(mirrored: tuple[Store, Any], root: Path, tmp_path: Path) -> None:
    store, client = mirrored
    run = runs_of(client, store)["b0"]
    assert {each.path for each in client.list_artifacts(run.info.run_id)} == {"config.json", "b0.log"}
    whole = Path(client.download_artifacts(run.info.run_id, "config.json", str(tmp_path)))
    stored = store.trial("b0")
    assert stored is not None
    assert json.loads(whole.read_text(encoding="utf-8")) == json.loads(stored["config"])
    assert (root / "mlartifacts" / "small").is_dir()
    assert not Path("mlruns").exists()


def test_the_experiment_carries_the_question_and_the_view(mirrored: tuple[Store, Any]) -> None:
    store, client = mirrored
    tags = client.get_experiment(store.mlflow()["experiment_id"]).tags  # type: ignore[index]
    assert tags["mlflow.note.content"] == "Does it mirror?"
    assert tags["mlflow.sharedViewState.ablate"] == view_state()


# --- Bringing it up to date -------------------------------------------------------------------------------------------


def test_sync_writes_what_is_missing_and_then_changes_nothing(root: Path) -> None:
    store = write_small(root, "synced")
    tracker = Tracker.connect(root, store)
    assert tracker.sync().written == ["b0", "b1", "c0"]
    before, noted = dump(tracker._client, store), (store.folder / "mlflow.json").stat()
    again = Tracker.connect(root, store).sync()
    assert (again.written, again.replaced, again.unchanged, again.failed) == ([], [], ["b0", "b1", "c0"], None)
    assert dump(tracker._client, store) == before
    assert (store.folder / "mlflow.json").stat() == noted


def test_sync_without_a_readable_experiment_says_so(root: Path) -> None:
    store = write_small(root, "spoilt")
    (store.folder / "experiment.json").write_text('{"variants": 5}', encoding="utf-8")
    assert "experiment.json" in str(Tracker.connect(root, store).sync().failed)


def test_mlflow_json_may_be_lost(root: Path) -> None:
    store = write_small(root, "lost")
    tracker = Tracker.connect(root, store)
    tracker.sync()
    noted = store.mlflow()
    (store.folder / "mlflow.json").unlink()
    assert Tracker.connect(root, store).sync().written == []
    assert store.mlflow() == noted


def test_results_that_are_moved_with_their_database_may_lose_mlflow_json(tmp_path: Path) -> None:
    store = write_small(tmp_path / "before", "moved")
    assert len(Tracker.connect(tmp_path / "before", store).sync().written) == 3
    (tmp_path / "before").rename(tmp_path / "after")
    moved = Store(tmp_path / "after/moved")
    (moved.folder / "mlflow.json").unlink()
    tracker = Tracker.connect(tmp_path / "after", moved)
    assert tracker.sync().written == []
    assert len(runs_of(tracker._client, moved)) == 3


def test_a_retried_trial_takes_the_place_of_its_run(root: Path) -> None:
    store = write_small(root, "retried")
    tracker = Tracker.connect(root, store)
    tracker.sync()
    before = runs_of(tracker._client, store)
    store.write_trial(trial_row("c0", "gqa", 0, attempts=2), curves(), {})
    tracker.mirror("c0")
    after = runs_of(tracker._client, store)
    assert after.keys() == before.keys()
    assert after["c0"].info.status == "FINISHED"
    assert after["c0"].data.tags["ablate.attempt"] == "2"
    assert after["c0"].data.tags["ablate.replaces"] == before["c0"].info.run_id
    assert after["b0"].info.run_id == before["b0"].info.run_id
    assert tracker._client.get_run(before["c0"].info.run_id).info.lifecycle_stage == "deleted"


def test_a_renamed_variant_renames_its_runs_and_strangers_stay(root: Path) -> None:
    store = write_small(root, "renamed")
    tracker = Tracker.connect(root, store)
    tracker.sync()
    renamed = document("renamed")
    renamed["variants"] = [{**renamed["variants"][1], "name": "two heads"}]
    store.write_experiment(renamed)
    assert tracker.sync().replaced == ["c0"]
    names = {run.info.run_name for run in runs_of(tracker._client, store).values()}
    assert names == {"baseline seed=0", "baseline seed=1", "two heads seed=0"}


def current(client: Any, store: Store) -> dict[str, str]:
    return {key: run.data.tags["ablate.current"] for key, run in runs_of(client, store).items()}


def test_runs_say_whether_their_trial_is_still_in_the_experiment(root: Path) -> None:
    store = write_small(root, "moved on")
    tracker = Tracker.connect(root, store)
    tracker.sync()
    assert current(tracker._client, store) == {"b0": "yes", "b1": "yes", "c0": "yes"}
    later = document("moved on")
    later["variants"].pop()
    store.write_experiment(later)
    assert list((store.mlflow() or {})["runs"]) == ["b0", "b1"]
    Tracker.connect(root, store)
    assert current(tracker._client, store) == {"b0": "yes", "b1": "yes", "c0": "no"}
    store.write_experiment(document("moved on"))
    tracker.sync()
    assert current(tracker._client, store) == {"b0": "yes", "b1": "yes", "c0": "yes"}


def test_a_run_left_half_written_is_written_again(root: Path) -> None:
    store = write_small(root, "halved")
    tracker = Tracker.connect(root, store)
    client, experiment_id = tracker._client, tracker._experiment_id
    half = client.create_run(experiment_id, tags={"ablate.trial_id": "b0"}).info.run_id
    of_another = client.create_run(experiment_id, tags={"who": "somebody else"}).info.run_id
    Tracker.connect(root, store)
    assert client.get_run(half).info.lifecycle_stage == "deleted"
    assert client.get_run(of_another).info.status == "RUNNING"
    client.delete_run(of_another)
    assert runs_of(client, store)["b0"].info.status == "FINISHED"


def test_a_report_replaces_the_one_before(root: Path, tmp_path: Path) -> None:
    store = write_small(root, "reported")
    tracker = Tracker.connect(root, store)
    tracker.sync()
    client = tracker._client
    for name in ("report.md", "plots/loss.png", "plots/gone.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("first", encoding="utf-8")
    tracker.attach(tmp_path)
    (tmp_path / "plots" / "gone.png").unlink()
    (tmp_path / "report.md").write_text("second", encoding="utf-8")
    tracker.attach(tmp_path)
    run = runs_of(client, store)["b0"]
    held = Path(client.download_artifacts(run.info.run_id, "report"))
    files = sorted(path.relative_to(held).as_posix() for path in held.rglob("*.*"))
    assert files == ["plots/loss.png", "report.md"]
    assert (held / "report.md").read_text(encoding="utf-8") == "second"
    experiment = client.get_experiment(run.info.experiment_id)
    assert experiment.tags["ablate.report_run"] == run.info.run_id
    assert len(runs_of(client, store)) == 3


# --- Trouble ----------------------------------------------------------------------------------------------------------


def refused(root: Path, store: Store) -> str:
    """Why MLflow cannot be used, and the cure: one text without a line of MLflow's own."""
    with pytest.raises(TrackingError) as caught:
        Tracker.connect(root, store)
    return str(caught.value)


def test_a_deleted_experiment_has_three_ways_out(root: Path) -> None:
    store = write_small(root, "removed")
    tracker = Tracker.connect(root, store)
    tracker._client.delete_experiment(tracker._experiment_id)
    message = refused(root, store)
    for way in ("mlflow experiments restore --experiment-id", "another name", "mlflow gc --experiment-ids"):
        assert way in message
    assert tracker._experiment_id in message


@pytest.mark.parametrize("uri", ["file:///tmp/mlruns", "/tmp/mlruns", "./mlruns", "file:mlruns"])
def test_a_plain_folder_is_refused_in_our_words(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert "sqlite:///" in refused(tmp_path, Store(tmp_path / "x", create=True))


def test_without_mlflow_there_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert "pip install mlflow" in refused(tmp_path, Store(tmp_path / "x", create=True))


@pytest.mark.parametrize("content", [None, b"no database at all", b"SQLite format 3\0" + bytes(200)])
def test_a_database_that_cannot_be_read_is_to_be_moved_away(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    warning = refused(tmp_path, Store(tmp_path / "x", create=True))
    assert "mlflow.db cannot be read: " in warning
    assert "Move mlflow.db away, then: python -m ablate sync FILE" in warning
    assert "sqlalche" not in warning


def test_a_torn_database_is_to_be_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("create table runs (name text)")
        database.executemany("insert into runs values (?)", [("x" * 1000,)] * 100)
    path.write_bytes(path.read_bytes()[:20000])
    assert "Move mlflow.db away" in refused(tmp_path, Store(tmp_path / "x", create=True))


@pytest.mark.skipif(importlib.util.find_spec("psycopg") is not None, reason="the driver is here")
def test_a_missing_driver_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql+psycopg://somebody:secret@127.0.0.1:1/runs")
    warning = refused(tmp_path, Store(tmp_path / "x", create=True))
    assert "pip install psycopg" in warning
    assert "secret" not in warning


def test_a_closed_port_is_told_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{probe.getsockname()[1]}")
        assert "python -m ablate sync" in refused(tmp_path, Store(tmp_path / "x", create=True))


class Fake:
    """Stands for the client: notes the sizes of what it is sent, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.calls = 0
        self.batches: list[tuple[int, int, int]] = []
        self.data = SimpleNamespace(metrics={}, params={})
        self.info = SimpleNamespace(status="RUNNING")

    def search_runs(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        if self.fails:
            raise ConnectionError("the server is gone")
        return type("Page", (list,), {"token": None})()

    def create_run(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(info=SimpleNamespace(experiment_id="1", run_id="r1"))

    def log_batch(self, _run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        self.batches.append((len(metrics), len(params), len(tags)))
        self.data.metrics |= {metric.key: metric.value for metric in metrics}
        self.data.params |= {param.key: param.value for param in params}

    def log_dict(self, *_: Any) -> None:
        pass

    def log_artifact(self, *_: Any) -> None:
        pass

    def get_run(self, _run_id: str) -> Any:
        return self

    def set_terminated(self, *_: Any, **__: Any) -> None:
        pass


def test_an_outage_ends_a_sync_at_once(tmp_path: Path) -> None:
    client: Any = Fake(fails=True)
    tracker = Tracker(write_small(tmp_path), client, "1", tmp_path / "lock")
    with pytest.raises(TrackingError, match="the server is gone"):
        tracker.mirror("b0")
    assert "the server is gone" in str(tracker.sync().failed)
    assert client.calls == 2


def test_what_is_sent_is_small_enough_for_any_server(tmp_path: Path) -> None:
    client: Any = Fake()
    store = Store(tmp_path / "x", create=True)
    config = json.dumps({f"setting_{number}": number for number in range(250)})
    store.write_trial(trial_row("b0", "baseline", 0, config=config), curves(), PROFILE)
    Tracker(store, client, "1", tmp_path / "lock").mirror("b0")
    assert sum(batch[0] for batch in client.batches) > 1000
    assert sum(batch[1] for batch in client.batches) == 252
    assert max(sum(batch) for batch in client.batches) <= 1000
    assert max(batch[1] for batch in client.batches) <= 100
    assert (store.mlflow() or {})["runs"] == {"b0": "r1"}


def test_a_server_that_drops_something_is_not_believed(tmp_path: Path) -> None:
    client: Any = Fake()
    client.data.metrics = type("Forgetful", (dict,), {"__ior__": lambda self, _: self})()
    store = write_small(tmp_path)
    with pytest.raises(TrackingError, match="MLflow kept 0 of"):
        Tracker(store, client, "1", tmp_path / "lock").mirror("b0")
    assert store.mlflow() is None


MANY = """
import os, sys
from pathlib import Path
from ablate.results import Store
from ablate.tracking import Tracker
root = Path(sys.argv[1])
import mlflow, mlflow.store.tracking.sqlalchemy_store
children = []
for number in range(8):
    child = os.fork()
    if child == 0:
        store = Store(root / f"experiment{number % 4}-{number}", create=True)
        row = dict(trial_id=f"a{number}", variant="baseline", seed=0, status="ok", val_loss=1.0)
        store.write_experiment({"name": f"experiment{number % 4}"})
        store.write_trial(row, {}, {})
        Tracker.connect(root, store).mirror(f"a{number}")
        os._exit(0 if store.mlflow() else 1)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
print(len(mlflow.MlflowClient(f"sqlite:///{root}/mlflow.db").search_runs(["1", "2", "3", "4"])))
"""


def test_eight_at_once_at_a_new_store_all_succeed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MANY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [str([0] * 8), "8"], done.stderr


KILLED = """
import os, signal, sys
from pathlib import Path

import alembic.op
from ablate.mlflow_database import make_database

given = alembic.op.add_column
def killed(*arguments, **options):
    given(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)
alembic.op.add_column = killed
make_database(sys.argv[1], Path(sys.argv[2]))
"""


def test_a_store_whose_making_was_killed_between_two_migrations_is_made_anew(tmp_path: Path) -> None:
    """A column is there, and that it is there is noted nowhere: MLflow would add it again, and fail for ever."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    killed = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, uri, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / ".mlflow.db.new").stat().st_size
    assert not (tmp_path / "mlflow.db").exists()
    store = write_small(tmp_path, "small")
    assert Tracker.connect(tmp_path, store).sync().written == ["b0", "b1", "c0"]
    assert not list(tmp_path.glob(".mlflow.db.new*"))


# --- Pure parts -------------------------------------------------------------------------------------------------------


@given(st.text(min_size=1, max_size=40) | st.text(alphabet="_x5f.-/ @0", min_size=1, max_size=12))
def test_names_are_mapped_reversibly_into_what_mlflow_takes(name: str) -> None:
    encoded = encode_name(name)
    assert decode_name(encoded) == name
    assert not set(encoded) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-/ ")
    assert not encoded.startswith("/")
    assert not {"", ".", ".."} & set(encoded.split("/"))


def test_plain_names_stay_as_they_are() -> None:
    for name in ("val_loss", "attention.n_kv_heads", "train/grad_norm", "profile/decode/batch 8"):
        assert encode_name(name) == name


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=3 * POINTS_PER_METRIC))
def test_thinning_keeps_first_last_and_lowest(values: list[float]) -> None:
    series = list(enumerate(values))
    kept = thinned(series)
    assert len(kept) <= POINTS_PER_METRIC
    assert kept[0] == series[0]
    assert kept[-1] == series[-1]
    assert min(value for _, value in kept) == min(values)
    assert sorted(kept) == kept
    assert set(kept) <= set(series)


@pytest.mark.parametrize(
    ("outcome", "status"),
    [("ok", "FINISHED"), ("killed", "KILLED"), ("interrupted", "KILLED"), ("crashed", "FAILED"), ("oom", "FAILED")],
)
def test_an_outcome_becomes_a_status(outcome: str, status: str, tmp_path: Path) -> None:
    store = Store(tmp_path, create=True)
    store.write_trial(trial_row("b0", "baseline", 0, status=outcome), {}, {})
    stored = store.trial("b0")
    assert stored is not None
    content = run_content(stored, store.curves("b0"), store.profiles("b0"), {}, {"name": "baseline"})
    assert content.status == status


def test_the_uri_is_absolute_unless_one_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_uri(Path("results")) == f"sqlite:///{tmp_path}/results/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert default_uri(Path("results")) == "http://tracking:5000"


def test_links_open_the_view_and_the_runs() -> None:
    links = comparison_links("http://127.0.0.1:5000/", {"experiment_id": "7", "runs": {"b0": "r1", "c0": "r2"}})
    assert links["comparison"].startswith("http://127.0.0.1:5000/#/experiments/7/runs?workflowType=machine_learning&")
    assert links["comparison"].endswith("&viewStateShareKey=ablate")
    assert unquote(links["table"]).endswith('/#/compare-runs?runs=["r1","r2"]&experiments=["7"]')
    assert unquote(links["charts"]).endswith("&searchFilter=tags.`ablate.current` = 'yes'")
    assert not set('"[] `') & set("".join(links.values()))


def test_the_view_shows_the_loss_and_the_cache_first() -> None:
    state = json.loads(view_state())
    assert [card["metricKey"] for card in state["compareRunCharts"]][:2] == ["val_loss", "kv_cache_bytes_per_token"]
    first = state["compareRunSections"][0]["uuid"]
    assert {card["metricSectionId"] for card in state["compareRunCharts"]} == {first}


def test_neighbours_have_colours_of_their_own() -> None:
    colours = [run_colour(place) for place in range(20)]
    assert len(set(colours)) == 20
    assert all(len(colour) == 7 for colour in colours)


def test_the_mirror_alone_brings_neither_mlflow_nor_torch() -> None:
    script = "import sys, ablate.tracking, ablate.mlflow_ui; print(sorted({'torch', 'mlflow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_error_says_what_to_do() -> None:
    error = TrackingError("it is broken.", "Mend it.")
    assert (error.message, error.cure) == ("it is broken.", "Mend it.")
    assert is_server("https://x")
    assert not is_server("sqlite:///x")
