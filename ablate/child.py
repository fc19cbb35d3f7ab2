"""A child process, seen from the parent: started fresh, listened to, and its end explained."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO

from ablate import bond, cgroup, pulse
from ablate.files import check_file
from ablate.job import BuildJob, CalibrationJob, CapacityJob, GateJob, Job, Past, TimingJob, Verdict

_log = logging.getLogger(__name__)

AnyJob = Job | TimingJob | GateJob | BuildJob | CalibrationJob | CapacityJob

STOP_SECONDS = 10.0
"""A killed process is gone in moments, unless it waits within the system for what may never come."""

NO_MEMORY = ("out of memory", "allocate memory", "not enough memory", "bad_alloc", "ALLOC_FAILED", "ALLOCATION_FAILED")
"""What the messages of torch, CUDA, cuDNN and C++ have in common when memory is short."""

_LAST_BYTES = 2**16
_POLL_SECONDS = 0.2
_OWN_VARIABLES = (
    *("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"),
    *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
)
"""Only their parent has to do with MLflow, and only it needs to be let in."""


def context(device: str) -> BaseContext:
    """How children start: forked from a clean server that has torch imported, or afresh where CUDA is in play."""
    if device == "cuda" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["ablate.trial", "ablate.timing"])
    return forked


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


def warm_up(start: BaseContext, stopped: Callable[[], bool] = lambda: False) -> None:
    """Have the server that children are forked from import what it must, so that no trial's time has a part of that.

    That takes many seconds on a busy machine: who has been `stopped` meanwhile does not wait for its end.
    """
    if start.get_start_method() != "forkserver" or stopped():
        return
    from multiprocessing import forkserver  # some systems have none

    with bond.shielded():  # the server alone: while signals are held back nobody would hear of them
        forkserver.ensure_running()
    first = start.Process(target=_nothing, daemon=True)  # type: ignore[attr-defined]
    warming = threading.Thread(target=_start_and_join, args=(first,), daemon=True)  # the start, too, lasts until then
    warming.start()
    while warming.is_alive() and not stopped():
        warming.join(_POLL_SECONDS)
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if warming.is_alive() and server is not None:
        bond.kill(server)  # it would only look for its parent once all is imported


def _start_and_join(first: BaseProcess) -> None:
    with contextlib.suppress(EOFError, OSError):  # the next child that is started says what is wrong
        first.start()
        first.join()


def _nothing() -> None:
    """The whole work of the first child."""


def perform(job: AnyJob, connection: Connection) -> None:
    """A child's whole life. The parent never imports what it does there, whose imports take seconds."""
    bond.bind()
    stopped = threading.Event()
    _hear_parent(connection, stopped)
    _redirect_output(Path(job.log))
    pulse.give(partial(connection.send, ("beat",)))
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


def _hear_parent(connection: Connection, stopped: threading.Event) -> None:
    """All that the parent ever says is that the work is to stop."""

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            connection.recv()
            stopped.set()

    threading.Thread(target=listen, daemon=True).start()


