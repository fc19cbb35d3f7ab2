"""Several runs at once on one folder of results: nothing is done twice, nothing is lost, and each ends as it should."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner

import ablate
from ablate.cli import main
from ablate.experiment import Experiment
from ablate.lease import Holder
from ablate.results import Store

FILE = """\
name: tiny
baseline: {d_model: 32, n_layers: 1, n_heads: 2, max_seq_len: 16}
variants:
%s
seeds: 2
data: {name: cycle, period: 16}
train: {steps: 4, batch_tokens: 32, seq_len: 16, threads: 1}
"""
WIDTHS = {"w16": 16, "w24": 24, "w48": 48, "w64": 64}
PARALLEL = ("--workers", "2")


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(Path(__file__).with_name("many_runs.py"))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.communicate(timeout=60)


@dataclass(frozen=True)
class OneRun:
    """A run that was started."""

    pid: int
    out: Path
    ask: Callable[[dict[str, Any]], int]

    def end(self) -> tuple[int, str]:
        status = self.ask({"wait": self.pid})
        return status, self.said()

    def said(self) -> str:
        return self.out.read_text(encoding="utf-8")

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class Folder:
    """Where runs with fake jobs are started, and what they left."""

    def __init__(self, path: Path, server: subprocess.Popen[str]) -> None:
        self.path, self.server, self.runs = path, server, list[OneRun]()
        (path / "at_it").mkdir()
        self.write(WIDTHS)

    def write(self, widths: dict[str, int], profile: str = "profile: {decode: null}\n") -> None:
        variants = "\n".join(f"  {name}: {{d_model: {width}}}" for name, width in widths.items())
        (self.path / "tiny.yaml").write_text(FILE % variants + profile, encoding="utf-8")

    def ask(self, asked: dict[str, Any]) -> int:
        assert self.server.stdin
        assert self.server.stdout
        self.server.stdin.write(json.dumps(asked) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def start(self, *arguments: str, **fakes: Any) -> OneRun:
        out = self.path / f"{len(self.runs)}.out"
        out.touch()
        command = ["run", "tiny.yaml", "--device", "cpu", *arguments]
        spec = {"folder": str(self.path), "out": str(out), "arguments": command, **fakes}
        self.runs.append(OneRun(self.ask(spec), out, self.ask))
        return self.runs[-1]

    @property
    def store(self) -> Store:
        return Store(self.path / "results/tiny")

    def did(self) -> Counter[str]:
        try:
            return Counter((self.path / "did").read_text(encoding="utf-8").splitlines())
        except FileNotFoundError:
            return Counter()

    def trials(self) -> pd.DataFrame:
        return ablate.load(self.store.folder).trials

    def leases(self) -> list[str]:
        return sorted(path.name for path in (self.store.folder / "leases").iterdir())

    def report(self) -> str:
        return (self.path / "reports/tiny/report.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, server: subprocess.Popen[str]) -> Iterator[Folder]:
    folder = Folder(tmp_path, server)
    yield folder
    for run in folder.runs:
        try:
            run.send(signal.SIGKILL)
        except ProcessLookupError:
            continue


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("it never happened")


def complete(folder: Folder, attempts: int = 1) -> None:
    trials = folder.trials()
    assert list(trials["attempts"]) == [attempts] * 10
    assert list(trials["status"]) == ["ok"] * 10
    assert folder.leases() == []


def ended(runs: list[OneRun], status: int = 0) -> list[str]:
    found = [run.end() for run in runs]
    assert [code for code, _ in found] == [status] * len(runs), "\n\n".join(said for _, said in found)
    for _, said in found:
        assert "Traceback" not in said
    return [said for _, said in found]


# --- Trials -----------------------------------------------------------------------------------------------------------


def test_of_many_runs_each_trial_is_run_by_one(folder: Folder) -> None:
    said = ended([folder.start(*PARALLEL) for _ in range(5)])
    complete(folder)
    assert set(folder.did().values()) == {1}
    assert len(folder.did()) == 10
    assert all("10 ok" in each for each in said), "each tells of all"
    assert folder.report()


def test_what_another_holds_is_waited_for_and_noted(folder: Folder) -> None:
    slow = folder.start("--workers", "1", seconds=3.0)
    wait_for(lambda: (folder.path / "at_it").exists() and list((folder.path / "at_it").iterdir()))
    said = ended([folder.start("--workers", "1")])[0]
    ended([slow])
    complete(folder)
    assert re.search(rf"waiting for another run: \w+ seed \d \(process {slow.pid} on ", said), said
    assert "(another run)" in said


def test_overlapping_experiments_share_what_they_have_in_common(folder: Folder) -> None:
    runs = [folder.start("--workers", "1", "--set", f"seeds={seeds}") for seeds in ("[0]", "[0, 1]", "[1]")]
    ended(runs)
    assert set(folder.did().values()) == {1}
    assert len(folder.did()) == 10
    ended([folder.start()])
    complete(folder)


def test_what_failed_in_another_run_is_a_failure(folder: Folder) -> None:
    ended([folder.start("--workers", "1", fails=24) for _ in range(3)], status=1)
    assert folder.trials()["status"].value_counts().to_dict() == {"ok": 8, "diverged": 2}
    assert set(folder.trials()["attempts"]) == {1}
    ended([folder.start("--workers", "1", "--retry-failed", fails=24) for _ in range(3)], status=1)
    failed = folder.trials().query("status == 'diverged'")
    assert list(failed["attempts"]) == [2, 2], "asked for at once by three it is repeated once"
    assert folder.leases() == []


def test_a_gate_is_failed_once(folder: Folder) -> None:
    ended([folder.start(*PARALLEL, refused=24) for _ in range(3)], status=1)
    assert folder.trials()["status"].value_counts().to_dict() == {"ok": 8, "gate_failed": 2}
    assert set(folder.trials()["attempts"]) == {1}
    assert folder.leases() == []


# --- Owners that die, or stand still ----------------------------------------------------------------------------------


def test_what_a_killed_run_held_is_taken_over_at_once(folder: Folder) -> None:
    killed, other = (folder.start("--workers", "1", seconds=seconds) for seconds in (600.0, 0.05))
    wait_for(lambda: list((folder.path / "at_it").iterdir()) and "waiting for another run" in other.said())
    assert len(status(folder)["running"]) == 1
    killed.send(signal.SIGKILL)
    ended([other])
    assert killed.end()[0] == -signal.SIGKILL
    complete(folder)


def status(folder: Folder) -> dict[str, Any]:
    command = ["status", str(folder.path / "tiny.yaml"), "--results", str(folder.path / "results"), "--json"]
    done = CliRunner().invoke(main, [*command, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def test_a_killed_run_does_not_show_as_running(folder: Folder) -> None:
    killed = folder.start("--workers", "2", seconds=600.0)
    other = folder.start("--workers", "1", seconds=600.0)
    wait_for(lambda: len(list((folder.path / "at_it").iterdir())) == 3)
    assert len(set(status(folder)["running"])) == 3, "of both runs"
    killed.send(signal.SIGKILL)
    assert killed.end()[0] == -signal.SIGKILL
    assert len(status(folder)["running"]) == 1
    other.send(signal.SIGKILL)
    other.end()
    assert status(folder)["running"] == []
    far = Holder(**{**vars(Holder.new("w16 seed 1")), "host": "far", "pid": 7})
    (folder.store.folder / "leases/a1.json").write_bytes(far.content(1))
    assert status(folder)["running"] == ["w16 seed 1 (process 7 on far, unless that has ended)"]


def test_who_was_stopped_past_the_lease_stores_nothing_of_what_was_taken_over(folder: Folder) -> None:
    """A slow one is stopped in the midst of its trials; its word would be its own number."""
    fakes = {"dead_after": 1.5, "overlap": True}
    stopped = folder.start(*PARALLEL, seconds=3.0, **fakes)
    wait_for(lambda: len(list((folder.path / "at_it").iterdir())) == 2)
    stopped.send(signal.SIGSTOP)
    other = folder.start(*PARALLEL, **fakes)
    ended([other])
    before = folder.trials()
    assert set(before["train_loss"]) == {other.pid}
    stopped.send(signal.SIGCONT)
    (said,) = ended([stopped])
    assert said.count("another run has taken it over, while this one stood still") == 2
    pd.testing.assert_frame_equal(folder.trials(), before)
    complete(folder)


def test_what_a_run_elsewhere_holds_is_taken_over_when_it_has_stood_still(folder: Folder) -> None:
    ended([folder.start()])
    trial_id = ablate.load(folder.store.folder).experiment["variants"][0]["trials"]["1"]
    (folder.store.folder / f"trials/{trial_id}.parquet").unlink()
    far = Holder(**{**vars(Holder.new("baseline seed 1")), "host": "far", "pid": 7})
    (folder.store.folder / f"leases/{trial_id}.json").write_bytes(far.content(1))
    (said,) = ended([folder.start(dead_after=1.0)])
    assert "waiting for another run: baseline seed 1 (process 7 on far)" in said
    assert folder.did()[trial_id] == 2
    complete(folder)


# --- While settings are tuned -----------------------------------------------------------------------------------------

TUNED = "profile: {decode: null}\ntune: {train.lr: [1e-3, 1e-2, 1e-1], seeds: 1}\n"
"""The fakes' loss is the lower the nearer to 1, so that the grid grows by that: 8 trials, and then 4."""


