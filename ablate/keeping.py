"""What could not be stored is kept and tried again: a disk that is full for a moment costs no finished trial."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ablate.files import check_room

_log = logging.getLogger(__name__)

_TRIES = 5
_FIRST_PAUSE_SECONDS = 0.5  # each further one is twice as long


@dataclass
class _Kept:
    what: str
    write: Callable[[], None]
    reason: str


class Keeper:
    """Stores what must not be lost, now or later."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: list[_Kept] = []
        self._tries, self._next = 0, 0.0

    def put(self, what: str, write: Callable[[], None]) -> bool:
        """Whether it could be written now; if not it is kept."""
        try:
            write()
        except OSError as error:
            self._kept.append(_Kept(what, write, error.strerror or str(error)))
            _log.warning("not stored: %s: %s; tried again", what, self._kept[-1].reason)
            self._tries, self._next = 0, time.monotonic() + _FIRST_PAUSE_SECONDS
            return False
        return True

    def again(self) -> None:
        """Try again what is kept, if some time has passed since the last try."""
        if self._kept and not self.gave_up and time.monotonic() >= self._next:
            self.last_try()
            self._tries += 1
            self._next = time.monotonic() + _FIRST_PAUSE_SECONDS * 2**self._tries

    def last_try(self) -> None:
        """Try again what is kept, now."""
        waiting, self._kept = self._kept, []
        for each in waiting:
            try:
                each.write()
            except OSError as error:
                each.reason = error.strerror or str(error)
                self._kept.append(each)

    @property
    def gave_up(self) -> bool:
        """Whether it was tried often enough in a folder that takes nothing, where what comes next is lost too."""
        return bool(self._kept) and self._tries >= _TRIES and not self._takes_files()

    @property
    def goes_on(self) -> bool:
        """Whether what is done next can be stored, as far as one can see."""
        return not self._kept or self._takes_files()

    def settle(self, stopped: Callable[[], bool]) -> bool:
        """Try again until all is stored, or it has been tried often enough, or `stopped`. Whether work can go on."""
        while self._kept and self._tries < _TRIES and not stopped():
            time.sleep(max(0.0, min(_FIRST_PAUSE_SECONDS, self._next - time.monotonic())))
            self.again()
        return self.goes_on

    def _takes_files(self) -> bool:
        try:
            check_room(self._folder, 0)
        except OSError:
            return False
        return True

    def lost(self) -> list[str]:
        """What is not stored, and why."""
        return [f"{each.what}: {each.reason}" for each in self._kept]
