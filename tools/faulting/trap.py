"""What stands in every process of a run as its `sitecustomize`: it notes what is done, and springs one fault.

`ABLATE_TRAP` is told as JSON: `notes` (the file for notes), `roots` (folders in which writes count), `moment` (of which
kind of process, which operation on what, the how manieth) and `act` (what happens then). Without it nothing is done.
Only the standard library, for this is run before anything else.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import io
import json
import os
import re
import sys
import time
from typing import Any

DISK = ("open", "write", "fsync", "replace", "mkdir", "link")
"""Operations that a full disk fails."""

_REPLACED = re.compile(r"\.(.+)\.[0-9a-f]{32}\.tmp")
_MOST_BYTES = 3 * 2**30

_open, _os_open, _os_write, _fsync, _time, _sleep = io.open, os.open, os.write, os.fsync, time.time, time.sleep


def role(path: str, roots: list[str]) -> str | None:
    """What a file is, whatever its trial is called and however it is written; None for one outside of the roots."""
    for root in roots:
        if path == root or path.startswith(root + os.sep):
            folder, name = os.path.split(os.path.relpath(path, os.path.dirname(root)))  # noqa: PTH120
            name = found[1] if (found := _REPLACED.fullmatch(name)) else name
            return re.sub("[0-9]+(?=[-.])", "N", re.sub("[0-9a-f]{12,64}", "ID", f"{folder}/{name}".lstrip("/")))
    return None


class Trap:
    """The one of this process."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.notes, self.roots = told["notes"], told["roots"]
        self.moment, self.act, self.values = told.get("moment") or {}, told.get("act") or {}, told.get("set") or {}
        self.flag = self.notes + ".sprung"
        self.parent = int(os.environ.setdefault("ABLATE_TRAP_PARENT", str(os.getpid())))
        self.count, self.kinds, self.hooked, self.modules = 0, dict[int, str](), 0, 0

    # --- What goes on

    def write(self, operation: str, path: Any) -> None:
        """A file is about to be written, or what belongs to it; raises where that fails."""
        if name := self._role(path):
            self.passed(operation, name)
            if self.act.get("lasts") and self.is_sprung():
                self._fail(name)

    def said(self, message: Any) -> None:
        """A child tells its parent something."""
        if isinstance(message, tuple) and message and message[0] in ("phase", "verdict", "outcome"):
            self.passed("say", " ".join(map(str, message[: 2 if message[0] == "phase" else 1])))

    def passed(self, operation: str, name: str) -> None:
        """A moment has come."""
        self._settle()
        kind = self._kind()
        if self._is_moment(kind, operation, name):
            self.count += 1
            if self.count == self.moment["nth"] and self._first():
                self._note(kind, operation, name, sprung=True)
                self._spring(name)
                return
        self._note(kind, operation, name)
        if operation == "step" and self.act.get("linger") and self.is_sprung():
            _sleep(self.act["linger"])

    def _is_moment(self, *now: str) -> bool:
        wanted = [self.moment.get(name) for name in ("kind", "operation", "role")]
        return all(each is not None and re.fullmatch(each, is_now) for each, is_now in zip(wanted, now, strict=True))

    def is_sprung(self) -> bool:
        """Whether the fault has been, in whichever process."""
        return os.path.exists(self.flag)  # noqa: PTH110

    def _role(self, path: Any) -> str | None:
        with contextlib.suppress(OSError, TypeError):
            place = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fsdecode(path)  # noqa: PTH115
            return role(os.path.abspath(place), self.roots)  # noqa: PTH100
        return None

    def _kind(self) -> str:
        """`parent`, or the kind of job of a child, which stands in the frame that its life begins with."""
        pid = os.getpid()
        if pid == self.parent:
            return "parent"
        frame = sys._getframe()
        while pid not in self.kinds and frame is not None:
            if frame.f_code.co_name == "perform" and "job" in frame.f_locals:
                self.kinds[pid] = type(frame.f_locals["job"]).__name__
            frame = frame.f_back  # type: ignore[assignment]
        return self.kinds.get(pid, "child")

    def _settle(self) -> None:
        """Set what is to be set, and hook into steps, as soon as the modules are there."""
        for name, value in self.values.items():
            module, _, attribute = name.rpartition(".")
            if module in sys.modules and hasattr(sys.modules[module], attribute):
                setattr(sys.modules[module], attribute, value)
        if "clock" in self.act and len(sys.modules) != self.modules:
            self.modules = len(sys.modules)
            _set_clocks()
        if os.getpid() not in (self.hooked, self.parent) and "torch.optim.optimizer" in sys.modules:
            self.hooked = os.getpid()
            register = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook
            register(lambda *_: self.passed("step", ""))

    def _note(self, kind: str, operation: str, name: str, *, sprung: bool = False) -> None:
        note = {"pid": os.getpid(), "kind": kind, "operation": operation, "role": name, "sprung": sprung}
        file = _os_open(self.notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        _os_write(file, json.dumps(note).encode() + b"\n")
        os.close(file)

    # --- What happens then

    def _first(self) -> bool:
        try:
            os.close(_os_open(self.flag, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        return True

    def _spring(self, name: str) -> None:
        if "signal" in self.act:
            self._send()
        if "remove" in self.act:
            os.unlink(os.path.join(os.path.dirname(self.roots[0]), self.act["remove"]))  # noqa: PTH108, PTH118, PTH120
        while "hang" in self.act:
            _sleep(1)
        if "allocate" in self.act:
            taken = [bytearray(os.urandom(2**20)) * 64 for _ in range(_MOST_BYTES // 2**26)]
            _sleep(5)
            taken.clear()
        if "errno" in self.act:
            self._fail(name)

    def _send(self) -> None:
        """To each of those named, one after the other."""
        pids = {"parent": self.parent, "self": os.getpid(), "server": os.getppid()}
        for to in self.act["to"]:
            if to == "group":
                os.killpg(os.getpgid(self.parent), self.act["signal"])
            else:
                os.kill(pids[to], self.act["signal"])
            _sleep(0.5)

    def _fail(self, name: str) -> None:
        if "errno" in self.act:
            raise OSError(self.act["errno"], os.strerror(self.act["errno"]), name)


# --- Where it hears of it ---------------------------------------------------------------------------------------------


def lay(trap: Trap) -> None:
    """Let the functions that write tell of it first."""
    _lay_on_open(trap)

    def write(descriptor: int, data: Any) -> int:
        trap.write("write", descriptor)
        return _os_write(descriptor, data)

    def fsync(descriptor: Any) -> None:
        trap.write("fsync", descriptor if isinstance(descriptor, int) else descriptor.fileno())
        _fsync(descriptor)

    os.write, os.fsync = write, fsync  # type: ignore[assignment]
    for name, operation, place in (
        ("replace", "replace", 1),
        ("rename", "replace", 1),
        ("mkdir", "mkdir", 0),
        ("link", "link", 1),
    ):
        setattr(os, name, _told(trap, getattr(os, name), operation, place))

    from multiprocessing import connection

    send = connection.Connection.send

    def sending(self: Any, message: Any) -> None:
        trap.said(message)
        send(self, message)

    connection.Connection.send = sending  # type: ignore[assignment, method-assign]
    if "clock" in trap.act:
        _lay_on_clock(trap)


def _told(trap: Trap, function: Any, operation: str, place: int) -> Any:
    def told(*arguments: Any, **options: Any) -> Any:
        if place < len(arguments):
            trap.write(operation, arguments[place])
        return function(*arguments, **options)

    return told


def _lay_on_open(trap: Trap) -> None:
    class Raw(io.FileIO):
        """What a buffer is written to."""

        def write(self, data: Any) -> int:
            trap.write("write", self.fileno())
            return super().write(data)

    def opening(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: Any = None,
        errors: Any = None,
        newline: Any = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        writes = any(letter in mode for letter in "wax+") and trap._role(file)
        if not writes or buffering == 0:
            return _open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        trap.write("open", file)
        raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
        text.mode = mode  # type: ignore[misc]
        return text

    def os_open(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            trap.write("open", path)
        return _os_open(path, flags, *more, **options)

    builtins.open = io.open = opening
    os.open = os_open


def _lay_on_clock(trap: Trap) -> None:
    """The time of day jumps in all processes, as a machine's does; what only counts seconds goes on."""

    def now() -> float:
        return _time() + (trap.act["clock"] if trap.is_sprung() else 0)

    time.time, time.time_ns = now, lambda: int(now() * 1e9)


class _Kind(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, datetime.datetime)


class Jumped(datetime.datetime, metaclass=_Kind):
    """Stands for `datetime` in modules of ablate: libraries in C know the real one by its place in memory."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        """By the clock that jumps."""
        return datetime.datetime.fromtimestamp(time.time(), tz)


def _set_clocks() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("ablate.") and getattr(module, "datetime", None) is datetime.datetime:
            module.datetime = Jumped  # type: ignore[attr-defined]


if __name__ == "sitecustomize" and "ABLATE_TRAP" in os.environ:
    lay(Trap(json.loads(os.environ["ABLATE_TRAP"])))
