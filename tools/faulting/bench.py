"""Where runs are disturbed: a tiny experiment by the command line, what is seen of it, and beside what it should be."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from compare_results import differences

from ablate import asked
from ablate.results import Results, Store, load
from ablate.tables import ResultsError
from ablate.verify import verify
from faulting import trap

NAME = "faults"
STEPS, EVERY = 12, 2

EXPERIMENT = f"""\
name: {NAME}
question: What is lost?
baseline: {{d_model: 16, n_layers: 1, n_heads: 2, max_seq_len: 16, dropout: 0.1}}
variants: {{mqa: {{attention: mqa}}}}
data: {{name: cycle, period: 8}}
train: {{steps: {STEPS}, batch_tokens: 32, seq_len: 8, eval_every: 4, eval_tokens: 64, threads: 1,
  checkpoint_every: {EVERY}}}
profile: {{decode: {{context: [8], new_tokens: 4}}, repeats: 1}}
"""

OFF = {"MLFLOW_TRACKING_URI": "file:off"}
"""No mirror: it is half of the time of so small a run."""

MEASURED = {
    "profiles": ["trial_id", "phase", "batch", "context", "new_tokens", "path", "metric"],
    "repeats": ["timing_id", "variant_id", "is_partner", "round", "metric"],
}
"""What names a figure; there may be fewer samples of it, since what a killed process measured of time died with it."""

WAITS_SECONDS = 60.0
"""So long may a run wait for MLflow, in all."""

LIMIT_SECONDS = 600.0
"""After this a run hangs."""

_LEAVE_SECONDS = 20.0
_drawing = threading.Lock()  # of plots, which knows one thread only


def check_permissions_hold() -> None:
    """Raises `Skipped` where this process may write everything, as root may that has not put that down."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        if os.access(folder, os.W_OK):
            raise Skipped("this process may write everything: as root, run it with setpriv (see tools/faults.py)")


class Skipped(Exception):
    """Why a fault cannot be injected here."""


@dataclass(frozen=True)
class Home:
    """A folder of its own for each case, with its results and reports."""

    folder: Path

    @property
    def results(self) -> Path:
        """Of all experiments."""
        return self.folder / "results"

    @property
    def store(self) -> Path:
        """Of this one."""
        return self.results / NAME

    def one(self, pattern: str) -> Path:
        """The first of the files in the store."""
        return sorted(self.store.glob(pattern))[0]


def _nothing(_: Home) -> None:
    """What most cases do in between."""


def _no_loss(_: Home) -> list[str]:
    return []


@dataclass(frozen=True)
class Case:
    """One moment of a fault, and what is expected: one of the exit `statuses`, nothing lost after the run again.

    `given` is told to the trap. `start` is the state that it begins with, `before` does something to it, `mend` repairs
    it, `check` says what else is lost, `close` clears away; `meanwhile` goes on beside the run. `again` is what the
    command has more the second time. Those that go `in_turn` do not run beside one another. `has_database`: one of
    MLflow's is there, and empty.
    """

    moment: str
    statuses: tuple[int, ...] = (0,)
    given: Mapping[str, Any] = field(default_factory=dict)
    start: str = ""
    environment: Mapping[str, str] = field(default_factory=lambda: OFF)
    mended: Mapping[str, str] | None = None
    arguments: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    before: Callable[[Home], None] = _nothing
    mend: Callable[[Home], None] = _nothing
    check: Callable[[Home], list[str]] = _no_loss
    close: Callable[[Home], None] = _nothing
    in_turn: bool = False
    has_database: bool = False
    meanwhile: Callable[[Home, subprocess.Popen[bytes]], None] | None = None
    in_time: bool = False
    """Whether it may not take much longer than it would undisturbed."""
    steps_again: int | None = EVERY
    """So many steps of each trial may be done twice; None where a whole trial may."""


