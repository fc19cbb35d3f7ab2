"""What binds a child to its parent: it dies with it, whatever it is doing, and so does all that it has started.

A child leads a process group of its own. Signals to the parent's group (Ctrl-C, a scheduler's SIGTERM) do not reach it,
since the parent decides what they mean, and all that it starts can be ended together.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType

import psutil

_STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """What is started here takes no signal to stop, until it says otherwise; this process has those that came after."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # or it is started in between, and lets signals in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def bind() -> None:
    """Bind this process, a child, to its parent. First of all, since it may be lost before."""
    with contextlib.suppress(AttributeError, OSError):  # not on Windows, and not where it leads a session already
        os.setpgid(0, 0)
    _leave_signals_to_parent()
    _die_with_parent()
    _be_first_to_go()


def _leave_signals_to_parent() -> None:
    """A handler and not SIG_IGN, which everything that is started from here would inherit."""

    def ignore(_: int, __: FrameType | None) -> None:
        return None

    for number in _STOPPING:
        signal.signal(number, ignore)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)


def _die_with_parent() -> None:
    """A pipe from the parent closes when it dies. The kernel then kills the group, also while this process computes in
    C, or is stopped; where it cannot be told to, a thread does it as soon as it gets its turn.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    pipe = parent.sentinel

    def watch() -> None:
        wait([pipe])
        kill(os.getpid())

    threading.Thread(target=watch, daemon=True).start()
    with contextlib.suppress(ImportError, OSError):
        _signal_at_end_of(pipe)
    if wait([pipe], 0):  # it died before
        kill(os.getpid())


def _signal_at_end_of(pipe: int) -> None:
    """SIGKILL for this group as soon as nobody can write to the pipe any more. Linux alone can."""
    import fcntl

    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def _be_first_to_go() -> None:
    """When the machine has no memory left, a child ends and not the parent, which would take all others with it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def kill(pid: int) -> None:
    """End a child and all that it has started, now."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.Error):
                each.kill()
    sweep(pid)


def sweep(pid: int) -> None:
    """End what is left of the group of a child, also of one that is gone."""
    with contextlib.suppress(AttributeError, OSError):
        os.killpg(pid, signal.SIGKILL)
