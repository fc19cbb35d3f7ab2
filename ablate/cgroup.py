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
