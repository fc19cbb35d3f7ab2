"""Whatever MLflow does, a run does not wait for it, tells of it once, and `sync` writes what is missing, once."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from ablate import mirror, mlflow_experiment, tracking
from ablate.mirror import Answer, Desk, Mirror
from ablate.mlflow_address import TrackingError
from ablate.mlflow_ui import serve
from ablate.redaction import redacted
from ablate.results import Store
from ablate.tracking import Tracker

COMMAND = "python -m ablate sync small.yaml"
TRIALS = ("b0", "b1", "c0")


def write_small(root: Path, name: str = "small") -> Store:
    """Three trials of two variants, with two rounds of timing."""
    store = Store(root / name, create=True)
    timing = {"timing_id": "77", "members": {"b": "baseline", "c": "gqa"}}
    variants = [
        {"name": "baseline", "is_baseline": True, "trials": {"0": "b0", "1": "b1"}},
        {"name": "gqa", "is_baseline": False, "trials": {"0": "c0"}},
    ]
    store.write_experiment({"name": name, "question": "Why?", "timing": timing, "variants": variants})
    for trial_id in TRIALS:
        write_trial(store, trial_id)
    return store


def write_trial(store: Store, trial_id: str, attempts: int = 1, status: str = "ok") -> None:
    variant = "gqa" if trial_id == "c0" else "baseline"
    row = {"trial_id": trial_id, "variant": variant, "seed": int(trial_id[1]), "status": status, "val_loss": 1.5}
    store.write_trial({**row, "attempts": attempts, "config": '{"d_model": 64}'}, {}, {})


def write_round(store: Store, number: int, times: dict[str, float]) -> None:
    rows = [("b", False, times["b"]), ("c", False, times["c"]), ("b", True, times["b"])]
    columns: dict[str, list[Any]] = {
        "variant_id": [name for name, _, _ in rows],
        "variant": [{"b": "baseline", "c": "gqa"}[name] for name, _, _ in rows],
        "is_partner": [partner for _, partner, _ in rows],
        "place": [3 * number + place for place in range(3)],
        "started_at": [datetime(2026, 5, 4, 3, number, tzinfo=UTC)] * 3,
        "status": ["ok"] * 3,
        "metric": ["step_seconds_p50"] * 3,
        "value": [value for _, _, value in rows],
        "torch": ["2.13"] * 3,
    }
    store.write_round("77", number, columns)


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    monkeypatch.setattr(mlflow_experiment, "SECONDS_TO_WAIT_FOR_OTHERS", 0.1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new, empty MLflow database: making one takes seconds."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        Tracker.connect(folder, Store(folder / "first", create=True))
    return folder / "mlflow.db"


@pytest.fixture
def root(tmp_path: Path, made: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "mlflow.db").write_bytes(made.read_bytes())
    return folder


def runs(root: Path, name: str = "small") -> dict[str, Any]:
    """The runs that are there, by trial: each once."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    experiment = client.get_experiment_by_name(name)
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    by_trial = {run.data.tags.get("ablate.trial_id", run.info.run_id): run for run in found}
    assert len(by_trial) == len(found)
    return by_trial


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- A server in trouble ----------------------------------------------------------------------------------------------


class Troubled(BaseHTTPRequestHandler):
    """Answers what its server was told to, or holds the request until it is released."""

    server: Server

    def do_GET(self) -> None:
        self.server.asked.set()
        status, body = self.server.answer
        if status == 0:
            self.server.released.wait()
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    """One such server."""

    daemon_threads = True

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Troubled)
        self.answer, self.released, self.asked = (status, body), threading.Event(), threading.Event()


