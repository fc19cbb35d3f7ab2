"""Leases: held by one at a time, dead with their owner, and never taken away from who lives."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ablate import lease
from ablate.lease import Holder, Leases, living, others_here

SHORT = 0.6
"""Seconds of standing still after which a holder is dead, in tests."""

HOLD = """
import sys
from pathlib import Path
from ablate.lease import Leases
held = Leases(Path(sys.argv[1]), float(sys.argv[2])).take("a1", "work")
print("held" if held else "none", flush=True)
sys.stdin.readline()
print(held.renew(), flush=True)
held.release()
print("released", flush=True)
sys.stdin.readline()
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python processes, none of which outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *arguments]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def holder(folder: Path, start: Start, seconds: float = SHORT) -> subprocess.Popen[str]:
    process = start(HOLD, str(folder), str(seconds))
    assert said(process) == "held"
    return process


def put(folder: Path, **changed: Any) -> Path:
    """A lease that nobody renews, as another process would have left it."""
    folder.mkdir(exist_ok=True)
    path = folder / "a1.json"
    found = Holder(**{**vars(Holder.new("work")), **changed})
    path.write_bytes(found.content(7))
    return path


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- Held by one ------------------------------------------------------------------------------------------------------


def test_one_holds_it_until_it_is_released(tmp_path: Path) -> None:
    mine, theirs = Leases(tmp_path / "leases"), Leases(tmp_path / "leases")
    held = mine.take("a1", "work")
    assert held
    assert theirs.take("a1") is None
    assert theirs.take("a2"), "another name is another's business"
    assert theirs.holder("a1") == f"process {os.getpid()} on {held.holder.host}"
    held.release()
    assert held.path
    assert not held.path.exists()
    with theirs.take("a1") or pytest.fail("it was released") as again:
        assert again.renew()
    assert held.renew() is False
    held.release()
    assert files(tmp_path / "leases") == ["a2.json"]


def test_the_file_is_json_and_its_counter_moves(tmp_path: Path) -> None:
    held = Leases(tmp_path, SHORT).take("a1", "gqa seed 0")
    assert held
    assert held.path
    counts = set()
    deadline = time.monotonic() + 60
    while len(counts) < 3 and time.monotonic() < deadline:
        counts.add(json.loads(held.path.read_text(encoding="utf-8"))["renewed"])
        time.sleep(0.01)
    told = json.loads(held.path.read_text(encoding="utf-8"))
    held.release()
    assert len(counts) == 3
    assert (told["pid"], told["what"], told["token"]) == (os.getpid(), "gqa seed 0", held.holder.token)


def test_who_lives_and_renews_it_keeps_it(tmp_path: Path, start: Start) -> None:
    process = holder(tmp_path, start)
    watching, until = Leases(tmp_path, SHORT), time.monotonic() + 3 * SHORT
    while time.monotonic() < until:
        assert watching.take("a1") is None
        time.sleep(0.02)
    say(process)
    assert said(process) == "True"
    assert watching.wait("a1")


# --- Dead ones --------------------------------------------------------------------------------------------------------


def test_who_was_killed_holds_nothing_at_once(tmp_path: Path, start: Start) -> None:
    process = holder(tmp_path, start, seconds=1e6)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert list(living(tmp_path)) == [], "though its parent has not cleared it away yet"
    with Leases(tmp_path, 1e6).take("a1") or pytest.fail("it is dead"):
        assert files(tmp_path) == ["a1.json"]


@pytest.mark.parametrize("changed", [{"started": "1"}, {"pid": 2**31 - 1}], ids=["another process", "no process"])
def test_a_process_of_the_same_number_is_not_the_holder(tmp_path: Path, changed: dict[str, Any]) -> None:
    put(tmp_path, **changed)
    assert list(living(tmp_path)) == []
    assert Leases(tmp_path, 1e6).take("a1")


def taken_after(leases: Leases, monkeypatch: pytest.MonkeyPatch, step: float) -> float:
    """How much time an observer sees go by until it gets the lease, looking every `step` seconds."""
    now = [1000.0]
    monkeypatch.setattr(lease.time, "monotonic", lambda: now[0])
    while leases.take("a1") is None:
        now[0] += step
        assert now[0] < 10_000
    return now[0] - 1000


FOREIGN = {
    "empty": b"",
    "torn": Holder.new("work").content(3)[:40],
    "foreign": b'{"pid": "me"}',
    "a list": b"[1, 2]",
    "binary": bytes(range(256)),
    "a token that is a path": Holder(**{**vars(Holder.new("")), "token": "../../up"}).content(1),
    "a pid that is none": Holder(**{**vars(Holder.new("")), "pid": -1}).content(1),
    "deep": b"[" * 60_000,
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_what_is_no_lease_is_dead_when_it_has_stood_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / "a1.json").write_bytes(content)
    assert list(living(tmp_path)) == []
    assert Leases(tmp_path).holder("a1") == "somebody who does not say who"
    assert 60 <= taken_after(Leases(tmp_path), monkeypatch, 1.0) <= 62
    assert files(tmp_path) == ["a1.json"]


