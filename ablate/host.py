"""Which processes a name in a file is about: those of this start of the system, and whether they still live."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def boot() -> str:
    """What names this start of the system and the processes that are seen from here; empty where nothing does.

    A container shares the system with others, and its host's name perhaps, but not its processes.
    """
    try:
        system = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{system} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def started(pid: int) -> str | None:
    """When a process began, counted from the start of the system; of one that has ended and is not yet cleared away,
    "ended". None where it cannot be told.
    """
    try:
        said = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "ended" if said[0] in "ZX" else said[19]
    except (OSError, IndexError):
        return None
