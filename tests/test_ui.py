"""The UI comes up over a store, shows what the record holds, and goes when it is told to."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ablate.mlflow_address import TrackingError
from ablate.mlflow_ui import serve
from ablate.results import Store
from ablate.tracking import Tracker

# More runs than MLflow shows unless it is told to.
VARIANTS = {"baseline": 4096, "gqa": 1024, "mqa": 512, "mla": 640, "linear": 0, "window": 777}
SEEDS = (0, 1)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def write_store(root: Path, earlier: Sequence[str] = ()) -> Store:
    store = Store(root / "small", create=True)
    variants = []
    for place, (name, cache) in enumerate({**VARIANTS, **dict.fromkeys(earlier, 9999)}.items()):
        trials = {str(seed): f"{place}{seed}" for seed in SEEDS}
        variants.append({"name": name, "is_baseline": not place, "changes": {}, "trials": trials})
        for seed in SEEDS:
            losses = [4.0 - 0.5 * step + 0.1 * place for step in range(4)]
            row = {"trial_id": f"{place}{seed}", "variant": name, "seed": seed, "status": "ok", "steps": 3}
            curve = {"step": range(4), "split": ["val"] * 4, "metric": ["loss"] * 4, "value": losses}
            store.write_trial({**row, "val_loss": losses[-1], "kv_cache_bytes_per_token": cache}, curve, {})
    store.write_experiment({"name": "small", "question": None, "variants": variants})
    return store


@dataclass
class Page:
    """A UI that runs."""

    store: Store
    process: subprocess.Popen[str]
    port: int
    said: list[str]


SCRIPT = """
import sys
from pathlib import Path
from ablate.mlflow_ui import serve
sys.exit(serve(Path(sys.argv[1]), int(sys.argv[2]), say=lambda text: print(text, flush=True)))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    root = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        store, port = write_store(root, earlier=["another recipe"]), free_port()
        Tracker.connect(root, store).sync()
        write_store(root)
        Tracker.connect(root, store)
        command = [sys.executable, "-c", SCRIPT, str(root), str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line.strip())
        if "Ctrl-C" in line:
            break
    yield Page(store, process, port, said)
    # Not killed: it has a server to stop.
    process.terminate()
    process.wait(timeout=60)
    process.stdout.close()


def ask(page: Page, path: str, body: dict[str, Any] | None = None) -> bytes:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(
        f"http://127.0.0.1:{page.port}{path}", data=data, headers={"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        content: bytes = answer.read()
        return content


def test_it_answers_and_prints_the_links_of_each_experiment(page: Page) -> None:
    assert ask(page, "/health") == b"OK"
    assert b"<html" in ask(page, "/")
    experiment = page.store.mlflow()["experiment_id"]  # type: ignore[index]
    links = [line for line in page.said if line.startswith("http")]
    assert links[0] == (
        f"http://127.0.0.1:{page.port}/#/experiments/{experiment}/runs"
        "?workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey=ablate"
    )
    assert "/#/compare-runs?runs=" in links[1]
    assert links[1].count("%2C") == len(VARIANTS) * len(SEEDS) - 1


def test_it_serves_the_records_numbers(page: Page) -> None:
    experiment = page.store.mlflow()["experiment_id"]  # type: ignore[index]
    found = json.loads(ask(page, "/api/2.0/mlflow/runs/search", {"experiment_ids": [experiment]}))["runs"]
    shown = {
        run["info"]["run_name"]: {metric["key"]: metric["value"] for metric in run["data"]["metrics"]} for run in found
    }
    trials = page.store.load().trials
    assert len(trials) == len(VARIANTS) * len(SEEDS)
    # What was run earlier under the same name stays.
    assert len(shown) == len(trials) + len(SEEDS)
    for row in trials.itertuples():
        metrics = shown[f"{row.variant} seed={row.seed}"]
        assert metrics["val_loss"] == row.val_loss
        assert metrics["kv_cache_bytes_per_token"] == row.kv_cache_bytes_per_token


def test_it_serves_the_curves(page: Page) -> None:
    run_id = page.store.mlflow()["runs"]["00"]  # type: ignore[index]
    history = json.loads(ask(page, f"/api/2.0/mlflow/metrics/get-history?run_id={run_id}&metric_key=val_loss"))
    assert [point["value"] for point in history["metrics"]] == [4.0, 3.5, 3.0, 2.5]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: the page itself is not looked at")
def test_the_comparison_page_draws_each_curve_and_cache_size(page: Page, tmp_path: Path) -> None:
    link = next(line for line in page.said if line.startswith("http"))
    command = [
        str(CHROMIUM),
        *["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"],
        *["--disable-background-networking", "--disable-component-update", "--window-size=1400,1400"],
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=60000",
        "--dump-dom",
        link,
    ]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120, check=True)
    dom = done.stdout
    first_section = dom[: dom.index("Model metrics")]
    runs = [f"{name} seed={seed}" for name in VARIANTS for seed in SEEDS]
    assert [run for run in runs if f"{run} (val_loss)" not in dom] == []
    assert "another recipe" not in dom
    assert "val_loss" in first_section
    assert "kv_cache_bytes_per_token" in first_section
    drawn = re.findall(r">([\d.]+)</text>", dom)
    assert [cache for cache in VARIANTS.values() if cache and f"{cache}.00" not in drawn] == []
    assert len(re.findall(r'class="trace scatter', dom)) >= len(runs)


def test_a_taken_port_is_named_with_its_cure(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(TrackingError, match=f"port {page.port} cannot be used") as caught:
        serve(page.store.folder.parent, page.port)
    assert "--port" in caught.value.cure


def test_it_goes_with_all_its_processes(page: Page) -> None:
    """The last test of the page: it ends it."""
    children = Path(f"/proc/{page.process.pid}/task/{page.process.pid}/children")
    servers = [int(pid) for pid in children.read_text(encoding="utf-8").split()] if children.exists() else []
    page.process.send_signal(signal.SIGTERM)
    assert page.process.wait(timeout=60) == 128 + signal.SIGTERM
    for server in servers:
        with pytest.raises(ProcessLookupError):
            os.killpg(server, 0)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", page.port))


def test_without_a_mirrored_experiment_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="in MLflow yet") as caught:
        serve(tmp_path)
    assert "python -m ablate sync" in caught.value.cure


def test_only_the_experiments_asked_for_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example:5000")
    for number, name in enumerate(("first", "second", "third")):
        Store(tmp_path / name, create=True).write_mlflow({"experiment_id": str(number), "runs": {}})
    said: list[str] = []
    # A tracking server has its UI already: no process is started.
    assert serve(tmp_path, experiments=["second", "third"], say=said.append) == 0
    assert [text.split(":")[0] for text in said] == ["second", "second", "third", "third"]
    assert "http://tracking.example:5000/#/experiments/1/" in said[0]


def test_a_server_that_ends_at_once_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Store(tmp_path / "x", create=True).write_mlflow({"experiment_id": "1", "runs": {}})
    liar = tmp_path / "python"
    liar.write_text("#!/bin/sh\necho no such table\nexit 3\n", encoding="utf-8")
    liar.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(liar))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TrackingError, match="no such table"):
        serve(tmp_path, free_port())
    assert signal.getsignal(signal.SIGTERM) is before
