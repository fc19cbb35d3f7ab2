"""Leases in a folder that several runs write to, also on several machines: who works on what, until the owner dies.

A lease is a small file that is there as long as somebody holds it, with a counter in it that a thread of the holder
renews. It is dead at once where its process is known to be gone, which only the same system can know, and elsewhere
when an observer has watched the counter stand still for long enough. Nobody's clock is compared with another's: the
time of day may jump. Who was stopped for so long finds another's token in its place, and stores nothing.

Locks of the system, and so `filelock`, are not enough here: they do not say who holds them, a process that is stopped
holds them for good, and over network file systems they may hold on one machine only. What all of these do atomically is
to create a name that must not be there, and to rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import psutil

from ablate.document import printable
from ablate.files import check_file
from ablate.host import boot, started

_log = logging.getLogger(__name__)

DEAD_AFTER = 60.0
"""Seconds of watching without a renewal after which a holder counts as dead, where nothing tells it sooner."""

RENEWALS = 12
"""So often is a lease renewed in that time."""

_POLL_SECONDS = 0.2
_LONGEST = 65536
_TOKEN = re.compile("[0-9a-f]{32}")
_BEFORE_COUNT = '{"renewed": '
_DIGITS = 12


# --- Who holds one ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holder:
    """A process on some machine, as a lease names it, and in a person's words what it does; none for what is brief."""

    host: str
    boot: str
    pid: int
    started: str
    token: str
    what: str

    @classmethod
    def new(cls, what: str) -> Self:
        """This process, with a token that nobody else has."""
        pid = os.getpid()
        return cls(platform.node(), boot(), pid, started(pid) or "", uuid.uuid4().hex, what)

    @classmethod
    def read(cls, content: bytes) -> Self | None:
        """As the file says; None where it is torn, or not a lease."""
        try:
            said = json.loads(content)
            found = cls(**{name: said[name] for name in cls.__dataclass_fields__})
            if type(found.pid) is int and 0 < found.pid < 2**31 and _TOKEN.fullmatch(found.token):
                return cls(**{**asdict(found), "host": printable(found.host), "what": printable(found.what)})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        return None

    def content(self, count: int) -> bytes:
        """The file, with the counter where it is written over in place."""
        return f"{_BEFORE_COUNT}{_digits(count)}, {json.dumps(asdict(self))[1:]}\n".encode()

    def is_here(self) -> bool:
        """Whether its process, if it lives, is one that this system can see."""
        return bool(self.boot) and (self.host, self.boot) == (printable(platform.node()), boot())

    def is_gone(self) -> bool:
        """Whether its process is known to have ended."""
        if not self.is_here():
            return False
        now = started(self.pid)
        if now and self.started:
            return now != self.started
        return not psutil.pid_exists(self.pid)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _digits(count: int) -> str:
    return f"{count:>{_DIGITS}}"


# --- The file ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """What stands in a lease's place. `holder` is None where that is torn or foreign."""

    content: bytes
    holder: Holder | None

    @property
    def identity(self) -> str:
        """What no other lease has, however often this one is renewed."""
        return self.holder.token if self.holder else hashlib.sha256(self.content).hexdigest()[:32]


def _look(path: Path) -> _Found | None:
    try:
        check_file(path)
        with path.open("rb") as file:
            content = file.read(_LONGEST)
    except FileNotFoundError:
        return None
    except OSError as error:
        return _Found(f"cannot be read: {error.errno}".encode(), None)
    return _Found(content, Holder.read(content))