def tuned(folder: Folder, said: list[str]) -> None:
    assert all("tuning: 8 ok; 4 ok" in each for each in said), said
    assert all("chosen for w16: train.lr=1.0" in each for each in said), "each goes on to the same choice"
    results = ablate.load(folder.store.folder)
    assert list(results.tuning["status"]) == ["ok"] * 8
    assert list(results.trials["status"]) == ["ok"] * 4
    assert folder.leases() == []


def test_of_many_runs_each_tuning_trial_is_run_by_one(folder: Folder) -> None:
    folder.write({"w16": 16}, TUNED)
    tuned(folder, ended([folder.start(*PARALLEL) for _ in range(4)]))
    assert set(folder.did().values()) == {1}
    assert len(folder.did()) == 12


def is_at_work(folder: Folder, run: OneRun) -> bool:
    """Whether a run has a trial under way."""
    try:
        return str(run.pid) in [path.read_text(encoding="utf-8") for path in (folder.path / "at_it").iterdir()]
    except FileNotFoundError:
        return False  # it ended between the two looks


def test_what_a_run_that_was_killed_while_tuning_held_is_taken_over(folder: Folder) -> None:
    folder.write({"w16": 16}, TUNED)
    killed = folder.start("--workers", "1", stuck_after=2)
    wait_for(lambda: folder.did().total() == 2 and is_at_work(folder, killed))
    other = folder.start("--workers", "1")
    wait_for(lambda: f"(process {killed.pid} on " in other.said())
    killed.send(signal.SIGKILL)
    tuned(folder, ended([other]))
    assert killed.end()[0] == -signal.SIGKILL
    assert set(folder.did().values()) == {1}
    assert len(folder.did()) == 12


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_tuning_leaves_told_what_never_began(folder: Folder, number: signal.Signals, code: int) -> None:
    folder.write({"w16": 16}, TUNED)
    run = folder.start("--workers", "1", stuck_after=1)
    wait_for(lambda: folder.did().total() == 1 and is_at_work(folder, run))
    run.send(number)
    (said,) = ended([run], code)
    assert "tuning: 1 interrupted, 4 not run, 1 ok; 4 not run; report: " in said
    facts = status(folder)["tuning"]
    assert (facts["outcomes"], facts["not_run"], facts["left"]) == ({"ok": 1, "interrupted": 1}, 4, 5)
    assert "1 of 6 tuning trials has ended" in folder.report()
    tuned(folder, ended([folder.start("--workers", "1")]))
    assert set(folder.did().values()) == {1}