def _redirect_output(log: Path) -> None:
    """Everything printed goes to the log, also what libraries print past Python."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists():
            check_file(log)
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o644)
    except OSError:
        target = os.open(os.devnull, os.O_WRONLY)
    os.dup2(target, 1)
    os.dup2(target, 2)
    log_file = io.BufferedWriter(_Log(target, "w"))
    sys.stdout = sys.stderr = io.TextIOWrapper(log_file, encoding="utf-8", line_buffering=True)
    faulthandler.enable(sys.stderr)


class _Log(io.FileIO):
    """What a full disk does not take is not in the log: that must not end a trial."""

    def write(self, content: Any, /) -> int:
        """All of it is written, as far as anyone is told."""
        with contextlib.suppress(OSError):
            super().write(content)
        return len(content)


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
        self._allowed = job.memory_bytes if isinstance(job, Job | TimingJob) else None
        self._log, self._log_began = Path(job.log), _size(Path(job.log))
        self._is_deaf = False
        self.connection, theirs = multiprocessing.Pipe()
        self.process = start.Process(target=perform, args=(job, theirs), daemon=True)  # type: ignore[attr-defined]
        with bond.shielded():
            self.process.start()
        self.began = time.monotonic()
        self._patience = pulse.Patience(self.process.pid)
        # Whatever ends this process, it does not wait at its exit for children that leave signals to it.
        self._at_exit = weakref.finalize(self, bond.kill, self.process.pid)
        theirs.close()

    def waitables(self) -> list[Connection | int]:
        """What becomes ready when the child speaks or ends."""
        return [self.process.sentinel, *([] if self._is_deaf else [self.connection])]

    def listen(self) -> Iterator[tuple[str, Any]]:
        """Messages that have arrived: ("phase", name) and ("curve", points) as they come; the rest is kept."""
        try:
            while not self._is_deaf and self.connection.poll():
                kind, *content = self.connection.recv()
                self._patience.hear()
                yield from self._take(kind, content)
        except (EOFError, OSError):
            self._is_deaf = True  # a pipe at its end is always ready, and says nothing

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

    def too_late(self) -> str | None:
        """Why it is to be ended now: its time is over, or it gives no sign of life."""
        if self.overdue():
            return f"still running after {self.limit:g} s"
        silent = self._patience.silence()
        return None if silent is None else f"no sign of life for {silent:.0f} s in phase {self.phase}"

    def stop(self, outcome: tuple[str, str | None, str | None]) -> None:
        """End the child now, for the reason given."""
        self.kill()
        list(self.listen())
        self.outcome = outcome

    def kill(self) -> None:
        """End the child now, where it has not ended. One that waits for a device or a disk cannot be, and is left."""
        if self.process.is_alive():
            bond.kill(self.process.pid)
        self.process.join(STOP_SECONDS)
        if self.process.is_alive():
            _log.warning("process %d cannot be ended: it is left to the system", self.process.pid)
            multiprocessing.process._children.discard(self.process)  # type: ignore[attr-defined]  # waited for at exit

    def interrupt(self, reason: str) -> None:
        """End the child now; what it has not said otherwise is that it was interrupted."""
        self.kill()
        list(self.listen())
        status, phase, said = self.outcome or ("interrupted", self.phase, None)
        if status == "interrupted":
            self.outcome = (status, phase, "; ".join(filter(None, (reason, said))))

    def end(self) -> tuple[str, str | None, str | None]:
        """(status, phase, reason) of a child that has ended."""
        self.process.join(STOP_SECONDS)
        code = self.process.exitcode
        self.connection.close()
        self._at_exit.detach()
        bond.sweep(self.process.pid)
        if code is not None:
            self.process.close()
        short = oom_kills() > self._oom_kills or self._log_says_no_memory()
        status, phase, reason = self.outcome or explain(code, self.phase, memory_was_short=short)
        if status == "oom" and self._allowed is not None:
            reason = f"{reason} (a trial may take {self._allowed / 2**30:.2g} GiB here: --memory, --workers)"
        return status, phase, reason

    def _log_says_no_memory(self) -> bool:
        """Whether C or C++ code said so before it ended the process, as it may not be able to in Python."""
        with contextlib.suppress(OSError), _opened(self._log) as file:
            file.seek(max(self._log_began, _size(self._log) - _LAST_BYTES))
            said = file.read(_LAST_BYTES).decode("utf-8", "replace")
            return any(sign in said for sign in NO_MEMORY)
        return False


def _opened(log: Path) -> BinaryIO:
    check_file(log)
    return log.open("rb")


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def attend(running: Child, stopped: Callable[[], bool], anew: str = "") -> tuple[str, str | None, str | None]:
    """Listen to a child until it ends, is overdue or `stopped`: (status, phase, reason).

    Its time counts anew from where it enters the phase `anew`.
    """
    late = None
    while running.process.is_alive() and not (stopped() or (late := running.too_late())):
        wait(running.waitables(), _POLL_SECONDS)
        for kind, content in running.listen():
            if (kind, content) == ("phase", anew):
                running.began = time.monotonic()
    if running.process.is_alive():
        running.stop(("timeout", running.phase, late or "stopped before it was done"))
    for _ in running.listen():
        pass
    return running.end()


def explain(code: int | None, phase: str, *, memory_was_short: bool) -> tuple[str, str, str]:
    """(status, phase, reason) of a child that ended without saying how, from its exit code."""
    if code is None or code >= 0:
        return "crashed", phase, f"the process ended with exit status {code} and no word"
    name = signal.Signals(-code).name
    if memory_was_short and -code == signal.SIGKILL:
        return "oom", phase, "ended by the system, which was out of memory"
    if memory_was_short and -code in (signal.SIGABRT, signal.SIGSEGV):
        return "oom", phase, f"out of memory: signal {-code} ({name})"
    hint = ", probably host memory" if -code == signal.SIGKILL else ""
    return "killed", phase, f"signal {-code} ({name}){hint}"


def oom_kills() -> int:
    """How often the system has ended a process for want of memory, here or in one of the groups around this process."""
    groups = [folder / name for folder in cgroup.folders("memory") for name in ("memory.events", "memory.oom_control")]
    return sum(_count(file, "oom_kill") for file in (*groups, Path("/proc/vmstat")))


def _count(file: Path, key: str) -> int:
    words = cgroup.words(file)
    return next((int(value) for word, value in zip(words[::2], words[1::2], strict=False) if word == key), 0)