OTHER = [{"host": "elsewhere"}, {"boot": "another start, or another container"}, {"boot": ""}]


@pytest.mark.parametrize("changed", OTHER, ids=["host", "boot", "unknown"])
def test_of_a_process_elsewhere_only_the_counter_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    put(tmp_path, pid=2**31 - 1, **changed)
    assert [each.is_here() for each in living(tmp_path)] == [False]
    assert 60 <= taken_after(Leases(tmp_path), monkeypatch, 1.0) <= 62


def test_where_no_start_of_the_system_is_known_only_the_counter_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "boot", lambda: "")
    put(tmp_path, pid=2**31 - 1)
    assert 60 <= taken_after(Leases(tmp_path), monkeypatch, 1.0) <= 62


def test_a_renewal_begins_the_time_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, leases, now = put(tmp_path, host="elsewhere"), Leases(tmp_path), [0.0]
    monkeypatch.setattr(lease.time, "monotonic", lambda: now[0])
    found = Holder.read(path.read_bytes())
    assert found
    for count in range(100):
        path.write_bytes(found.content(count))
        for _ in range(20):
            assert leases.take("a1") is None
            now[0] += 2.5


def test_time_in_which_nobody_watched_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both may have been stopped, by a suspended laptop or Ctrl-Z: who wakes up first must not take all."""
    put(tmp_path, host="elsewhere")
    assert taken_after(Leases(tmp_path), monkeypatch, 100.0) == 1200


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_jump_of_the_clock_changes_nothing(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    process = holder(tmp_path, start, seconds=60)
    path, now = tmp_path / "a1.json", time.time()
    monkeypatch.setattr(lease.time, "time", lambda: now + hours * 3600)
    os.utime(path, (now - hours * 3600,) * 2)
    leases = Leases(tmp_path)
    for _ in range(5):
        assert leases.take("a1") is None
        time.sleep(0.01)
    assert [each.pid for each in living(tmp_path)] == [process.pid]


# --- Stopped, and taken over ------------------------------------------------------------------------------------------


def test_who_was_stopped_for_too_long_notices(tmp_path: Path, start: Start) -> None:
    process = holder(tmp_path, start)
    process.send_signal(signal.SIGSTOP)
    assert [each.pid for each in living(tmp_path)] == [process.pid], "it still says so"
    mine = Leases(tmp_path, SHORT).wait("a1", "mine")
    assert mine
    say(process)
    process.send_signal(signal.SIGCONT)
    assert said(process) == "False"
    assert said(process) == "released"
    assert mine.renew(), "what was taken over is not touched by who had it, which gives it back"
    assert files(tmp_path) == ["a1.json"]
    mine.release()


def test_who_was_stopped_and_not_taken_over_goes_on(tmp_path: Path, start: Start) -> None:
    process = holder(tmp_path, start)
    process.send_signal(signal.SIGSTOP)
    time.sleep(2 * SHORT)
    say(process)
    process.send_signal(signal.SIGCONT)
    assert said(process) == "True"


def test_who_renews_it_at_the_last_moment_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, host="elsewhere")
    found, leases, now = Holder.read(path.read_bytes()), Leases(tmp_path), [0.0]
    assert found
    monkeypatch.setattr(lease.time, "monotonic", lambda: now[0])
    create = lease._create

    def renewed(at: Path, content: bytes) -> bool:
        if at.name.startswith(".a1"):
            path.write_bytes(found.content(8))
        return create(at, content)

    monkeypatch.setattr(lease, "_create", renewed)
    for _ in range(20):
        assert leases.take("a1") is None
        now[0] += 5
        if now[0] > 70:
            path.write_bytes(found.content(9))
    assert Holder.read(path.read_bytes()) == found


def test_what_came_in_its_place_is_put_back(tmp_path: Path) -> None:
    path = put(tmp_path, host="elsewhere")
    content = path.read_bytes()
    assert not lease._remove(path, "0" * 32, "1" * 32)
    assert path.read_bytes() == content
    assert files(tmp_path) == ["a1.json"]


# --- Of many exactly one ----------------------------------------------------------------------------------------------

CONTEND = """
import os, sys, time
from pathlib import Path
from ablate import lease
folder, dies, links = Path(sys.argv[1]), sys.argv[2] == "dies", sys.argv[3] == "links"
if not links:
    def refuse(*_): raise PermissionError(1, "Operation not permitted")
    os.link = refuse