def cut(folder: Folder, after: int, number: signal.Signals, code: int) -> None:
    """A run that gets a signal while it is at the trial that comes after so many."""
    total, run = folder.did().total() + after, folder.start("--workers", "1", stuck_after=after)
    wait_for(lambda: folder.did().total() == total and is_at_work(folder, run))
    run.send(number)
    assert run.end()[0] == code


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_sampler_draws_the_same_points_however_often_it_is_cut(folder: Folder, sampler: str) -> None:
    """By a kill, by a signal, and gone on with by two at once; TPE looks at losses from the eleventh point on."""
    pytest.importorskip("optuna")
    space = f"train.lr: {{low: 1e-4, high: 1}}, seeds: 1, trials: 12, sampler: {sampler}"
    folder.write({"w16": 16}, f"profile: {{decode: null}}\ntune: {{{space}}}\n")
    cut(folder, 3, signal.SIGKILL, -9)
    cut(folder, 18, signal.SIGTERM, 143)
    ended([folder.start("--workers", "1") for _ in range(2)])
    assert set(folder.did().values()) == {1}
    assert len(folder.did()) == 24 + 4

    asked = Experiment.from_file(str(folder.path / "tiny.yaml")).search
    assert asked is not None
    wanted, _ = asked.points(["any"], lambda _, point: abs(math.log10(point["train.lr"])), lambda _: True)
    found = ablate.load(folder.store.folder).tuning
    for _, each in found.groupby("variant"):
        assert list(each["train.lr"]) == [point["train.lr"] for point in wanted["any"]]
        assert sorted(each["attempts"])[:11] == [1] * 11


