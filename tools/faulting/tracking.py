"""MLflow in trouble: a server in front of which stands a gate that fails in each way, and a database that does."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import socketserver
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ablate.results import load
from faulting.bench import LIMIT_SECONDS, NAME, Bench, Case, Home, Skipped, check_permissions_hold, mirror_faults
from faulting.catalogue import at, fault, moment
from faulting.signals import until

_START_SECONDS = 300.0
_SLOW_SECONDS = 1.0
_HOST = "127.0.0.1"
_PASSED_ON = ("Content-Type", "Accept")


# --- A server and the gate before it ----------------------------------------------------------------------------------


class Gate(ThreadingHTTPServer):
    """Passes on what it is asked, until `after` requests; from then on it is in trouble."""

    daemon_threads = True

    def __init__(self, behind: str) -> None:
        super().__init__((_HOST, 0), _Handler)
        self.behind, self.trouble, self.after, self.asked = behind, "", 0, 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who went away is of no interest."""

    @property
    def uri(self) -> str:
        """Where it stands."""
        return f"http://{_HOST}:{self.server_address[1]}"

    def end(self) -> None:
        """It stands there no more."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Gate

    def log_message(self, format: str, *args: Any) -> None:
        """Not a word."""

    def answer(self) -> None:
        """As the real one, or not at all."""
        self.server.asked += 1
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        trouble = self.server.trouble if self.server.asked > self.server.after else ""
        if trouble == "refuses":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif trouble == "hangs":
            time.sleep(600)
        elif trouble == "error 500":
            self._send(500, b'{"error_code": "INTERNAL_ERROR", "message": "out of order"}', "application/json")
        elif trouble == "garbage":
            self._send(200, b"<html>Welcome to the hotel's network</html>", "text/html")
        else:
            time.sleep(_SLOW_SECONDS if trouble == "slow" else 0)
            self._pass_on(body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

    def _pass_on(self, body: bytes) -> None:
        headers = {name: self.headers[name] for name in _PASSED_ON if self.headers[name]}
        asked = urllib.request.Request(self.server.behind + self.path, body or None, headers, method=self.command)
        try:
            with urllib.request.urlopen(asked, timeout=120) as found:
                self._send(found.status, found.read(), found.headers.get("Content-Type", ""))
        except urllib.error.HTTPError as error:
            self._send(error.code, error.read(), error.headers.get("Content-Type", ""))

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server:
    """A real MLflow server for as long as this process lives."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.database = folder / "mlflow.db"
        with socketserver.TCPServer((_HOST, 0), socketserver.BaseRequestHandler) as free:
            port = free.server_address[1]
        environment = {
            **os.environ,
            "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{self.database}",
            "MLFLOW_ARTIFACTS_DESTINATION": (folder / "artifacts").as_uri(),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        environment.pop("MLFLOW_TRACKING_URI", None)
        command = [sys.executable, "-m", "mlflow", "server", f"--host={_HOST}", f"--port={port}", "--workers=1"]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.uri = f"http://{_HOST}:{port}"
        self._wait(folder / "log")

    def _wait(self, log: Path) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                return
            time.sleep(0.3)
        raise Skipped(f"no MLflow server could be started: {log.read_text(errors='replace')[-200:]}")

    def end(self) -> None:
        """It is needed no more."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def forget(self, name: str) -> None:
        """The experiment makes room for the next one of its name."""
        query = urllib.request.Request(f"{self.uri}/api/2.0/mlflow/experiments/get-by-name?experiment_name={NAME}")
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(query, timeout=60) as found:
            number = json.load(found)["experiment"]["experiment_id"]
            body = json.dumps({"experiment_id": number, "new_name": name}).encode()
            headers = {"Content-Type": "application/json"}
            update = urllib.request.Request(f"{self.uri}/api/2.0/mlflow/experiments/update", body, headers)
            urllib.request.urlopen(update, timeout=60).close()


TROUBLE = ("refuses", "hangs", "error 500", "garbage", "slow")


@fault
def a_tracking_server_in_trouble(bench: Bench) -> Iterable[Case]:
    """From the first request, or in the middle of a run: training goes on, and the next run brings it up to date."""
    server = Server(bench.folder / "server")
    bench.ending.callback(server.end)
    for after, when in ((0, "from the start"), (25, "in the middle")):
        for trouble in TROUBLE:
            gate = Gate(server.uri)
            gate.trouble, gate.after = trouble, after
            yield _before(server, gate, f"{trouble} {when}", gate.uri)
    yield _before(server, Gate(server.uri), "nothing listens there", f"http://{_HOST}:1")


def _before(server: Server, gate: Gate, name: str, uri: str) -> Case:
    return Case(
        name,
        environment={"MLFLOW_TRACKING_URI": uri},
        mended={"MLFLOW_TRACKING_URI": gate.uri},
        mend=partial(_open, gate),
        check=partial(_mirrored, server),
        close=partial(_close, server, gate),
        in_turn=True,
        in_time=True,
    )


def _open(gate: Gate, home: Home) -> None:
    gate.trouble = ""


def _close(server: Server, gate: Gate, home: Home) -> None:
    gate.end()
    server.forget(home.folder.name)


def _mirrored(server: Server, home: Home) -> list[str]:
    return mirror_faults(server.database, list(load(home.store).trials["trial_id"]))


# --- The database among the results -----------------------------------------------------------------------------------


@fault
def the_tracking_database_in_trouble(bench: Bench) -> Iterable[Case]:
    """Locked, damaged, removed or read-only, or runs in it: training goes on, and what is missing is written again."""
    start = bench.mirrored()
    removed = at(moment("parent", "replace", ".*/trials/.*"), remove="results/mlflow.db")
    yield _own("locked during the run", has_database=True, meanwhile=_locked)
    yield _own("removed in the middle", has_database=True, given=removed)
    yield _own("flipped bytes", before=partial(_prepared, bench, start, _flipped), mend=_moved_away)
    yield _own("empty", before=partial(_prepared, bench, start, _emptied))
    yield _own("read-only", before=partial(_prepared, bench, start, _read_only), mend=_writable)
    yield _own("a folder", before=_folder, mend=_moved_away)
    yield _own("mlflow.json damaged", start=start, before=_damaged)
    yield _own("a run left RUNNING", start=start, before=partial(_changed, "status = 'RUNNING'"))
    yield _own("the experiment deleted", start=start, before=_deleted, mend=partial(_experiment, "active"))
    yield _own("a run deleted", start=start, before=partial(_changed, "lifecycle_stage = 'deleted'"))


def _own(name: str, **more: Any) -> Case:
    return Case(name, environment={}, in_time=True, **more)


def _database(home: Home) -> Path:
    return home.results / "mlflow.db"


def _locked(home: Home, running: subprocess.Popen[bytes]) -> None:
    """Somebody else writes, from when the first trial is stored until the run has ended."""
    until(lambda: any(home.store.glob("trials/*.parquet")), running)
    with contextlib.closing(sqlite3.connect(_database(home), timeout=30)) as database:
        with contextlib.suppress(sqlite3.Error):
            database.execute("begin exclusive")
        running.wait(LIMIT_SECONDS)


def _prepared(bench: Bench, start: str, damage: Callable[[Path], object], home: Home) -> None:
    """A database that was in use, for a run that begins."""
    home.results.mkdir(parents=True)
    shutil.copy(_database(Home(bench.folder / start)), _database(home))
    damage(_database(home))


def _flipped(database: Path) -> None:
    content = bytearray(database.read_bytes())
    for place in range(4096, len(content), 8192):
        content[place : place + 64] = bytes(255 - each for each in content[place : place + 64])
    database.write_bytes(content)


def _emptied(database: Path) -> None:
    database.write_bytes(b"")


def _read_only(database: Path) -> None:
    check_permissions_hold()
    database.chmod(0o444)


def _writable(home: Home) -> None:
    _database(home).chmod(0o644)


def _folder(home: Home) -> None:
    _database(home).mkdir(parents=True)


def _moved_away(home: Home) -> None:
    """As the cure says."""
    _database(home).rename(home.folder / "moved.db")


def _damaged(home: Home) -> None:
    (home.store / "mlflow.json").write_text('{"experiment_id": ', encoding="utf-8")


def _deleted(home: Home) -> None:
    """The experiment, before a trial is done again."""
    _experiment("deleted", home)
    home.one("trials/*.parquet").unlink()


def _experiment(stage: str, home: Home) -> None:
    """As it is done in the UI."""
    with contextlib.closing(sqlite3.connect(_database(home))) as database:
        database.execute("update experiments set lifecycle_stage = ? where name = ?", [stage, NAME])
        database.commit()


def _changed(change: str, home: Home) -> None:
    """A run in the database, as after a kill or as somebody did by hand; its trial is to be done again."""
    with contextlib.closing(sqlite3.connect(_database(home))) as database:
        database.execute(f"update runs set {change} where run_uuid = (select min(run_uuid) from runs)")
        database.commit()
    home.one("trials/*.parquet").unlink()
