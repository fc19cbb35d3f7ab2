"""What a trial, and a run, make of checkpoints: what is done is not done again, and what goes on is as if never cut."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ablate import runner, trial
from ablate.child import Child
from ablate.job import Job, Past
from ablate.profiling.clock import warmup_steps
from ablate.results import Store
from ablate.rows import _since
from ablate.runner import Run
from ablate.tasks import ANEW, Task, is_final, tidy
from ablate.trial import Reporter, perform
from tests import test_trial
from tests.test_trial import Parent

pytestmark = pytest.mark.usefixtures("one_thread")

MEASURED = ("_seconds", "_per_second", "_p10", "_p50", "_p90", "peak_rss_bytes", "other_load_cores", "mhz_min")


def job(folder: Path, **changes: Any) -> Job:
    made = test_trial.job(train={"checkpoint_every": 3, **changes.pop("train", {})})
    return Job(**{**vars(made), "checkpoints": str(folder), **changes})


class Asked(threading.Event):
    """A word to stop that comes so many steps after the training began, or went on."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def is_set(self) -> bool:
        self.left -= 1
        return self.left <= 0


def performed(job: Job, stopped: threading.Event | None = None) -> Parent:
    parent = Parent()
    perform(job, Reporter(parent), time.perf_counter(), stopped)
    return parent


def exact(parent: Parent) -> dict[str, Any]:
    return {name: value for name, value in parent.columns.items() if not name.endswith((*MEASURED, "conditions"))}


@pytest.fixture(scope="module")
def whole() -> Parent:
    return performed(test_trial.job())


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_a_trial_that_was_stopped_goes_on_as_if_never_cut(steps: int, tmp_path: Path, whole: Parent) -> None:
    cut = performed(job(tmp_path / "a"), Asked(steps))
    assert cut.outcome == ("interrupted", "train", f"stopped at step {steps}")
    assert (cut.columns["steps"], cut.columns["tokens"]) == (steps, 64 * steps)
    assert cut.of("past") == []
    on = performed(job(tmp_path / "a"))
    assert on.outcome == whole.outcome
    assert exact(on) == exact(whole)
    assert on.table("curve") == whole.table("curve")
    assert cut.table("curve") == whole.table("curve")[: len(cut.table("curve"))]
    (past,) = on.of("past")
    assert (past.steps, past.attempts) == (steps, 2)


@pytest.mark.parametrize("steps", [1, 7])
def test_times_of_a_trial_that_goes_on_are_of_the_steps_to_come(steps: int, tmp_path: Path) -> None:
    performed(job(tmp_path / "a"), Asked(steps))
    on = performed(job(tmp_path / "a"))
    timed = [row["sample"] for row in on.table("profiles") if row["metric"] == "step_seconds" and row["sample"]]
    assert timed == list(range(steps + warmup_steps(8 - steps) + 1, 9))