# --- Ways to end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_waiting(folder: Folder, number: signal.Signals, code: int) -> None:
    slow, waits = folder.start("--workers", "1", seconds=600.0), folder.start("--workers", "1")
    wait_for(lambda: "waiting for another run" in waits.said())
    rows = folder.trials()
    waits.send(number)
    ended([waits], code)
    assert folder.report()
    pd.testing.assert_frame_equal(folder.trials(), rows)
    slow.send(number)
    ended([slow], code)
    assert folder.trials()["status"].value_counts().to_dict() == {"ok": 9, "interrupted": 1}
    assert folder.leases() == []
    ended([folder.start()])
    assert sorted(folder.trials()["attempts"]) == [1] * 9 + [2]


def test_fail_fast_waits_for_nobody_once_something_failed(folder: Folder) -> None:
    slow = folder.start("--workers", "1", seconds=600.0)
    wait_for(lambda: list((folder.path / "at_it").iterdir()))
    ended([folder.start("--workers", "1", "--fail-fast", fails=16)], status=1)
    assert list(folder.trials()["status"]) == ["diverged"]
    slow.send(signal.SIGKILL)


# --- What is done beside trials ---------------------------------------------------------------------------------------


def test_only_one_run_times_and_no_round_twice(folder: Folder) -> None:
    folder.write({"w16": 16}, "profile: {repeats: 4, decode: null}\n")
    ended([folder.start(*PARALLEL) for _ in range(3)])
    rounds = ablate.load(folder.store.folder).repeats
    assert list(rounds["round"]) == [number for number in range(4) for _ in range(3)]
    assert set(folder.did().values()) == {1, 2}, "the baseline and w16 with the seed of the round, once each"
    assert sum(folder.did().values()) == 4 + 12
    assert folder.leases() == []
    failing = [folder.start(*PARALLEL, "--set", "profile.repeats=6", fails=16) for _ in range(2)]
    ended(failing, status=1)
    assert sum(folder.did().values()) == 4 + 18
    ended([folder.start(*PARALLEL, "--set", "profile.repeats=6", "--retry-failed") for _ in range(2)])
    assert sum(folder.did().values()) == 4 + 24, "asked for at once by two they are repeated once"


def test_rounds_of_a_killed_run_are_gone_on_with(folder: Folder) -> None:
    folder.write({"w16": 16}, "profile: {repeats: 4, decode: null}\n")
    ended([folder.start("--set", "profile.repeats=1")])
    killed = folder.start(seconds=600.0)
    wait_for(lambda: (folder.path / "at_it/timing").exists())
    other = folder.start()
    wait_for(lambda: f"waiting for another run: rounds of timing (process {killed.pid} on " in other.said())
    killed.send(signal.SIGKILL)
    ended([other])
    assert sorted(set(ablate.load(folder.store.folder).repeats["round"])) == [0, 1, 2, 3]


