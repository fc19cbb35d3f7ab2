"""A child process, seen from the parent: started fresh, listened to, and its end explained."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import psutil

from ablate.job import BuildJob, CalibrationJob, CapacityJob, GateJob, Job, Past, TimingJob, Verdict

AnyJob = Job | TimingJob | GateJob | BuildJob | CalibrationJob | CapacityJob

_POLL_SECONDS = 0.2
_OWN_VARIABLES = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_TOKEN")


def context(device: str) -> BaseContext:
    """How children start: forked from a clean server that has torch imported, or afresh where CUDA is in play."""
    if device == "cuda" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["ablate.trial", "ablate.timing"])
    return forkserver


@contextlib.contextmanager
def environment(threads: int) -> Iterator[None]:
    """The environment that children are started with; the parent's own is restored."""
    wanted = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # A thread that spins while another program runs slows a step several times over.
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # Workers of the compiler would be children of a child, which may be killed, and would take its cores.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    before = dict(os.environ)
    os.environ.update(wanted)
    for name in _OWN_VARIABLES:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def warm_up(start: BaseContext) -> None:
    """Have the server that children are forked from import what it must, so that no trial's time has a part of that."""
    if start.get_start_method() == "forkserver":
        first = start.Process(target=_nothing, daemon=True)  # type: ignore[attr-defined]
        with _sigterm_held_back():
            first.start()
        first.join()


def _nothing() -> None:
    """The whole work of the first child."""


def perform(job: AnyJob, connection: Connection) -> None:
    """A child's whole life. The parent never imports what it does there, whose imports take seconds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    _take_sigterm()
    stopped = threading.Event()
    _heed_parent(connection, stopped)
    _redirect_output(Path(job.log))
    if isinstance(job, Job):
        from ablate import trial

        trial.main(job, connection, stopped)
    elif isinstance(job, TimingJob):
        from ablate import timing

        timing.main(job, connection)
    elif isinstance(job, CalibrationJob):
        from ablate.profiling import calibrate

        calibrate.main(job, connection)
    elif isinstance(job, CapacityJob):
        from ablate import attempt

        attempt.main(job, connection)
    else:
        from ablate import gates

        gates.main(job, connection)


@contextlib.contextmanager
def _sigterm_held_back() -> Iterator[None]:
    """What is started within it holds SIGTERM back: one to all of a run's processes must leave the server alone, which
    tells how children end. Children themselves take it again.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starting it would let go of the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _take_sigterm() -> None:
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _heed_parent(connection: Connection, stopped: threading.Event) -> None:
    """Die with the parent, however busy this process is, as with a compiler, which it takes with it; and hear when it
    says that the work is to stop.

    A signal at the parent's death would come at that of the server that this process is forked from.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        if parent.sentinel not in wait([parent.sentinel, connection]):
            with contextlib.suppress(EOFError, OSError):
                connection.recv()
            stopped.set()
            wait([parent.sentinel])
        _kill(os.getpid())

    threading.Thread(target=watch, daemon=True).start()


def _kill(pid: int) -> None:
    """End a process and those that it has started, now."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.Error):
                each.kill()


def _redirect_output(log: Path) -> None:
    """Everything printed goes to the log, also what libraries print past Python."""
    log.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.stdout = sys.stderr = os.fdopen(target, "w", encoding="utf-8", buffering=1)
    faulthandler.enable(sys.stderr)


