"""The study of faults: its trap springs as told, what is lost is seen, and two cheap faults go through all of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import faults
import pytest
from faulting import bench, damage, tracking, trap
from faulting.bench import Bench, Case, Ended, Home, Seen, Skipped, mirror_faults
from faulting.catalogue import FAULTS, Fault, at, moment, some
from faulting.page import Row, page

# --- The trap ---------------------------------------------------------------------------------------------------------

Trapped = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def trapped(tmp_path: Path) -> Trapped:
    """Runs a few lines in an interpreter with the trap in it; `root` is where writes count."""
    (tmp_path / "site").mkdir()
    (tmp_path / "root").mkdir()
    shutil.copy(str(trap.__file__), tmp_path / "site/sitecustomize.py")

    def run(lines: str, **given: Any) -> subprocess.CompletedProcess[str]:
        told = {"notes": str(tmp_path / "notes"), "roots": [str(tmp_path / "root")], **given}
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "ABLATE_TRAP": json.dumps(told)}
        begin = "import os, time, datetime, pathlib\nroot = pathlib.Path('root')\n"
        command = [sys.executable, "-c", begin + lines]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


def notes(folder: Path) -> list[tuple[str, str, bool]]:
    said = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    return [(each["operation"], each["role"], each["sprung"]) for each in said]


THREE = """
for name in ("a.txt", "a.txt", "b.txt"):
    try:
        with (root / name).open("w") as file:
            file.write("12345678")
        print("written")
    except OSError as error:
        print(error.errno)
"""


def test_an_operation_fails_once(trapped: Trapped, tmp_path: Path) -> None:
    done = trapped(THREE, **at(moment("parent", "write", "root/a.txt", nth=2), errno=errno.ENOSPC))
    assert done.stdout.splitlines() == ["written", str(errno.ENOSPC), "written"], done.stderr
    assert notes(tmp_path) == [
        ("open", "root/a.txt", False),
        ("write", "root/a.txt", False),
        ("open", "root/a.txt", False),
        ("write", "root/a.txt", True),
        ("write", "root/a.txt", False),  # what is closed then tries again
        ("open", "root/b.txt", False),
        ("write", "root/b.txt", False),
    ]


OTHERS = """
for name, call in {
    "replace": lambda: os.replace("root/from", "root/to"),
    "mkdir": lambda: (root / "folder").mkdir(),
    "link": lambda: os.link("root/from", "root/linked"),
    "open": lambda: os.close(os.open("root/new", os.O_WRONLY | os.O_CREAT)),
    "outside": lambda: pathlib.Path("outside").write_text("x"),
    "read": lambda: (root / "from").read_text(),
}.items():
    try:
        call()
        print(name)
    except OSError as error:
        print(error.errno)
"""


def test_everything_that_writes_there_fails_as_long_as_it_lasts(trapped: Trapped, tmp_path: Path) -> None:
    (tmp_path / "root/from").write_text("x")
    lasting = at(moment("parent", "replace", "root/to"), errno=errno.EROFS, lasts=True)
    done = trapped(OTHERS, **lasting)
    assert done.stdout.splitlines() == [str(errno.EROFS)] * 4 + ["outside", "read"], done.stderr


def test_without_a_moment_nothing_is_changed(trapped: Trapped, tmp_path: Path) -> None:
    (tmp_path / "root/from").write_text("x")
    assert trapped(OTHERS).stdout.split() == [
        "replace",
        "mkdir",
        str(errno.ENOENT),
        "open",
        "outside",
        str(errno.ENOENT),
    ]


def test_the_clock_jumps_and_seconds_go_on(trapped: Trapped, tmp_path: Path) -> None:
    (tmp_path / "site/ablate").mkdir()
    (tmp_path / "site/ablate/__init__.py").touch()
    (tmp_path / "site/ablate/clock.py").write_text("from datetime import datetime\n")
    lines = """
