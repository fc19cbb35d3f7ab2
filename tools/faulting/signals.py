"""Signals to the parent, to children, to the server that they are forked from, and to all, at several moments."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from faulting.bench import EVERY, STEPS, Bench, Case, Home
from faulting.catalogue import MOMENTS, at, fault

_AWAY_SECONDS = 5.0
_TO_COME_SECONDS = 400.0


def _sent(
    number: signal.Signals,
    to: tuple[str, ...],
    moments: Iterable[str],
    statuses: tuple[int, ...],
    again: tuple[str, ...] = (),
    steps_again: int | None = EVERY,
) -> Iterator[Case]:
    for name in moments:
        given = at(MOMENTS[name], signal=int(number), to=to, linger=0.4)
        # By the time that the report is written all is done.
        expected = (*statuses, 0) if name == "report" else statuses
        own: dict[str, Any] = {"environment": {}, "has_database": True}
        yield Case(name, expected, given, again=again, steps_again=steps_again, **own)


@fault
def SIGTERM(bench: Bench) -> Iterable[Case]:
    """To the parent: what runs is stored as `interrupted`, and 143."""
    return _sent(signal.SIGTERM, ("parent",), MOMENTS, (143,))


@fault
def SIGINT(bench: Bench) -> Iterable[Case]:
    """Ctrl-C: to the whole group; the same, and 130."""
    return _sent(signal.SIGINT, ("group",), ("training", "timing"), (130,))


@fault
def SIGINT_twice(bench: Bench) -> Iterable[Case]:
    """Ctrl-C, and again half a second later: at once."""
    return _sent(signal.SIGINT, ("group", "group"), ("gates", "training", "profile"), (130, -2), steps_again=STEPS)


@fault
def SIGTERM_to_all(bench: Bench) -> Iterable[Case]:
    """To the whole group, as a scheduler does."""
    return _sent(signal.SIGTERM, ("group",), ("gates", "training", "profile"), (143,))


@fault
def SIGHUP(bench: Bench) -> Iterable[Case]:
    """The terminal is closed."""
    return _sent(signal.SIGHUP, ("parent",), ("training",), (129, -1))


@fault
def SIGKILL_of_the_parent(bench: Bench) -> Iterable[Case]:
    """No process outlives it, and at most the work since the last checkpoint is done twice."""
    return _sent(signal.SIGKILL, ("parent",), ("gates", "training", "curves stored", "report"), (-9,))


@fault
def SIGKILL_of_a_child(bench: Bench) -> Iterable[Case]:
    """A row `killed`, and the next trial goes on; `--retry-failed` does it again."""
    moments = ("gates", "training", "profile", "timing")
    return _sent(signal.SIGKILL, ("self",), moments, (1,), ("--retry-failed",), None)


@fault
def SIGKILL_of_the_server(bench: Bench) -> Iterable[Case]:
    """The process that children are forked from: as if the child had been killed, or nothing at all."""
    return _sent(signal.SIGKILL, ("server",), ("gates", "training", "timing"), (0, 1), ("--retry-failed",), None)


@fault
def SIGSTOP_and_SIGCONT(bench: Bench) -> Iterable[Case]:
    """All processes stand still for a few seconds, as on a laptop that sleeps."""
    for name in ("training", "timing"):
        given = at(MOMENTS[name], signal=int(signal.SIGSTOP), to=("group",))
        yield Case(name, given=given, meanwhile=_continued)


@fault
def SIGSTOP_of_a_child_for_ever(bench: Bench) -> Iterable[Case]:
    """It is taken to hang, and ended; `--retry-failed` does it again."""
    for name in ("gates", "training"):
        given = {**at(MOMENTS[name], signal=int(signal.SIGSTOP), to=("self",)), "set": SHORT}
        yield Case(name, (1,), given, again=("--retry-failed",), steps_again=None)


SHORT = {"ablate.pulse.QUIET_SECONDS": 5.0, "ablate.gatekeeper.LIMIT_SECONDS": 30.0}
"""What waits for minutes waits for seconds."""


def _continued(home: Home, running: subprocess.Popen[bytes]) -> None:
    """Let all that stands still go on after a while."""
    until(lambda: any(home.folder.glob("*.sprung")), running)
    time.sleep(_AWAY_SECONDS)
    if running.poll() is None:
        os.killpg(running.pid, signal.SIGCONT)


def until(holds: Callable[[], bool], running: subprocess.Popen[bytes]) -> None:
    """Wait for something that a run does, or for its end."""
    deadline = time.monotonic() + _TO_COME_SECONDS
    while not holds() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