@dataclass(frozen=True)
class Ended:
    """A run that has ended; `status` is None where it hung."""

    status: int | None
    seconds: float
    output: str
    notes: list[dict[str, Any]]
    left: list[str]

    @property
    def steps(self) -> int:
        """Training steps of trials."""
        return sum((each["kind"], each["operation"]) == ("Job", "step") for each in self.notes)

    @property
    def word(self) -> str:
        """What was said last."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""


@dataclass(frozen=True)
class Seen:
    """What came of a case."""

    moment: str
    status: int | None
    seconds: float
    word: str
    held: str
    wrong: list[str]
    lost: list[str]


class Bench:
    """A folder of homes, with an undisturbed run to compare with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder, folder / "cache"
        self.ending = contextlib.ExitStack()
        self._turn, self._states = threading.Lock(), threading.RLock()
        (folder / "site").mkdir(parents=True)
        shutil.copy(str(trap.__file__), folder / "site/sitecustomize.py")
        self.file = folder / f"{NAME}.yaml"
        self.file.write_text(EXPERIMENT, encoding="utf-8")

    # --- Runs

    @cached_property
    def undisturbed(self) -> Ended:
        """The run to compare with; its notes say which moments there are."""
        with self._states:
            return self._well(self.run(Home(self.folder / "undisturbed")))

    @cached_property
    def whole(self) -> Results:
        """What is stored of it."""
        with self._states:
            self._well(self.undisturbed)
            return load(Home(self.folder / "undisturbed").store)

    def home(self, name: str, start: str = "") -> Home:
        """A home in the state that `start` names: empty, undisturbed, or one that was made by `state`."""
        home = Home(self.folder / name)
        if start:
            shutil.copytree(self.folder / start, home.folder)
        home.folder.mkdir(parents=True, exist_ok=True)
        return home

    def _home_of(self, name: str, case: Case) -> Home:
        home = self.home(name, case.start)
        if case.has_database:
            home.results.mkdir()
            shutil.copy(self.database(), home.results)
        return home

    def state(self, name: str, given: Mapping[str, Any]) -> str:
        """A state to start from: what is left of a run that the trap ended."""
        with self._states:
            if not (self.folder / name).exists():
                self.run(Home(self.folder / name), given=given)
        return name

    def database(self) -> Path:
        """A database of MLflow's with nothing in it: to create one takes as long as all of so small a run."""
        with self._states:
            path = self.folder / "empty/mlflow.db"
            if not path.exists():
                path.parent.mkdir()
                code = "import mlflow, sys; mlflow.MlflowClient(sys.argv[1]).search_experiments()"
                environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
                command = [sys.executable, "-c", code, f"sqlite:///{path}"]
                subprocess.run(command, env=environment, capture_output=True, check=True)
        return path

    def mirrored(self) -> str:
        """The state after a run that nobody disturbed, with MLflow."""
        with self._states:
            if not (self.folder / "mirrored").exists():
                self._well(self.run(Home(self.folder / "mirrored"), environment={}))
        return "mirrored"

    def run(
        self,
        home: Home,
        *,
        given: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] = OFF,
        arguments: Sequence[str] = (),
        meanwhile: Callable[[Home, subprocess.Popen[bytes]], None] | None = None,
    ) -> Ended:
        """The command, as anybody would give it, in a process group of its own."""
        home.folder.mkdir(parents=True, exist_ok=True)
        number = len(list(home.folder.glob("*.log")))
        log, notes = home.folder / f"{number}.log", home.folder / f"{number}.notes"
        places = [f"--{kind}={home.folder / kind}" for kind in ("results", "reports")]
        command = [sys.executable, "-m", "ablate", "run", str(self.file), "--device=cpu", "--workers=1", *places]
        begin = time.monotonic()
        with log.open("wb") as output:
            running = subprocess.Popen(
                [*command, *arguments],
                env=self._environment(home, notes, given or {}, environment),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        status, seconds = self._watched(running, home, meanwhile), time.monotonic() - begin
        left = list(_left_running(notes))
        said = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
        return Ended(status, seconds, log.read_text(encoding="utf-8", errors="replace"), said, left)

    def synchronise(self, home: Home, environment: Mapping[str, str]) -> None:
        """What a run says to do where MLflow is slow: no run waits for it."""
        if environment is not OFF:
            command = [sys.executable, "-m", "ablate", "sync", str(self.file), f"--results={home.results}"]
            told = self._environment(home, home.folder / "sync.notes", {}, environment)
            with (home.folder / "sync.txt").open("wb") as output:
                subprocess.run(command, env=told, stdout=output, stderr=output, check=False)

    def _environment(
        self, home: Home, notes: Path, given: Mapping[str, Any], more: Mapping[str, str]
    ) -> dict[str, str]:
        roots = [str(home.folder / kind) for kind in ("results", "reports")]
        told = json.dumps({"notes": str(notes), "roots": roots, **given})
        path = os.pathsep.join([str(self.folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": path, "ABLATE_TRAP": told, "ABLATE_CACHE": str(self.cache)}
        own |= {"MLFLOW_TRACKING_URI": "", "COLUMNS": "200"}
        return {**os.environ, **own, **more}

    def _watched(
        self,
        running: subprocess.Popen[bytes],
        home: Home,
        meanwhile: Callable[[Home, subprocess.Popen[bytes]], None] | None,
    ) -> int | None:
        try:
            if meanwhile:
                meanwhile(home, running)
            return running.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()

    def _well(self, ended: Ended) -> Ended:
        if ended.status != 0:
            raise RuntimeError(f"undisturbed: exit status {ended.status}: {ended.output[-3000:]}")
        return ended

    # --- A case

    def carry_out(self, name: str, case: Case) -> Seen:
        """Inject the fault, look, run the same command again without it, and compare. Raises `Skipped`."""
        with self._turn if case.in_turn else contextlib.nullcontext():
            return self._carried_out(name, case)

    def _carried_out(self, name: str, case: Case) -> Seen:
        home = self._home_of(name, case)
        try:
            case.before(home)
            first = self.run(
                home,
                given=case.given,
                environment=case.environment,
                arguments=case.arguments,
                meanwhile=case.meanwhile,
            )
            wrong = [*_wrong(case, first), *self._late(case, first), *self._unreadable(home)]
            held = _held(home)
            case.mend(home)
            lost = self.lost(home, case) if first.status == 0 else ["not done"]
            steps = first.steps
            if lost:
                environment = case.environment if case.mended is None else case.mended
                second = self.run(home, environment=environment, arguments=case.again)
                self.synchronise(home, environment)
                lost = [*_wrong(Case("again"), second), *self.lost(home, case)]
                steps += second.steps
            lost += self._done_twice(case, steps)
            return Seen(case.moment, first.status, first.seconds, self._plain(first.word, home), held, wrong, lost)
        finally:
            case.close(home)
            shutil.rmtree(home.folder, ignore_errors=True)

    def lost(self, home: Home, case: Case) -> list[str]:
        """What is not as it would be undisturbed."""
        try:
            found = load(home.store)
        except ResultsError as error:
            return [str(error)]
        lost = [*differences(self.whole, found), *_unmeasured(self.whole, found), *found.skipped]
        lost += [*_left_over(home), *_not_content(home)]
        if not case.environment and not (home.results / "mlflow.db").is_dir():
            lost += mirror_faults(home.results / "mlflow.db", list(found.trials["trial_id"]))
        return lost + case.check(home)

    def _late(self, case: Case, first: Ended) -> list[str]:
        usual = self.undisturbed.seconds
        is_late = case.in_time and first.seconds > 2 * usual + WAITS_SECONDS
        return [f"it took {first.seconds:.0f} s, and {usual:.0f} s undisturbed"] if is_late else []

    def _done_twice(self, case: Case, steps: int) -> list[str]:
        """Steps beyond those that are needed, where checkpoints should have spared them."""
        twice = steps - self.undisturbed.steps
        too_many = not case.start and case.steps_again is not None and twice > case.steps_again
        return [f"{twice} training steps were done twice"] if too_many else []

    def _unreadable(self, home: Home) -> list[str]:
        """Whether a report could be written of what is there."""
        if not os.access(home.store / "experiment.json", os.R_OK):
            return []
        try:
            with _drawing:
                asked.report(Store(home.store).load(), home.folder / "looked")
        except Exception as error:  # whatever it is, it is to be told
            return [f"no report can be written: {type(error).__name__}: {error}"]
        return []

    def _plain(self, word: str, home: Home) -> str:
        """Without the places of this machine."""
        for folder in (home.folder, self.folder):
            word = word.replace(f"{folder}/", "")
        return re.sub(r"127\.0\.0\.1:[0-9]+", "SERVER", word)

    # --- Moments

    def writes(self, kind: str = "parent", only: str = ".*") -> list[tuple[str, str]]:
        """Each operation on each sort of file, once, in the order in which they come first."""
        found = ((each["operation"], each["role"]) for each in self.undisturbed.notes if each["kind"] == kind)
        return [each for each in dict.fromkeys(found) if each[0] in trap.DISK and re.fullmatch(only, each[1])]


# --- What is looked at ------------------------------------------------------------------------------------------------


def _wrong(case: Case, ended: Ended) -> list[str]:
    """What should not have been seen of a run."""
    wrong = []
    if ended.status is None:
        wrong.append(f"it hung for {LIMIT_SECONDS:g} s")
    elif ended.status not in case.statuses:
        expected = " or ".join(map(str, case.statuses))
        wrong.append(f"exit status {ended.status}, not {expected}: {ended.word}")
    if "Traceback (most recent call last)" in ended.output:
        wrong.append(f"a traceback: {ended.word}")
    return wrong + ended.left


def _left_running(notes: Path) -> Iterator[str]:
    """Processes that outlive the run, which are ended."""
    deadline = time.monotonic() + _LEAVE_SECONDS
    while (found := list(_processes(notes))) and time.monotonic() < deadline:
        time.sleep(0.2)
    for each in found:
        with contextlib.suppress(psutil.Error):
            yield f"a process outlived the run: {' '.join(each.cmdline())[:60]}"
            each.kill()


def _processes(notes: Path) -> Iterator[psutil.Process]:
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            ours = each.uids().real == os.getuid() and str(notes) in each.environ().get("ABLATE_TRAP", "")
            if ours and each.status() != psutil.STATUS_ZOMBIE:
                yield each


def _held(home: Home) -> str:
    """What the store holds, in words."""
    try:
        found = load(home.store)
    except (ResultsError, PermissionError):
        return "nothing"
    counts = [f"{n} {status}" for status, n in sorted(Counter(found.trials["status"]).items())]
    rounds = len(set(found.repeats["round"]))
    more = [f"{rounds} of timing"] * bool(rounds) + [f"{len(found.skipped)} named as unreadable"] * bool(found.skipped)
    return ", ".join([*counts, *more]) or "no trial"


def _unmeasured(whole: Results, found: Results) -> list[str]:
    """Figures that the one has and the other has not."""
    lost = []
    for name, key in MEASURED.items():
        ours, theirs = (set(map(tuple, getattr(each, name)[key].astype(str).to_numpy())) for each in (whole, found))
        lost += [f"{name}: {len(ours - theirs)} figures are missing"] if ours - theirs else []
    return lost


def _left_over(home: Home) -> list[str]:
    files = [*home.results.rglob("*.tmp"), *(home.store / "leases").glob("*"), *home.store.glob("running.json")]
    return [f"left over: {each.name}" for each in files]


def _not_content(home: Home) -> list[str]:
    """What `ablate results verify` has to say."""
    return [f"verify: {each['file']}: {each['fault']}" for each in verify(Store(home.store))["faults"]]


def mirror_faults(database: Path, trials: Sequence[str], experiment: str = NAME) -> list[str]:
    """What MLflow does not hold exactly once and finished."""
    query = (
        "select tags.value, runs.status from runs join tags on tags.run_uuid = runs.run_uuid join experiments on "
        "experiments.experiment_id = runs.experiment_id where tags.key = 'ablate.trial_id' and "
        "runs.lifecycle_stage = 'active' and experiments.name = ?"
    )
    try:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as opened:
            found = Counter(opened.execute(query, [experiment]).fetchall())
    except sqlite3.Error as error:
        return [f"MLflow: {error}"]
    wanted = Counter((each, "FINISHED") for each in trials)
    return [f"MLflow: {n} x {each}" for each, n in ((found - wanted) + (wanted - found)).items()]
