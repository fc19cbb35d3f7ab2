"""Control groups: the folders in which Linux says what this process may use, and how it was held back.

In the newer form (version 2) all controllers share one tree, in the older each has its own; a machine may have both.
Limits are inherited, so that those of every group around the process's own hold too. Inside a container its own group
is often the root of what it sees, whatever the path says that the system gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
"""The groups of this process, a line each: number, controllers (none in version 2), path below the root."""


def folders(controller: str) -> Iterator[Path]:
    """The folders of a controller's groups around this process, each once, from the innermost out."""
    found: dict[Path, None] = {}
    for line in [*_lines(OWN), "0::/", f"0:{controller}:/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        inner = Path("/", *(part for part in path.split("/") if part != ".."))
        for root in [ROOT / controller] if controllers else [ROOT, ROOT / "unified"]:
            found |= dict.fromkeys(root / group.relative_to("/") for group in (inner, *inner.parents))
    return iter(found)


def words(file: Path) -> list[str]:
    """What stands in a file; nothing where it cannot be read."""
    return [word for line in _lines(file) for word in line.split()]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def memory_left(folder: Path) -> int | None:
    """Bytes that a group may still take, in either form; None where nothing limits it.

    What it holds of files that were read, and nobody reads now, makes room by itself.
    """
    limits = [*map(_number, (folder / name for name in ("memory.max", "memory.high", "memory.limit_in_bytes")))]
    used = [*map(_number, (folder / name for name in ("memory.current", "memory.usage_in_bytes")))]
    limit = min((each for each in limits if each is not None), default=None)
    taken = next((each for each in used if each is not None), None)
    if limit is None or taken is None:
        return None
    stat = words(folder / "memory.stat")
    told = dict(zip(stat[::2], stat[1::2], strict=False))
    spare = told.get("total_inactive_file", told.get("inactive_file", "0"))
    return max(0, limit - taken + (int(spare) if spare.isdigit() else 0))


def _number(file: Path) -> int | None:
    """The number in a file; None where there is none, as where nothing is limited, which is the word "max"."""
    found = words(file)
    return int(found[0]) if found and found[0].isdigit() else None
