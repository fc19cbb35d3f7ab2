"""A disk that is full, a folder that takes nothing: found before training where it can be, and nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import Write
from stored import CURVE, PROFILE, row

from ablate import keeping, shelf
from ablate.cli import main
from ablate.keeping import Keeper
from ablate.results import Store
from ablate.tables import write_table
from ablate.verify import verify

FAULTS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT]


def refusing(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_FIRST_PAUSE_SECONDS", 0.0)


class Disk:
    """Refuses so many writes."""

    def __init__(self, refused: int, number: int = errno.ENOSPC) -> None:
        self.left, self.number, self.written = refused, number, 0

    def write(self) -> None:
        self.left -= 1
        if self.left >= 0:
            raise refusing(self.number)
        self.written += 1


@pytest.mark.parametrize("number", FAULTS)
@pytest.mark.parametrize("refused", [0, 1, 3])
def test_what_a_disk_refuses_for_a_while_is_stored_once(
    number: int, refused: int, at_once: None, tmp_path: Path
) -> None:
    keeper, disk = Keeper(tmp_path), Disk(refused, number)
    assert keeper.put("it", disk.write) == (refused == 0)
    assert keeper.settle(lambda: False)
    assert (disk.written, keeper.lost()) == (1, [])


def test_what_is_refused_for_good_is_told_and_work_ends(
    at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, disk = Keeper(tmp_path), Disk(100)
    keeper.put("it", disk.write)
    assert keeper.settle(lambda: False), "the folder takes other files: only this one is lost"
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(refusing(errno.ENOSPC)))
    assert not keeper.settle(lambda: False)
    assert keeper.gave_up
    assert keeper.lost() == ["it: No space left on device"]


def test_whoever_is_stopped_does_not_wait(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    keeper.put("it", Disk(100).write)
    keeper.settle(lambda: True)


# --- Whole runs -------------------------------------------------------------------------------------------------------


def run(file: Path, *words: str) -> Any:
    return CliRunner().invoke(main, ["run", str(file), "--device", "cpu", "--workers", "1", *words])


def refuse_trials(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    left, write = [times], write_table

    def refusing_some(path: Path, table: Any) -> None:
        if path.parent.name == "trials" and left[0] > 0:
            left[0] -= 1
            raise refusing(errno.ENOSPC)
        write(path, table)

    monkeypatch.setattr(shelf, "write_table", refusing_some)


def test_a_run_stores_what_was_refused_and_ends_well(
    at_once: None, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_trials(monkeypatch, 2)
    done = run(write())
    assert done.exit_code == 0, done.output
    assert verify(Store(Path("results/tiny")))["faults"] == []


def test_a_run_that_cannot_store_says_so_and_the_next_does_it_again(
    at_once: None, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        refuse_trials(patched, 10**6)
        done = run(write())
    assert done.exit_code == 1, done.output
    assert "baseline seed 0: No space left on device" in done.output
    assert "Traceback" not in done.output
    done = run(Path("tiny.yaml"))
    assert done.exit_code == 0, done.output
    assert verify(Store(Path("results/tiny")))["faults"] == []


def test_a_report_that_cannot_be_written_costs_no_row(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise refusing(errno.ENOSPC)

    monkeypatch.setattr("ablate.report.write_bytes", refuse)
    done = run(write())
    assert (done.exit_code, "the report: No space left on device" in done.output) == (1, True)
    assert Store(Path("results/tiny")).load().trials["status"].tolist() == ["ok"]


def test_a_row_that_cannot_be_read_is_told_once_and_done_again(write: Write) -> None:
    assert run(write()).exit_code == 0
    (path,) = Path("results/tiny/trials").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    done = run(Path("tiny.yaml"))
    assert done.exit_code == 0, done.output
    assert done.output.count(f"trials/{path.name}: torn or damaged") == 1
    assert "1 to run" in done.output
    path.unlink()
    path.mkdir()
    done = run(Path("tiny.yaml"))
    assert (done.exit_code, done.output.splitlines()[-1]) == (2, "  move it away")


# --- Before training --------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ablate.runner.Run.carry_out", lambda *_: pytest.fail("nothing may run"))


def test_too_little_space_is_told_before_training(
    nothing_runs: None, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    done = run(write())
    lines = done.output.splitlines()
    assert (done.exit_code, len(lines)) == (2, 2)
    assert "0.0 MiB are free where at least" in lines[0]
    assert "free some space" in lines[1]
    assert not Path("results").exists()


@pytest.mark.parametrize("place", ["results", "results/tiny/curves", "reports/tiny", "reports/tiny/plots"])
@pytest.mark.parametrize("number", FAULTS)
def test_a_folder_that_takes_nothing_is_told_before_training(
    place: str, number: int, nothing_runs: None, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(place).mkdir(parents=True)
    real = Path.open

    def refuse(self: Path, *words: Any, **options: Any) -> Any:
        if str(self.parent) == place:
            raise refusing(number)
        return real(self, *words, **options)

    monkeypatch.setattr(Path, "open", refuse)
    done = run(write())
    lines = done.output.splitlines()
    assert (done.exit_code, len(lines)) == (2, 2), done.output
    assert lines[0].startswith(place)
    assert lines[0].endswith(f": no folder that can be written: {os.strerror(number)}")


# --- A real one -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of a quarter of a mebibyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "ablate", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_keeps_what_it_has(small: Path, at_once: None) -> None:
    check_a_full_place(small)


LIMITED = """
import resource, signal, sys
from pathlib import Path
from test_full_disk import check_a_full_place
check_a_full_place(Path(sys.argv[1]), limit=20_000)
"""


def test_a_limit_on_files_keeps_what_is_there(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], check=True, cwd=Path(__file__).parent)


def check_a_full_place(place: Path, limit: int | None = None) -> None:
    """Rows until no more fit, then the same again when there is room."""
    store, keeper = Store(place / "x", create=True), Keeper(place / "x")
    store.write_trial(row("a0"), CURVE, PROFILE)
    filler = place / "filler"
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    else:
        with contextlib.suppress(OSError):
            filler.write_bytes(bytes(2**20))
    config = '{"x": "' + os.urandom(20_000).hex() + '"}'
    assert not keeper.put("a0", lambda: store.write_trial(row("a0", config=config), CURVE, PROFILE))
    assert not keeper.put("a1", lambda: store.write_trial(row("a1", config=config), CURVE, PROFILE))
    found = store.load()
    assert (found.trials["trial_id"].tolist(), found.trials["config"].isna().tolist()) == (["a0"], [True])
    assert not list(store.folder.rglob("*.tmp"))
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    filler.unlink(missing_ok=True)
    keeper.last_try()
    assert keeper.lost() == []
    assert store.load().trials["trial_id"].tolist() == ["a0", "a1"]
    assert store.load().skipped == []


CHATTY = """
import resource, sys
from pathlib import Path
from ablate.child import _redirect_output
if sys.argv[2:]: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
_redirect_output(Path(sys.argv[1]))
for _ in range(1000): print("something to say")
sys.stdout.flush()
"""


@pytest.mark.parametrize("limited", [True, False])
def test_a_child_whose_log_cannot_be_written_goes_on(limited: bool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("", encoding="utf-8") if limited else log.mkdir()
    words = [sys.executable, "-c", CHATTY, str(log), *(["limited"] if limited else [])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