class Child:
    """A running trial, or what comes before one, and everything it has said so far."""

    def __init__(self, start: BaseContext, job: AnyJob) -> None:
        self.limit = job.limit
        self.phase = "start"
        self.columns: dict[str, Any] = {}
        self.curves: dict[str, list[Any]] = defaultdict(list)
        self.profiles: dict[str, list[Any]] = defaultdict(list)
        self.verdicts: list[Verdict] = []
        self.outcome: tuple[str, str | None, str | None] | None = None
        self.past: Past | None = None  # what lies before this attempt, where it goes on with a training
        self._oom_kills = oom_kills()
        self.connection, theirs = multiprocessing.Pipe()
        self.process = start.Process(target=perform, args=(job, theirs), daemon=True)  # type: ignore[attr-defined]
        with _sigterm_held_back():
            self.process.start()
        self.began = time.monotonic()
        theirs.close()

    def waitables(self) -> list[Connection | int]:
        """What becomes ready when the child speaks or ends."""
        return [self.connection, self.process.sentinel]

    def listen(self) -> Iterator[tuple[str, Any]]:
        """Messages that have arrived: ("phase", name) and ("curve", points) as they come; the rest is kept."""
        try:
            while self.connection.poll():
                kind, *content = self.connection.recv()
                yield from self._take(kind, content)
        except (EOFError, OSError):
            return

    def _take(self, kind: str, content: list[Any]) -> Iterator[tuple[str, Any]]:
        if kind == "columns":
            self.columns.update(content[0])
        elif kind == "verdict":
            self.verdicts.append(content[0])
        elif kind == "past":
            self.past = content[0]
        elif kind == "outcome":
            self.outcome = (content[0], content[1], content[2])
        elif kind == "profiles":
            for key, values in content[0].items():
                self.profiles[key].extend(values)
        elif kind == "curve":
            for key, values in content[0].items():
                self.curves[key].extend(values)
            yield kind, content[0]
        elif kind == "phase":
            self.phase = content[0]
            yield kind, content[0]

    def ask_to_stop(self) -> None:
        """Say that the work is to end where it can be gone on with. Of all work a training alone heeds it."""
        with contextlib.suppress(OSError):
            self.connection.send("stop")

    def overdue(self) -> bool:
        """Whether the time that the file allows is over."""
        return self.limit is not None and time.monotonic() - self.began > self.limit

    def stop(self, outcome: tuple[str, str | None, str | None]) -> None:
        """End the child now, for the reason given."""
        self.kill()
        list(self.listen())
        self.outcome = outcome

    def kill(self) -> None:
        """End the child now, where it has not ended."""
        if self.process.is_alive():
            _kill(self.process.pid)
        self.process.join()

    def interrupt(self, reason: str) -> None:
        """End the child now; what it has not said otherwise is that it was interrupted."""
        self.kill()
        list(self.listen())
        status, phase, said = self.outcome or ("interrupted", self.phase, None)
        if status == "interrupted":
            self.outcome = (status, phase, "; ".join(filter(None, (reason, said))))

    def end(self) -> tuple[str, str | None, str | None]:
        """(status, phase, reason) of a child that has ended."""
        self.process.join()
        code = self.process.exitcode
        self.connection.close()
        self.process.close()
        return self.outcome or explain(code, self.phase, memory_was_short=oom_kills() > self._oom_kills)


def attend(running: Child, stopped: Callable[[], bool], anew: str = "") -> tuple[str, str | None, str | None]:
    """Listen to a child until it ends, is overdue or `stopped`: (status, phase, reason).

    Its time counts anew from where it enters the phase `anew`.
    """
    while running.process.is_alive() and not (stopped() or running.overdue()):
        wait(running.waitables(), _POLL_SECONDS)
        for kind, content in running.listen():
            if (kind, content) == ("phase", anew):
                running.began = time.monotonic()
    if running.process.is_alive():
        is_late = running.limit is not None and not stopped()
        reason = f"still running after {running.limit:g} s" if is_late else "stopped before it was done"
        running.stop(("timeout", running.phase, reason))
    for _ in running.listen():
        pass
    return running.end()


def explain(code: int | None, phase: str, *, memory_was_short: bool) -> tuple[str, str, str]:
    """(status, phase, reason) of a child that ended without saying how, from its exit code."""
    if code is None or code >= 0:
        return "crashed", phase, f"the process ended with exit status {code} and no word"
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL and memory_was_short:
        return "oom", phase, "ended by the system, which was out of memory"
    hint = ", probably host memory" if -code == signal.SIGKILL else ""
    return "killed", phase, f"signal {-code} ({name}){hint}"


def oom_kills() -> int:
    """How often the system has ended a process for want of memory, here or in this container; 0 where unknown."""
    counts = [_count(Path("/sys/fs/cgroup/memory.events"), "oom_kill"), _count(Path("/proc/vmstat"), "oom_kill")]
    return max(counts)


def _count(file: Path, key: str) -> int:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)