from ablate import clock
before = time.time(), datetime.datetime.now(datetime.UTC), time.monotonic()
(root / "a").write_text("x")
now = clock.datetime.now(datetime.UTC)
print(round((time.time() - before[0]) / 3600), round((now - before[1]).total_seconds() / 3600))
print(time.monotonic() - before[2] < 600, isinstance(now, clock.datetime), isinstance(5, clock.datetime))
"""
    done = trapped(lines, **at(moment("parent", "open", "root/a"), clock=5 * 3600.0))
    assert done.stdout.split() == ["5", "5", "True", "True", "False"], done.stderr


def test_a_signal_is_sent(trapped: Trapped) -> None:
    sent = at(moment("parent", "mkdir", "root/x"), signal=int(signal.SIGTERM), to=["parent"])
    assert trapped("(root / 'x').mkdir()\ntime.sleep(60)", **sent).returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/r/results/e/trials/0123456789abcdef.parquet", "results/e/trials/ID.parquet"),
        ("/r/results/e/.experiment.json.0123456789abcdef0123456789abcdef.tmp", "results/e/experiment.json"),
        ("/r/results/e/repeats/0123456789abcdef-12.parquet", "results/e/repeats/ID-N.parquet"),
        (
            "/r/results/e/checkpoints/0123456789abcdef/step-000000000004.safetensors",
            "results/e/checkpoints/ID/step-ID.safetensors",
        ),
        ("/r/results", "results"),
        ("/r/results-of-others/x", None),
    ],
)
def test_what_a_file_is(path: str, name: str | None) -> None:
    assert trap.role(path, ["/r/results"]) == name


# --- What is seen -----------------------------------------------------------------------------------------------------


def database(path: Path, runs: list[tuple[str, str, str]]) -> Path:
    with sqlite3.connect(path) as opened:
        opened.execute("create table experiments (experiment_id integer, name text)")
        opened.execute("create table runs (run_uuid text, status text, lifecycle_stage text, experiment_id integer)")
        opened.execute("create table tags (run_uuid text, key text, value text)")
        opened.execute("insert into experiments values (1, 'faults')")
        for number, (trial, status, stage) in enumerate(runs):
            opened.execute("insert into runs values (?, ?, ?, 1)", [str(number), status, stage])
            opened.execute("insert into tags values (?, 'ablate.trial_id', ?)", [str(number), trial])
    opened.close()
    return path


def test_the_mirror_holds_each_trial_once_and_finished(tmp_path: Path) -> None:
    good = database(tmp_path / "good.db", [("a", "FINISHED", "active"), ("a", "RUNNING", "deleted")])
    assert mirror_faults(good, ["a"]) == []
    assert mirror_faults(good, ["a", "b"]) == ["MLflow: 1 x ('b', 'FINISHED')"]
    twice = database(tmp_path / "twice.db", [("a", "FINISHED", "active"), ("a", "RUNNING", "active")])
    assert mirror_faults(twice, ["a"]) == ["MLflow: 1 x ('a', 'RUNNING')"]
    assert len(mirror_faults(tmp_path / "missing.db", ["a"])) == 1


@pytest.mark.parametrize("way", damage.DAMAGE)
def test_each_damage_is_one(tmp_path: Path, way: str) -> None:
    for name, content in (("a", b"first of these files" * 9), ("b", b"second of these files")):
        (tmp_path / "kind").mkdir(exist_ok=True)
        (tmp_path / f"kind/{name}.parquet").write_bytes(content)
    path = tmp_path / "kind/a.parquet"
    damage.DAMAGE[way](path)
    assert not path.is_file() or path.read_bytes() != b"first of these files" * 9
    assert (tmp_path / "kind/b.parquet").read_bytes() == b"second of these files"


def some_fault() -> Fault:
    return FAULTS["SIGTERM"]


def seen(moment: str = "training", *, wrong: tuple[str, ...] = (), lost: tuple[str, ...] = ()) -> Seen:
    return Seen(moment, 143, 1.0, "1 interrupted | report: x", "1 interrupted", list(wrong), list(lost))


def test_the_table_says_what_was_kept_and_what_was_lost() -> None:
    kept = Row(some_fault(), [seen(), seen("gates")])
    assert kept.cells()[-1] == "kept"
    assert kept.cells()[2:4] == ["2", "143"]
    bad = Row(some_fault(), [seen(), seen("gates", lost=("curves differ",)), seen("profile", wrong=("a traceback",))])
    assert bad.cells()[-1] == "**lost: 1**; **otherwise than expected: 1**"
    skipped = Row(some_fault(), skipped=["root may write everything"])
    assert skipped.cells()[-1] == "not injected: root may write everything"
    text = page([kept, bad, skipped], Ended(0, 9.0, "", [], []), left=2)
    assert "3 of 5 moments" in text
    assert "- SIGTERM, gates: curves differ" in text
    assert "- SIGTERM, profile: a traceback" in text
    table = [line for line in text.splitlines() if line.startswith("| SIGTERM")]
    assert len(table) == 3
    assert {line.replace("\\|", "").count("|") for line in table} == {8}


def test_a_sample_has_all_or_some_and_never_none() -> None:
    assert some([1, 2, 3], 1) == [1, 2, 3]
    assert some([1, 2, 3, 4], 3, 1) == [2]
    assert some([1, 2], 9, 7) == [2]
    assert some([], 3) == []


# --- The gate before a tracking server --------------------------------------------------------------------------------


class _Well(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def gate() -> Iterator[tracking.Gate]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Well) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        before = tracking.Gate(f"http://127.0.0.1:{server.server_port}")
        yield before
        before.end()
        server.shutdown()
        thread.join()


def asked(gate: tracking.Gate) -> tuple[int, bytes] | str:
    try:
        with urllib.request.urlopen(gate.uri, timeout=0.5) as found:
            return found.status, found.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""
    except OSError as error:
        return type(error).__name__


def test_a_gate_is_in_trouble_after_so_many_requests(gate: tracking.Gate) -> None:
    gate.trouble, gate.after = "error 500", 1
    assert [asked(gate), asked(gate)] == [(200, b"{}"), (500, b"")]
    gate.trouble = "garbage"
    assert b"hotel" in asked(gate)[1]  # type: ignore[operator]
    gate.trouble = "refuses"
    assert isinstance(asked(gate), str)
    gate.trouble = ""
    assert asked(gate) == (200, b"{}")


# --- All of it --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One trial without a profile."""
    with pytest.MonkeyPatch.context() as patch:
        kept = [line for line in bench.EXPERIMENT.splitlines() if not line.startswith(("profile", "variants"))]
        patch.setattr(bench, "EXPERIMENT", "\n".join(kept) + "\n")
        made = Bench(tmp_path_factory.mktemp("faults") / "bench")
        made.cache = Path(os.environ["ABLATE_CACHE"])
        with made.ending:
            yield made


