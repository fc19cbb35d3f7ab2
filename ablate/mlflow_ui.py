"""MLflow's own UI over the results, on the loopback address, for as long as the person looks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from ablate.mlflow_address import SYNC, TrackingError, artifact_root, default_uri, is_server
from ablate.mlflow_experiment import SILENCE
from ablate.mlflow_view import comparison_links
from ablate.redaction import without_user
from ablate.results import Store

HOST = "127.0.0.1"
DEFAULT_PORT = 5000

_SECONDS_TO_START = 180.0
_SECONDS_TO_STOP = 10.0
_STOPPING = (signal.SIGINT, signal.SIGTERM)


def serve(
    results_root: Path,
    port: int = DEFAULT_PORT,
    experiments: Sequence[str] | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Runs the UI until Ctrl-C or SIGTERM and gives the exit status. `experiments` None means all that are mirrored.

    Where `MLFLOW_TRACKING_URI` is a server, its UI is there already: then this prints the links and returns.
    """
    mirrored = _mirrored(Path(results_root), experiments)
    uri = default_uri(results_root)
    if is_server(uri):
        _say_links(without_user(uri), mirrored, say)
        return 0
    _check_possible(port)
    with tempfile.TemporaryFile() as output, _signals() as received:
        server = _start(uri, Path(results_root), port, output)
        guard = _guard(server)
        try:
            if _wait_until_healthy(server, port, output, received):
                _say_links(f"http://{HOST}:{port}", mirrored, say)
                say("Ctrl-C stops it.")
                _wait_for_end(server, output, received)
        finally:
            # First: the number of a group that has ended may be given to another.
            guard.kill()
            guard.communicate()
            _stop(server)
    return 128 + received[0]


# --- What there is to show --------------------------------------------------------------------------------------------


def _mirrored(results_root: Path, experiments: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    folders = sorted(path.parent for path in results_root.glob("*/mlflow.json"))
    found = {
        folder.name: document
        for folder in folders
        if (experiments is None or folder.name in experiments) and (document := Store(folder).compared())
    }
    if not found:
        raise TrackingError(
            f"no experiment below {results_root} is in MLflow yet.",
            f"Run one, or bring it there: {SYNC}",
        )
    return found


def _say_links(base_url: str, mirrored: Mapping[str, Mapping[str, Any]], say: Callable[[str], None]) -> None:
    for name, document in mirrored.items():
        links = comparison_links(base_url, document)
        say(f"{name}: curves and costs of all runs\n  {links['comparison']}")
        say(f"{name}: settings and numbers side by side\n  {links['table']}")


# --- The server -------------------------------------------------------------------------------------------------------


def _check_possible(port: int) -> None:
    if importlib.util.find_spec("mlflow") is None:
        raise TrackingError("MLflow is not installed.", "To have its UI: pip install mlflow")
    with socket.socket() as probe:
        # As the server binds it: a port whose last user has just gone is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise TrackingError(
                f"port {port} cannot be used: {reason}.", f"Choose another: --port {port + 1}"
            ) from error


def _start(uri: str, results_root: Path, port: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
    artifacts = artifact_root(results_root)
    environment = {
        **os.environ,
        # Not as an argument: a database's address may hold a password, and arguments are for all to see.
        "MLFLOW_BACKEND_STORE_URI": uri,
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": artifacts.as_uri(),
        "MLFLOW_ARTIFACTS_DESTINATION": artifacts.as_uri(),
        # One worker of half a gigabyte; with jobs there would be fifteen processes.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        **SILENCE,
    }
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"):
        environment.pop(name, None)
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        HOST,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


_GUARD = "import os, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), 9)"


def _guard(server: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """Ends the server and its workers where this process has no time to: it sees its end by that of a pipe."""
    command = [sys.executable, "-I", "-S", "-c", _GUARD, str(server.pid)]
    silent = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True)


def _wait_until_healthy(server: subprocess.Popen[bytes], port: int, output: IO[bytes], received: Sequence[int]) -> bool:
    """True when the UI answers, False when the person did not want to wait."""
    deadline = time.monotonic() + _SECONDS_TO_START
    while not received:
        _check_alive(server, output)
        if _answers(f"http://{HOST}:{port}/health"):
            return True
        if time.monotonic() > deadline:
            raise TrackingError(f"MLflow's UI did not answer: {_end_of(output)}", "Try again when the machine is idle.")
        time.sleep(0.2)
    return False


def _wait_for_end(server: subprocess.Popen[bytes], output: IO[bytes], received: Sequence[int]) -> None:
    while not received:
        _check_alive(server, output)
        time.sleep(0.2)


def _check_alive(server: subprocess.Popen[bytes], output: IO[bytes]) -> None:
    if server.poll() is not None:
        raise TrackingError(f"MLflow's UI ended by itself: {_end_of(output)}", "Its own words are above.")


def _answers(url: str) -> bool:
    # Past any proxy: this address is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _end_of(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode("utf-8", errors="replace").split("\n")
    return " | ".join(line.strip() for line in lines if line.strip())[-500:]


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Ends the server and its workers, which are all in its process group and no one else is."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(_SECONDS_TO_STOP)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The stopping signals that came, instead of what they do otherwise: so that the server is always stopped."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in _STOPPING}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