@contextlib.contextmanager
def server(status: int, body: bytes = b"") -> Iterator[Server]:
    with Server(status, body) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield running
        finally:
            running.released.set()
            running.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body"),
    [(500, b""), (503, b"busy"), (401, b""), (403, b"{}"), (404, b"<html>"), (200, b"<html>"), (200, b"{"), (200, b"")],
)
def test_a_server_in_trouble_is_one_fault_without_the_password(
    status: int, body: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(status, body) as troubled:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://somebody:s3cret@127.0.0.1:{troubled.server_port}")
        answer = Desk(tmp_path, write_small(tmp_path), behind=False).do(("mirror", "b0"))
    assert answer.fault is not None
    assert "s3cret" not in answer.fault
    assert "python -m ablate sync FILE" in answer.fault


def test_a_server_that_never_answers_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers nothing until the test has come to its end: whoever waited for it would never come there."""
    with server(0) as hanging:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{hanging.server_port}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "100000")
        store = write_small(tmp_path)
        with Mirror(tmp_path, store, COMMAND, behind=False, patience=0.1, patience_at_end=0.1) as mirrored:
            assert hanging.asked.wait(120)
            for trial_id in TRIALS:
                mirrored.mirror(trial_id)
            mirrored.attach(tmp_path)
            process = mirrored._process
        assert not hanging.released.is_set()
        assert process.exitcode == -signal.SIGKILL
    assert len(told := warnings_of(caplog)) == 1, told
    assert told[0].startswith("MLflow is behind: it is slow")
    assert COMMAND in told[0]


def test_what_is_not_answered_at_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror, "_perform", _never_answers)
    with Mirror(tmp_path, write_small(tmp_path), COMMAND, behind=False, patience=0, patience_at_end=0.01) as mirrored:
        mirrored.mirror("b0")
    assert len(told := warnings_of(caplog)) == 1, told
    assert f"To bring it up to date: {COMMAND}" in told[0]


def _never_answers(connection: Any, *_: Any) -> None:
    with contextlib.suppress(EOFError):
        while True:
            connection.recv()


def test_a_signal_is_not_held_up_by_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without, this test would take two thousand seconds."""
    monkeypatch.setattr(mirror, "_perform", _never_answers)
    asked = iter([False, False])
    began = time.monotonic()
    with Mirror(
        *(tmp_path, write_small(tmp_path), COMMAND),
        behind=False,
        patience=1000,
        patience_at_end=1000,
        stopped=lambda: next(asked, True),
    ) as mirrored:
        mirrored.mirror("b0")
    assert time.monotonic() - began < 100


def _ends(*_: Any) -> None:
    os._exit(3)


def test_a_process_that_ends_is_told_and_asked_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror, "_perform", _ends)
    with Mirror(tmp_path, write_small(tmp_path), COMMAND, behind=False) as mirrored:
        for trial_id in TRIALS:
            mirrored.mirror(trial_id)
    assert len(told := warnings_of(caplog)) == 1, told
    assert "ended" in told[0]
    assert COMMAND in told[0]


def _tells(*answers: str | None) -> Callable[..., None]:
    waiting = list(answers)

    def perform(connection: Any) -> None:
        for fault in waiting:
            connection.recv()
            connection.send(Answer(fault))

    return perform


def test_trouble_is_told_once_and_its_end_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = multiprocessing.Pipe()
    faults = [None, "it is down. python -m ablate sync FILE", "it is down.", "it is down.", None]
    thread = threading.Thread(target=_tells(*faults), args=(theirs,))
    mirrored = Mirror.__new__(Mirror)
    mirrored._connection, mirrored._command, mirrored._patience = ours, COMMAND, 100.0
    mirrored._unanswered, mirrored._lost, mirrored._fault = 0, False, None
    mirrored._stopped = lambda: False
    thread.start()
    for _ in faults:
        mirrored.mirror("b0")
    mirrored._wait(hopeful=True)
    thread.join()
    assert warnings_of(caplog) == [f"MLflow is behind: it is down. {COMMAND}", "MLflow is up to date again."]


def wait_for_end(process: psutil.Process) -> None:
    """Of a process that is nobody's child any more: where nobody collects such, it stays as a zombie."""
    deadline = time.monotonic() + 60
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.05)


ORPHAN = """
import os, signal, sys
from pathlib import Path
from ablate import mirror
from ablate.results import Store

def perform(connection, *_):
    mirror._requests(connection)
    print(os.getpid(), flush=True)
    signal.pause()

if __name__ == "__main__":
    mirror._perform = perform
    root = Path(sys.argv[1])
    kept = mirror.Mirror(root, Store(root / "small"), "", behind=False, patience=0)  # dropped, it would hang up
    signal.pause()
"""


def test_it_goes_with_a_run_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN, encoding="utf-8")
    run = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    child = psutil.Process(int(run.stdout.readline()))
    child.send_signal(signal.SIGINT)  # Ctrl-C reaches the whole group: its parent decides what that means
    child.send_signal(signal.SIGTERM)
    assert child.is_running()
    run.kill()
    run.wait()
    run.stdout.close()
    wait_for_end(child)