def _create(path: Path, content: bytes) -> bool:
    """Whether the file was not there, and is now: of several that try exactly one, and nobody sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            # Of a server that did it, and whose answer was lost, it is asked again.
            found = _look(path)
            return found is not None and found.content == content
        except OSError:
            return _create_in_place(path, content)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _create_in_place(path: Path, content: bytes) -> bool:
    """Where there are no hard links. Who sees half of it takes it for torn, and waits."""
    try:
        with path.open("xb", buffering=0) as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


# --- Holding one ------------------------------------------------------------------------------------------------------


class Lease:
    """A lease that this process holds, renewed by a thread until it is released or `lost` to somebody else.

    Without a path, where the folder takes none, it is always held.
    """

    def __init__(self, path: Path | None, holder: Holder, every: float) -> None:
        self.path, self.holder, self.lost = path, holder, False
        self._count, self._every = 0, every
        self._guard, self._released = threading.Lock(), threading.Event()
        if path:
            threading.Thread(target=self._keep, name=f"lease {path.stem}", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def renew(self) -> bool:
        """Whether it is still held: to be asked before anything is stored. Who watches sees that its holder lives."""
        with self._guard:
            if self.path and not self.lost:
                # What cannot be read is not lost by that; who cannot renew a lease loses it in time.
                with contextlib.suppress(OSError):
                    self.lost = not self._count_up(self.path)
            return not self.lost

    def _count_up(self, path: Path) -> bool:
        """Written in place, into the file that was read: a file that another has put there stays as it is."""
        try:
            check_file(path)
            file = path.open("r+b", buffering=0)
        except FileNotFoundError:
            return False
        with file:
            found = Holder.read(file.read(_LONGEST))
            if found is None or found.token != self.holder.token:
                return False
            self._count += 1
            file.seek(len(_BEFORE_COUNT))
            file.write(_digits(self._count).encode())
        return True

    def _keep(self) -> None:
        while not self._released.wait(self._every) and self.renew():
            pass

    def release(self) -> None:
        """Give it back, once; what another has taken over stays."""
        if self._released.is_set():
            return
        self._released.set()
        with contextlib.suppress(OSError):
            if self.path and self.renew():
                _remove(self.path, self.holder.token, self.holder.token)


def _remove(path: Path, identity: str, by: str) -> bool:
    """Whether the lease `identity` was there and is gone, by our hand. Another that was there by then is put back."""
    aside = path.with_name(f".{by}.gone")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return False
    moved = _look(aside)
    is_it = moved is not None and moved.identity == identity
    if moved is not None and not is_it:
        _create(path, moved.content)
    with contextlib.suppress(OSError):
        aside.unlink()
    return is_it


# --- Taking one -------------------------------------------------------------------------------------------------------


@dataclass
class _Watched:
    """For how long an observer has seen a file as it is, and when it last looked."""

    content: bytes
    looked: float
    still: float = 0.0


@dataclass
class Leases:
    """Those of a folder, as one process takes them, and watches those of others."""

    folder: Path
    seconds: float = field(default_factory=lambda: DEAD_AFTER)
    _seen: dict[str, _Watched] = field(default_factory=dict)
    _is_told: bool = False

    def take(self, name: str, what: str = "") -> Lease | None:
        """The lease, or None where another holds it: to be asked again and again, for only watching tells who died.

        Where the folder takes no leases, that is said once, and everything is to be had.
        """
        try:
            return self._take(name, what)
        except OSError as error:
            if not self._is_told:
                self._is_told = True
                reason = error.strerror or error
                _log.warning("%s: %s: nothing keeps another run from doing the same work", self.folder, reason)
            return Lease(None, Holder.new(what), self.seconds)

    def wait(
        self,
        name: str,
        what: str = "",
        stopped: Callable[[], bool] = lambda: False,
        told: Callable[[str], None] = lambda holder: None,
    ) -> Lease | None:
        """The lease, as soon as it is to be had; None where it is `stopped` while another has it. Who has it is told
        once.
        """
        heard = None
        while (lease := self.take(name, what)) is None:
            if stopped():
                return None
            if (holder := self.holder(name)) != heard:
                heard = holder
                told(holder)
            time.sleep(_POLL_SECONDS)
        return lease

    def tidy(self) -> None:
        """Remove those whose process is known to have ended."""
        for path in sorted(self.folder.glob("[!.]*.json")):
            found = _look(path)
            if found and found.holder and found.holder.is_gone() and (mine := self.take(path.stem)):
                mine.release()

    def holder(self, name: str) -> str:
        """In a person's words."""
        found = _look(self._path(name))
        return str(found.holder) if found and found.holder else "somebody who does not say who"

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _take(self, name: str, what: str) -> Lease | None:
        path, found = self._path(name), _look(self._path(name))
        if found and not (self._is_dead(name, found) and self._take_away(name, found)):
            return None
        self._seen.pop(name, None)
        holder = Holder.new(what)
        return Lease(path, holder, self.seconds / RENEWALS) if _create(path, holder.content(0)) else None

    def _is_dead(self, name: str, found: _Found) -> bool:
        """Only what was watched counts: between two looks that are far apart this process may have been stopped too."""
        now = time.monotonic()
        seen = self._seen.get(name)
        if seen is None or seen.content != found.content:
            seen = self._seen[name] = _Watched(found.content, now)
        seen.still += min(now - seen.looked, self.seconds / RENEWALS)
        seen.looked = now
        return seen.still >= self.seconds or bool(found.holder and found.holder.is_gone())

    def _take_away(self, name: str, found: _Found) -> bool:
        """Whether a dead lease is gone, by our hand. Only who holds a lease on that very one may try, so that nobody
        who looked at it earlier takes away what has come in its place.
        """
        by = self._take(f".{name}.{found.identity}", "")
        if by is None:
            return False
        with by:
            return _look(self._path(name)) == found and _remove(self._path(name), found.identity, by.holder.token)


# --- Seeing those of others -------------------------------------------------------------------------------------------


def living(folder: Path) -> Iterator[Holder]:
    """Who does something at length there, but for those that are known to be gone."""
    for path in sorted(folder.glob("[!.]*.json")):
        found = _look(path)
        if found and found.holder and found.holder.what and not found.holder.is_gone():
            yield found.holder


def others_here(results: Path) -> int:
    """How much is being done on this system by other processes, for the experiments whose results are in a folder."""
    return sum(
        holder.is_here() and holder.pid != os.getpid()
        for folder in results.glob("*/leases")
        for holder in living(folder)
    )