leases = lease.Leases(folder / "leases", 1e6)
print("ready", flush=True)
sys.stdin.readline()
for turn in range(40):
    while (held := leases.take("a1", "work")) is None:
        time.sleep(0.0005)
    os.close(os.open(folder / "in", os.O_CREAT | os.O_EXCL))  # raises where another is in
    with open(folder / "turns", "a") as file:
        file.write(f"{os.getpid()}\\n")
    os.unlink(folder / "in")
    if not held.renew():
        raise SystemExit("lost")
    if dies:
        held._released.set()
        gone = lease.Holder(**{**vars(held.holder), "started": "1"})
        held.path.write_bytes(gone.content(1))
    else:
        held.release()
"""


@pytest.mark.parametrize("links", ["links", "no links"])
@pytest.mark.parametrize("end", ["dies", "releases"])
def test_of_many_exactly_one_holds_it(tmp_path: Path, start: Start, end: str, links: str) -> None:
    """Each turn ends with a death, or a release, that all others see at once."""
    processes = [start(CONTEND, str(tmp_path), end, links) for _ in range(6)]
    for process in processes:
        assert said(process) == "ready"
    for process in processes:
        say(process)
    assert [process.wait(240) for process in processes] == [0] * 6
    turns = (tmp_path / "turns").read_text(encoding="utf-8").split()
    assert {turns.count(str(process.pid)) for process in processes} == {40}
    assert files(tmp_path / "leases") == (["a1.json"] if end == "dies" else [])


# --- Where leases are hard to have ------------------------------------------------------------------------------------


def test_a_folder_that_takes_none_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, content: bytes) -> bool:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(lease, "_create", refuse)
    leases = Leases(tmp_path)
    with caplog.at_level(logging.WARNING):
        for name in ("a1", "a2", "a1"):
            held = leases.take(name)
            assert held
            assert held.renew()
            held.release()
    assert caplog.messages == [f"{tmp_path}: Read-only file system: nothing keeps another run from doing the same work"]


def test_a_server_that_answers_twice_gave_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def twice(source: Any, target: Any) -> None:
        link(source, target)
        raise FileExistsError

    monkeypatch.setattr(lease.os, "link", twice)
    assert Leases(tmp_path).take("a1")
    assert Leases(tmp_path).take("a1") is None


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_what_cannot_be_read_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    held = Leases(tmp_path).take("a1")
    assert held

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fails)
        assert Leases(tmp_path).take("a1") is None
        assert held.renew()
    assert held.renew()


def test_a_lease_that_a_person_deleted_is_lost(tmp_path: Path) -> None:
    held = Leases(tmp_path).take("a1")
    assert held
    assert held.path
    held.path.unlink()
    assert not held.renew()
    assert held.lost
    held.release()


# --- Waiting, and seeing ----------------------------------------------------------------------------------------------


def test_waiting_tells_once_for_whom_and_ends_when_stopped(tmp_path: Path) -> None:
    held, told, looks = Leases(tmp_path).take("a1"), [], []

    def stopped() -> bool:
        looks.append(1)
        return len(looks) > 3

    assert held
    assert Leases(tmp_path).wait("a1", stopped=stopped, told=told.append) is None
    assert told == [str(held.holder)]
    threading.Timer(0.3, held.release).start()
    assert Leases(tmp_path).wait("a1")
    assert Leases(tmp_path).wait("b1", stopped=lambda: True), "what is free needs no waiting"


def test_what_those_who_are_gone_held_is_tidied_away(tmp_path: Path) -> None:
    gone, kept = put(tmp_path, pid=os.getpid(), started="1"), tmp_path / "mine.json"
    kept.write_bytes(Holder.new("work").content(1))
    far = tmp_path / "far.json"
    far.write_bytes(Holder(**{**vars(Holder.new("work")), "host": "far"}).content(1))
    Leases(tmp_path).tidy()
    assert not gone.exists()
    assert files(tmp_path) == ["far.json", "mine.json"]


def test_what_others_do_here_is_counted(tmp_path: Path) -> None:
    put(tmp_path, pid=os.getpid())
    folders = [tmp_path / name / "leases" for name in ("one", "two")]
    for folder, pid in zip(folders, (os.getppid(), os.getpid()), strict=True):
        folder.mkdir(parents=True)
        put(folder, pid=pid, started=lease.started(pid))
    (folders[1] / "a2.json").write_bytes(Holder(**{**vars(Holder.new("far")), "host": "far", "pid": 3}).content(1))
    (folders[1] / "a3.json").write_bytes(Holder(**{**vars(Holder.new("")), "pid": os.getppid()}).content(1))
    (folders[1] / ".a4.json").write_bytes(Holder.new("marker").content(1))
    assert others_here(tmp_path) == 1, "not this process, not those elsewhere, not what is brief"
    assert sorted(each.what for each in living(folders[1])) == ["far", "work"]


def test_what_a_lease_says_is_printed_in_one_line(tmp_path: Path) -> None:
    put(tmp_path, what="a\nb\x1b[2J", host="h\n")
    (found,) = living(tmp_path)
    assert (found.what, found.host) == ("a b\\x1b[2J", "h ")