# --- A file in trouble, and its end -----------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        yield


@contextlib.contextmanager
def blocked(path: Path) -> Iterator[None]:
    path.rename(path.with_name("aside"))
    path.mkdir()
    yield
    path.rmdir()
    path.with_name("aside").rename(path)


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    """As to a user who is not root."""
    may = os.access
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "access", lambda file, mode: file != path and may(file, mode))
        yield


@contextlib.contextmanager
def torn(path: Path) -> Iterator[None]:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    yield
    path.write_bytes(whole)


@contextlib.contextmanager
def of_another_version(path: Path) -> Iterator[None]:
    def say(version: str) -> str:
        with contextlib.closing(sqlite3.connect(path)) as file, file:
            before: str = file.execute("select version_num from alembic_version").fetchone()[0]
            file.execute("update alembic_version set version_num = ?", [version])
        return before

    before = say("0123456789ab")
    yield
    say(before)


@contextlib.contextmanager
def on_a_full_disk(path: Path) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size // 2, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        (locked, "mlflow.db is locked by another program"),
        (blocked, "it is a folder"),
        (read_only, "mlflow.db is read-only. Let it be written to, or move it away"),
        (torn, "Move mlflow.db away"),
        (of_another_version, "mlflow db upgrade"),
        (on_a_full_disk, "later: python -m ablate sync"),
    ],
)
def test_after_the_trouble_the_next_request_writes_all(trouble: Any, told: str, root: Path) -> None:
    desk = Desk(root, write_small(root), behind=False)
    with trouble(root / "mlflow.db"):
        fault = desk.do(("mirror", "b0")).fault
        assert told in str(fault)
        assert desk.do(("mirror", "b1")).fault is not None
    assert desk.do(("mirror", "c0")) == Answer(None, [])
    assert {name: run.info.status for name, run in runs(root).items()} == dict.fromkeys(TRIALS, "FINISHED")


def test_a_file_deleted_meanwhile_is_made_again(root: Path) -> None:
    desk = Desk(root, write_small(root), behind=True)
    assert desk.do(("open", "")).fault is None
    (root / "mlflow.db").unlink()
    answers = [desk.do(("mirror", "b0")).fault for _ in range(2)]
    assert answers[-1] is None
    assert runs(root).keys() == set(TRIALS)


def test_a_file_that_cannot_be_written_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///file:{root}/mlflow.db?mode=ro&uri=true")
    fault = str(Desk(root, write_small(root), behind=False).do(("mirror", "b0")).fault)
    assert "readonly database" in fault
    assert "python -m ablate sync FILE" in fault


# --- What others do in MLflow -----------------------------------------------------------------------------------------


def test_a_run_that_was_cut_off_is_ended_once_with_its_trials_status(root: Path) -> None:
    store = write_small(root)
    write_trial(store, "b1", status="crashed")
    tracker = Tracker.connect(root, store)
    client, experiment = tracker._client, tracker._experiment_id
    half = [client.create_run(experiment, tags={"ablate.trial_id": each}).info.run_id for each in ("b0", "b1")]
    Tracker.connect(root, store)
    there = runs(root)
    assert {name: run.info.status for name, run in there.items()} == {"b0": "FINISHED", "b1": "FAILED"}
    # What was cut off does not say for ever that it runs, not even among what is deleted.
    assert [client.get_run(each).info.status for each in half] == ["KILLED", "KILLED"]