def test_what_was_trained_is_not_trained_again_after_a_profile_that_went_wrong(
    tmp_path: Path, whole: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise SystemExit("as if killed")

    with monkeypatch.context() as patch:
        patch.setattr(trial.ProfilePhase, "run", killed)
        cut = performed(job(tmp_path / "a"))
    assert cut.outcome[:2] == ("crashed", "profile")
    monkeypatch.setattr(trial, "train", killed)
    on = performed(job(tmp_path / "a"))
    assert on.outcome == whole.outcome
    assert exact(on) == exact(whole)
    assert on.table("curve") == whole.table("curve")
    assert on.columns["step_seconds_p50"] == cut.columns["step_seconds_p50"], "of the attempt that trained"
    trained = [row for row in cut.table("profiles") if row["phase"] == "train"]
    assert [row for row in on.table("profiles") if row["phase"] == "train"] == trained


@pytest.mark.parametrize(("phases", "keep", "left"), [(("train",), False, [3, 6]), (("train",), True, [6, 8])])
def test_the_last_checkpoint_is_of_the_end_where_somebody_wants_it(
    phases: tuple[str, ...], keep: bool, left: list[int], tmp_path: Path
) -> None:
    performed(job(tmp_path / "a", phases=phases, train={"keep_checkpoints": keep}))
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [f"step-{n:012d}.safetensors" for n in left]


def test_without_a_folder_nothing_is_kept_and_a_profile_alone_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    performed(test_trial.job(("steps", "profile")))
    performed(job(tmp_path / "a", phases=("steps", "profile")))
    assert list(tmp_path.iterdir()) == []


# --- The parent -------------------------------------------------------------------------------------------------------

RESUMED = ("interrupted", "killed", "crashed", "oom", "timeout")


def task(status: str | None, phases: tuple[str, ...] = ("train", "profile")) -> Task:
    stored = None if status is None else {"status": status, "attempts": 3, "wall_seconds": 7.0, "steps": None}
    return Task(SimpleNamespace(), stored, phases)  # type: ignore[arg-type]


@pytest.mark.parametrize("status", ["ok", None, *ANEW, *RESUMED])
def test_what_a_trial_goes_on_with(status: str | None) -> None:
    one = task(status)
    assert one.attempt == (1 if status is None else 4)
    assert one.first_attempt == (4 if status in ANEW else 1)
    assert one.before == (one.stored if status in RESUMED else {})


def test_a_part_that_is_missing_beside_what_is_stored_goes_on_with_that() -> None:
    assert task("ok", ("profile",)).before["wall_seconds"] == 7.0
    assert task("ok", ("train",)).before["wall_seconds"] == 7.0, "it was only profiled"


def test_attempts_that_left_no_row_are_counted() -> None:
    assert _since(None) == {}
    since = _since(Past(steps=5, began=0.0, seconds=3.0, attempts=2))
    assert (since["attempts"], since["started_at"].isoformat()) == (2, "1970-01-01T00:00:00+00:00")


class Running:
    """A child as the run sees it, that ends when it has been looked at so often."""

    def __init__(self, phase: str, looks: int) -> None:
        self.phase, self.looks, self.told = phase, looks, list[str]()
        self.process = self

    def is_alive(self) -> bool:
        self.looks -= 1
        return self.looks >= 0

    def waitables(self) -> list[Any]:
        return []

    def listen(self) -> list[Any]:
        return []

    def ask_to_stop(self) -> None:
        self.told.append("asked")

    def interrupt(self, reason: str) -> None:
        self.told.append(f"{reason}, left {self.looks}")

    def kill(self) -> None:
        self.told.append("killed")


def run_of(running: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    run = object.__new__(Run)
    run.running = {"aa": (None, running, None)}  # type: ignore[dict-item]
    run.store = SimpleNamespace(folder=folder)  # type: ignore[assignment]
    monkeypatch.setattr(runner, "wait", lambda *_: None)
    monkeypatch.setattr(run, "_finish", run.running.pop)
    return run


@pytest.mark.parametrize(
    ("phase", "looks", "grace", "left"),
    [("train", 5, 60, -1), ("evaluate", 5, 60, -1), ("profile", 5, 60, 4), ("setup", 5, 60, 4), ("train", 5, -1, 4)],
)
def test_a_training_is_waited_for_and_nothing_else_is(
    phase: str, looks: int, grace: float, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Running(phase, looks)
    monkeypatch.setattr(runner, "GRACE_SECONDS", grace)
    run_of(running, tmp_path, monkeypatch)._interrupt(signal.SIGTERM)
    assert running.told == ["asked", f"the run got SIGTERM, left {left}"]


def test_a_second_signal_ends_children_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running("train", 5)
    run = run_of(running, tmp_path, monkeypatch)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    for step in ("_through_gates", "_calibrate", "_seek_capacities", "rounds_left"):
        monkeypatch.setattr(run, step, lambda *_: [])
    monkeypatch.setattr(run, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.carry_out([], [])
    assert running.told == ["killed"]


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        (None, ("interrupted", "train", "the run got SIGINT")),
        (
            ("interrupted", "train", "stopped at step 3"),
            ("interrupted", "train", "the run got SIGINT; stopped at step 3"),
        ),
        (("ok", "profile", ""), ("ok", "profile", "")),
    ],
)
def test_what_a_child_says_in_the_end_stands(said: Any, outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = object.__new__(Child)
    running.phase, running.outcome = "train", said
    monkeypatch.setattr(Child, "kill", lambda self: None)
    monkeypatch.setattr(Child, "listen", lambda self: iter(()))
    running.interrupt("the run got SIGINT")
    assert running.outcome == outcome


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, create=True)


def stored(store: Store, trial_id: str, **row: Any) -> Path:
    """A row, and a checkpoint from before it."""
    folder = store.checkpoints_path(trial_id)
    folder.mkdir(parents=True)
    (folder / "step-000000000001.safetensors").write_bytes(b"")
    time.sleep(0.02)
    store.write_trial({"trial_id": trial_id, "variant": "a", "seed": 0, **row}, {}, {})
    return folder


def planned(trial_id: str, keep: bool = False) -> Any:
    recipe = SimpleNamespace(keep_checkpoints=keep)
    return SimpleNamespace(trial_id=trial_id, variant=SimpleNamespace(settings=SimpleNamespace(train=recipe)))


@pytest.mark.parametrize(
    ("row", "goes"),
    [
        ({"status": "ok", "steps": 8}, True),
        ({"status": "ok"}, False),  # only profiled: its training may be under way
        *(({"status": status, "steps": 8}, True) for status in ANEW),
        *(({"status": status, "steps": 8}, False) for status in RESUMED),
    ],
)
def test_what_a_killed_run_left_of_trials_that_are_done_goes(row: dict[str, Any], goes: bool, store: Store) -> None:
    folder, gone, kept = (stored(store, each, **row) for each in ("aa", "bb", "cc"))
    tidy([planned("aa"), planned("cc", keep=True)], store)
    assert is_final({"steps": None, **row}) == goes
    assert folder.exists() != goes
    assert gone.exists(), "its trial is no longer of the experiment"
    assert kept.exists(), "the file says so"


def test_checkpoints_of_a_newer_attempt_than_the_row_stay(store: Store) -> None:
    folder = stored(store, "aa", status="diverged", steps=8)
    time.sleep(0.02)
    (folder / "step-000000000002.safetensors").write_bytes(b"")
    tidy([planned("aa")], store)
    assert folder.exists()
