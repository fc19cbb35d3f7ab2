"""Signs of life: a child gives one at each piece of its work, and its parent tells a slow child from one that hangs.

What hangs uses no CPU: a deadlock, a stopped process, a disk that does not answer. What is slow does, but so does an
endless loop, which therefore takes longer to be told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import psutil

QUIET_SECONDS = 300.0
"""So long a child may give no sign of life while no CPU works for it."""

BUSY_SECONDS = 3600.0
"""And so long while one does."""

LONGER = 10
"""Or so many times its longest silence so far, where that is more: work is known by then to be that slow."""

EVERY_SECONDS = 1.0
"""Signs of life are not given more often."""

_LOOK_SECONDS = 5.0
_AWAY_SECONDS = 30.0
_SHARE = 0.01


# --- In the child -----------------------------------------------------------------------------------------------------


class _Giver:
    """The one of this process, which is about one piece of work."""

    def __init__(self) -> None:
        self.give: Callable[[], object] = lambda: None
        self.given = -math.inf

    def beat(self) -> None:
        """Work goes on, said by the thread that does it."""
        now = time.monotonic()
        if now - self.given >= EVERY_SECONDS:
            self.given = now
            self.give()


_giver = _Giver()
beat = _giver.beat


def give(how: Callable[[], object]) -> None:
    """Signs of life of this process are given so."""
    _giver.give = how


# --- In the parent ----------------------------------------------------------------------------------------------------


class Patience:
    """How long a child has been silent, and whether that is too long."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.longest = 0.0
        self.heard = self.active = self._asked = time.monotonic()
        self._looked, self._used = self.heard, 0.0

    def hear(self) -> None:
        """It has said something."""
        now = time.monotonic()
        self.longest = max(self.longest, now - self.heard)
        self.heard = self.active = now

    def silence(self) -> float | None:
        """Seconds for which it has given no sign of life, where that is too long. To be asked again and again."""
        now = time.monotonic()
        self._excuse(now)
        if now - max(self._looked, self.heard) >= min(_LOOK_SECONDS, QUIET_SECONDS / 2):
            self._look(now)
        usual = LONGER * self.longest
        is_lost = now - self.active > max(QUIET_SECONDS, usual) or now - self.heard > max(BUSY_SECONDS, usual)
        return now - self.heard if is_lost else None

    def _excuse(self, now: float) -> None:
        """While this process was away itself, stopped or in a machine that slept, nobody could be heard."""
        away = now - self._asked
        self._asked = now
        if away > _AWAY_SECONDS:
            self.heard, self.active = self.heard + away, self.active + away

    def _look(self, now: float) -> None:
        """Whether a CPU has worked for it since the last look."""
        used, before = _cpu_seconds(self.pid), self._used
        if abs(used - before) > _SHARE * (now - self._looked):  # it is less where a process of its own has ended
            self.active = now
        self._looked, self._used = now, used


def _cpu_seconds(pid: int) -> float:
    """Those of a process and of all that it has started; none of one that is gone."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0.0
    return sum(map(_own_seconds, family))


def _own_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