def test_the_largest_step_is_sought_by_one(folder: Folder) -> None:
    folder.write({"w16": 16}, "profile: {max_batch: true, decode: null}\n")
    ended([folder.start(*PARALLEL) for _ in range(3)])
    tried = {what: number for what, number in folder.did().items() if what.startswith("capacity")}
    assert len(tried) > 4
    assert set(tried.values()) == {1}
    assert folder.trials()["largest_batch"].notna().all()
    assert folder.leases() == []


def test_what_other_runs_do_on_this_machine_is_counted(folder: Folder) -> None:
    slow = folder.start("--workers", "1", seconds=600.0)
    wait_for(lambda: list((folder.path / "at_it").iterdir()))
    other = folder.start("--workers", "1", seconds=0.3)
    wait_for(lambda: "waiting for another run" in other.said())
    slow.send(signal.SIGKILL)
    ended([other])
    last, *beside = sorted(folder.trials()["trials_at_once"])
    assert last < 1.9 <= min(beside)
    assert max(beside) <= 2


# --- The experiment's file --------------------------------------------------------------------------------------------


def test_a_file_that_changed_meanwhile_gives_the_names_and_neither_run_loses_a_trial(folder: Folder) -> None:
    more = "profile: {repeats: 2, decode: null}\n"
    folder.write({"w16": 16, "w24": 24}, more)
    first = folder.start("--workers", "1", seconds=0.5)
    wait_for(lambda: list((folder.path / "at_it").iterdir()))
    folder.write({"slim": 16, "wide": 64}, more)
    second = folder.start("--workers", "1")
    ended([second, first])
    results = ablate.load(folder.store.folder)
    assert list(results.trials["variant"].unique()) == ["baseline", "slim", "wide"]
    assert list(results.trials["status"]) == ["ok"] * 6
    assert set(results.repeats["variant"]) == {"baseline", "slim", "wide"}, "its rounds, though the other ended later"
    assert len(list((folder.store.folder / "trials").iterdir())) == 8
    trials = {what: number for what, number in folder.did().items() if "-" not in what}
    assert set(trials.values()) == {1}
    assert "slim" in folder.report()
    assert "w24" not in folder.report()


def test_a_report_can_be_written_at_any_moment(folder: Folder) -> None:
    runs = [folder.start("--workers", "1", seconds=0.2) for _ in range(2)]
    wait_for(lambda: (folder.store.folder / "experiment.json").exists())
    places = ["--results", str(folder.path / "results"), "--reports", str(folder.path / "reports")]
    codes = []
    while not codes or len(folder.trials()) < 10:
        done = CliRunner().invoke(main, ["report", str(folder.path / "tiny.yaml"), *places])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.output
        codes.append(done.exit_code)
    ended(runs)
    assert set(codes) == {0}
    complete(folder)


# --- With real trials -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_two_real_runs_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    variants = "\n".join(f"  {name}: {{d_model: {width}}}" for name, width in WIDTHS.items())
    (tmp_path / "tiny.yaml").write_text(FILE % variants, encoding="utf-8")
    command = [sys.executable, "-m", "ablate", "run", "tiny.yaml", "--device", "cpu", "--workers", "1"]
    runs = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    said = [run.communicate(timeout=600)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n\n".join(said)
    assert all("10 ok" in each for each in said)
    trials = ablate.load(tmp_path / "results/tiny").trials
    assert list(trials["attempts"]) == [1] * 10
    assert list(trials["status"]) == ["ok"] * 10
    assert list((tmp_path / "results/tiny/leases").iterdir()) == []

    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'results/mlflow.db'}")
    found = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert sorted(run.data.tags["ablate.trial_id"] for run in found) == sorted(trials["trial_id"])
    assert {run.info.status for run in found} == {"FINISHED"}