def test_a_full_disk_and_a_damaged_table_go_through_all_of_it(tried: Bench, tmp_path: Path) -> None:
    def full(_: Bench) -> list[Case]:
        """Full."""
        given = at(moment("parent", "replace", ".*/curves/.*"), errno=errno.ENOSPC)
        return [Case("curves", (0, 1, 2), given, again=("--retry-failed",), steps_again=None)]

    def damaged(_: Bench) -> list[Case]:
        """Damaged."""
        return list(damage._of("trials/*.parquet", ["cut in half"]))

    def impossible(_: Bench) -> list[Case]:
        """Impossible."""
        raise Skipped("not here")

    out = tmp_path / "faults.md"
    chosen = [Fault(each.__name__, each) for each in (full, damaged, impossible)]
    rows = faults.study(tried, chosen, 1, out)
    text = out.read_text(encoding="utf-8")
    assert [(len(row.seen), row.skipped) for row in rows] == [(1, []), (1, []), (0, ["not here"])]
    assert rows[1].cells()[-1] == "kept", text
    assert rows[0].seen[0].lost == [], text
    assert str(tmp_path) not in text


def test_what_is_not_there_is_lost(tried: Bench) -> None:
    home = tried.home("lacking", "undisturbed")
    assert tried.lost(home, Case("")) == []
    home.one("curves/*.parquet").unlink()
    (home.store / ".left.tmp").touch()
    assert {"curves differ", "left over: .left.tmp"} <= set(tried.lost(home, Case("")))
    assert tried.lost(Home(tried.folder / "nothing"), Case("")) != []