def test_runs_of_another_folder_are_left_alone(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db")
    mine, theirs = write_small(root), write_small(tmp_path / "elsewhere")
    Tracker.connect(root, mine).sync()
    report = tmp_path / "report"
    report.mkdir()
    (report / "report.md").write_text("mine", encoding="utf-8")
    Tracker.connect(root, mine).attach(report)
    before = mine.mlflow()
    other = Tracker.connect(tmp_path / "elsewhere", theirs)
    running = other._client.create_run(
        other._experiment_id, tags={"ablate.trial_id": "b0", "ablate.owner": tracking.owner_of(mine)}
    )
    synced = other.sync()
    assert (synced.failed, synced.written) == (None, list(TRIALS))
    other.attach(report)
    client = other._client
    assert before is not None
    assert {client.get_run(each).info.lifecycle_stage for each in before["runs"].values()} == {"active"}
    assert client.get_run(running.info.run_id).info.status == "RUNNING"
    assert [each.path for each in client.list_artifacts(before["runs"]["b0"], "report")] == ["report/report.md"]
    assert Tracker.connect(root, mine).sync().unchanged == list(TRIALS)


def test_an_experiment_of_somebody_else_is_not_touched(root: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    theirs = client.create_experiment("small", tags={"mlflow.note.content": "ours"})
    client.create_run(theirs)
    fault = str(Desk(root, write_small(root), behind=True).do(("open", "")).fault)
    for way in ("another name", "mlflow experiments rename", "MLFLOW_TRACKING_URI", "python -m ablate sync FILE"):
        assert way in fault
    assert client.get_experiment(theirs).tags == {"mlflow.note.content": "ours"}
    assert len(client.search_runs([theirs])) == 1


def test_an_empty_experiment_may_be_made_for_ablate(root: Path) -> None:
    from mlflow import MlflowClient

    made = MlflowClient(f"sqlite:///{root}/mlflow.db").create_experiment("small")
    assert Tracker.connect(root, write_small(root))._experiment_id == made


def test_deleted_runs_are_told_of_and_come_back_with_sync(root: Path, tmp_path: Path) -> None:
    store = write_small(root)
    tracker = Tracker.connect(root, store)
    tracker.sync()
    gone = runs(root)["b0"].info.run_id
    tracker._client.delete_run(gone)
    (tmp_path / "report.md").write_text("whole", encoding="utf-8")
    tracker.attach(tmp_path)
    there = runs(root)
    assert there.keys() == {"b1", "c0"}
    assert tracker._client.get_experiment(tracker._experiment_id).tags["ablate.report_run"] == there["b1"].info.run_id
    (notice,) = Desk(root, store, behind=False).do(("open", "")).notices
    for way in (f"mlflow runs restore --run-id {gone}", "python -m ablate sync FILE", "leave it so"):
        assert way in notice
    assert Tracker.connect(root, store).sync().written == ["b0"]
    assert Tracker.connect(root, store).notices == []


def test_a_run_that_was_changed_is_written_again_and_additions_stay(root: Path) -> None:
    store = write_small(root)
    tracker = Tracker.connect(root, store)
    tracker.sync()
    before = runs(root)
    tracker._client.log_metric(before["b0"].info.run_id, "val_loss", 0.1)
    tracker._client.log_param(before["b1"].info.run_id, "mood", "good")
    tracker._client.set_tag(before["b1"].info.run_id, "mlflow.note.content", "look at this one")
    tracker._client.set_terminated(before["c0"].info.run_id, "FAILED")
    again = tracker.sync()
    assert (again.failed, again.replaced, again.unchanged) == (None, ["b0", "c0"], ["b1"])
    after = runs(root)
    assert after["b0"].data.metrics["val_loss"] == 1.5
    assert after["b1"].data.params["mood"] == "good"


# --- Once, and all of it ----------------------------------------------------------------------------------------------


def test_rounds_are_metrics_of_the_variants_runs(root: Path) -> None:
    store = write_small(root)
    for number, ratio in enumerate((1.9, 2.0, 2.1)):
        write_round(store, number, {"b": 1.0, "c": ratio})
    tracker = Tracker.connect(root, store)
    tracker.sync()
    first = runs(root)
    metrics = first["c0"].data.metrics
    assert metrics["repeats/step_time_ratio"] == pytest.approx(1.9986, abs=1e-3)
    assert metrics["repeats/step_time_ratio_low"] < 2 < metrics["repeats/step_time_ratio_high"]
    assert metrics["repeats/step_time_ratio_rounds"] == 3
    assert first["c0"].data.tags["ablate.verdict.step_time"] == "slower"
    assert not [key for key in first["b0"].data.metrics if key.startswith("repeats/")]
    assert tracker.sync().unchanged == list(TRIALS)
    history = tracker._client.get_metric_history(first["c0"].info.run_id, "repeats/step_time_ratio")
    assert len(history) == 1
    write_round(store, 3, {"b": 1.0, "c": 3.0})
    tracker.sync()
    again = runs(root)
    assert again["c0"].info.run_id == first["c0"].info.run_id
    assert again["c0"].data.metrics["repeats/step_time_ratio_rounds"] == 4


def test_a_report_that_was_not_attached_is_attached_by_sync(root: Path, tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("whole", encoding="utf-8")
    tracker = Tracker.connect(root, write_small(root))
    tracker.sync(tmp_path)
    run_id = runs(root)["b0"].info.run_id
    assert "report/report.md" in [each.path for each in tracker._client.list_artifacts(run_id, "report")]


SYNC_SCRIPT = """
import sys
from pathlib import Path
from ablate.results import Store
from ablate.tracking import Tracker
print(Tracker.connect(Path(sys.argv[1]), Store(Path(sys.argv[1]) / "small")).sync())
"""


def test_two_at_once_write_each_run_once(root: Path) -> None:
    store = write_small(root)
    command = [sys.executable, "-W", "ignore", "-c", SYNC_SCRIPT, str(root)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate(timeout=300)[0] for each in both]
    assert sum(len(re.findall("'", text.partition("replaced")[0])) for text in said) == 2 * len(TRIALS)
    assert all("failed=None" in text for text in said)
    assert runs(root).keys() == set(TRIALS)
    assert (store.mlflow() or {})["runs"].keys() == set(TRIALS)


# --- Nothing told to strangers ----------------------------------------------------------------------------------------

SILENT = """
import os, socket, sys
from pathlib import Path

asked = []
def refuse(name):
    def connect(*arguments, **_):
        asked.append((name, arguments[-2:]))
        raise OSError("nobody is to be asked")
    return connect
for name in ("connect", "connect_ex"):
    setattr(socket.socket, name, refuse(name))
socket.getaddrinfo = refuse("getaddrinfo")
for name in ("CI", "PYTEST_CURRENT_TEST", "DO_NOT_TRACK"):
    os.environ.pop(name, None)
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "false"
from ablate.results import Store
from ablate.tracking import Tracker
root = Path(sys.argv[1])
assert Tracker.connect(root, Store(root / "small")).sync().failed is None
import time; time.sleep(0.5)
print(asked)
"""


def test_nobody_is_told_of_its_use(root: Path) -> None:
    write_small(root)
    command = [sys.executable, "-W", "ignore", "-c", SILENT, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[]"], done.stderr


@pytest.mark.parametrize(
    ("uri", "variable", "secret"),
    [
        ("http://somebody:s3cret@127.0.0.1:5000", "", "s3cret"),
        ("http://somebody:s3cr%40t@127.0.0.1:5000/x", "", "s3cr@t"),
        ("http://somebody:s3cr%40t@127.0.0.1:5000/x", "", "s3cr%40t"),
        ("postgresql://127.0.0.1/runs?user=x&password=s3cret", "", ""),
        ("http://127.0.0.1:5000", "MLFLOW_TRACKING_TOKEN", "s3cret"),
        ("http://127.0.0.1:5000", "MLFLOW_TRACKING_PASSWORD", "s3cret"),
    ],
)
def test_credentials_are_never_told(uri: str, variable: str, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    if variable:
        monkeypatch.setenv(variable, secret)
    text = f"{uri} refused {secret}; cannot reach {uri}/api?x=1"
    told = str(TrackingError(text, f"Look at {uri}"))
    assert "s3cr" not in told
    assert "127.0.0.1" in told


def test_plain_text_stays_as_it_is() -> None:
    text = "no such table: runs (see https://mlflow.org/docs@latest?x=1)"
    assert redacted(text) == text


def test_links_of_a_server_are_without_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somebody:s3cret@tracking.example:5000")
    Store(tmp_path / "x", create=True).write_mlflow({"experiment_id": "1", "runs": {}})
    said: list[str] = []
    serve(tmp_path, say=said.append)
    assert "http://tracking.example:5000/#/experiments/1/" in said[0]
    assert "s3cret" not in "".join(said)


def test_children_are_not_told_how_to_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from ablate import child

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somebody:s3cret@127.0.0.1:5000")
    for name in ("PASSWORD", "USERNAME", "TOKEN"):
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", "s3cret")
    with child.environment(1):
        assert not [name for name, value in os.environ.items() if "s3cret" in value]


GUARDED = """
import subprocess, sys, time
from ablate import mlflow_ui
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
server = subprocess.Popen(sleep, start_new_session=True)
mlflow_ui._guard(server)
print(server.pid, flush=True)
time.sleep(1000)
"""


def test_the_ui_goes_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", GUARDED], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for_end(server)
