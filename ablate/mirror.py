"""MLflow beside a run: a process of its own writes the mirror, and the run waits for it for seconds at most, in all.

A server that never answers, a locked file, a crash in a driver: what holds that process up does not hold the training
up, nor the end of the run. Whatever it could not write is told once, with the command that writes it later.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from ablate.mlflow_address import SYNC, TrackingError
from ablate.results import Store
from ablate.tracking import SyncResult, Tracker

_log = logging.getLogger(__name__)

SECONDS_BESIDE_TRAINING = 10.0
"""For how long the run waits for MLflow between trials, in all. While it waits, nothing disturbs a measurement."""

SECONDS_AT_END = 5.0
"""For how long it waits at the end for what is still to be written, beside what is left of that."""

SECONDS_IN_A_HURRY = 1.0
"""For how long it then waits where it was told to end: all of that has to be over in 10 s."""

_POLL_SECONDS = 0.2
_MOST_UNANSWERED = 1000  # what is asked for stands in a pipe, and a full one would hold up who writes to it
_BEHIND = 3  # unanswered requests that are no accident

_Request = tuple[str, str]
_OPEN: _Request = ("open", "")


@dataclass(frozen=True)
class Answer:
    """What became of one request: why MLflow is behind now, or None, and what a person should know."""

    fault: str | None
    notices: Sequence[str] = ()


class Mirror:
    """The process that writes, seen from the run."""

    def __init__(
        self,
        results_root: Path,
        store: Store,
        command: str,
        *,
        behind: bool,
        patience: float = SECONDS_BESIDE_TRAINING,
        patience_at_end: float = SECONDS_AT_END,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._command, self._patience, self._patience_at_end = command, patience, patience_at_end
        self._stopped, self._hurries = stopped, False
        self._unanswered, self._lost = 0, False
        self._fault: str | None = None
        start = multiprocessing.get_context("spawn")
        self._connection, theirs = start.Pipe()
        self._process = start.Process(target=_perform, args=(theirs, results_root, store.folder, behind))
        with _signals_held_back():
            self._process.start()
        theirs.close()
        self._ask(_OPEN)

    def mirror(self, trial_id: str) -> None:
        """One trial, which is stored already."""
        self._ask(("mirror", trial_id))

    def attach(self, report_folder: Path) -> None:
        """The report, and what the rounds of timing say."""
        self._ask(("attach", str(report_folder)))

    def hurry(self) -> None:
        """The run is to end now: what MLflow does not know by then is for `sync`."""
        if self._hurries:
            return
        self._hurries = True
        self._patience, self._patience_at_end = 0.0, min(SECONDS_IN_A_HURRY, self._patience_at_end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        """After an error nobody waits."""
        if kind is None:
            self._patience = max(0.0, self._patience) + self._patience_at_end
            self._wait(hopeful=True)
            if self._fault is None and (self._lost or self._unanswered):
                self._warn(f"it did not answer in time ({self._unanswered} requests are open)")
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _ask(self, request: _Request) -> None:
        if self._lost or self._unanswered >= _MOST_UNANSWERED:
            self._lost = True
            return
        try:
            self._connection.send(request)
        except OSError:
            self._died()
            return
        self._unanswered += 1
        self._wait(hopeful=self._fault is None)
        if self._patience <= 0 and self._unanswered >= _BEHIND and self._fault is None:
            self._fault = f"it is slow: {self._unanswered} requests are not answered yet. Training does not wait for it"
            self._warn(self._fault)

    def _wait(self, *, hopeful: bool) -> None:
        """Listen until all is answered or patience is at its end; without hope, only to what is said already."""
        while self._unanswered:
            if self._stopped():  # a signal is answered also where MLflow is not
                self.hurry()
            began, seconds = time.monotonic(), max(0.0, self._patience) if hopeful else 0.0
            heard = self._connection.poll(min(seconds, _POLL_SECONDS))
            self._patience -= time.monotonic() - began
            if not heard and seconds <= _POLL_SECONDS:
                return
            if not heard:
                continue
            try:
                self._hear(self._connection.recv())
            except (EOFError, OSError):
                self._died()

    def _hear(self, answer: Answer) -> None:
        self._unanswered -= 1
        for notice in answer.notices:
            _log.warning("MLflow: %s", self._told(notice))
        if answer.fault and self._fault is None:
            self._warn(answer.fault)
        if answer.fault or self._fault is None:
            self._fault = answer.fault
        elif not self._unanswered:
            self._fault = None
            _log.warning("MLflow is up to date again.")

    def _died(self) -> None:
        self._unanswered, self._lost = 0, True
        if self._fault is None:
            self._fault = "the process that writes it ended"
            self._warn(self._fault)

    def _warn(self, fault: str) -> None:
        told = self._told(fault)
        cure = "" if self._command in told else f". To bring it up to date: {self._command}"
        _log.warning("MLflow is behind: %s%s", told.rstrip(".") if cure else told, cure)

    def _told(self, text: str) -> str:
        return text.replace(SYNC, self._command)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """A process that starts meanwhile never hears of Ctrl-C: its parent decides what that means."""
    resource_tracker.ensure_running()  # where it is started, it lets the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- The process ------------------------------------------------------------------------------------------------------


def _perform(connection: Connection, results_root: Path, folder: Path, behind: bool) -> None:
    """The process's whole life: until its parent ends it, or has ended."""
    for output in (sys.stdout, sys.stderr):
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), output.fileno()
        )  # what libraries say of an address may hold passwords
    desk = Desk(results_root, Store(folder), behind=behind)
    requests = _requests(connection)
    while True:
        connection.send(desk.do(requests.get()))


def _requests(connection: Connection) -> queue.SimpleQueue[_Request]:
    """What comes in, taken from the pipe at once: so that it is never full, and its end is the end of this process."""
    waiting: queue.SimpleQueue[_Request] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                waiting.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    return waiting


class Desk:
    """Does what is asked. After a fault each next request begins with all that is missing: MLflow may be back."""

    def __init__(self, results_root: Path, store: Store, *, behind: bool) -> None:
        self._results_root, self._store, self._behind = results_root, store, behind
        self._tracker: Tracker | None = None

    def do(self, request: _Request) -> Answer:
        """One request. Whatever goes wrong is told, not raised."""
        try:
            notices = self._catch_up()
            assert self._tracker is not None
            if request[0] == "mirror":
                self._tracker.mirror(request[1])
            elif request[0] == "attach":
                self._tracker.attach(Path(request[1]))
            return Answer(None, notices)
        except TrackingError as error:
            self._tracker, self._behind = None, True
            return Answer(f"{error.message} {error.cure}")

    def _catch_up(self) -> Sequence[str]:
        if self._tracker is not None:
            return ()
        tracker = Tracker.connect(self._results_root, self._store)
        notices = tracker.notices
        if self._behind:
            tracker.catch_up(SyncResult())
        self._tracker, self._behind = tracker, False
        return notices
