"""Files that hold all of what was written or all of what was there before, whatever happens on the way."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ablate.host import boot, started

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says of a disk that takes no more."""

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp", re.DOTALL)
_SURELY_ENDED_SECONDS = 3600.0
"""No write takes so long: what is left of one that began earlier is nobody's any more."""

_SURELY_FITS_BYTES = 2**26
"""Nobody asks how much memory is free before a file of this size is read."""


def is_file(path: Path) -> bool:
    """Whether there is such a file; of a name that no file can have, too."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def write_atomically(path: Path, write: Callable[[Any], None]) -> None:
    """`path` holds either what it held before or all of the new content, whatever happens on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path)
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _beside(path: Path) -> Path:
    """A name that nobody else gives, and that says which process gave it."""
    return path.with_name(f".{path.name}.{_mark()}{os.getpid():08x}{uuid.uuid4().hex[:12]}.tmp")


def _mark() -> str:
    """What names of files from this start of the system have in common."""
    return hashlib.sha256(boot().encode()).hexdigest()[:12]


def write_bytes(path: Path, content: bytes) -> None:
    """A file of this content."""
    write_atomically(path, lambda file: file.write(content))


def _sync_folder(folder: Path) -> None:
    # Not every file system can; the rename is then as durable as that file system makes it.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """An object as strict JSON, for people to read as well."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(path, text.encode("utf-8"))


# --- Reading what may be anything -------------------------------------------------------------------------------------


def read_whole(path: Path) -> bytes:
    """All bytes of a file. What is no file, as a pipe that nobody writes to, or does not fit is an `OSError`."""
    check_fits(check_file(path), path)
    return path.read_bytes()


def check_file(path: Path) -> int:
    """The size of a file. What is none is an `OSError`: to open a pipe would wait for who writes to it, for ever."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a file", str(path))
    return found.st_size


def check_fits(size: int, path: Path) -> None:
    """Raises `OSError` where so many bytes do not fit into the memory that is free now."""
    if size <= _SURELY_FITS_BYTES:
        return
    import psutil

    if size > psutil.virtual_memory().available // 2:
        raise OSError(errno.EFBIG, f"too large for the memory that is free ({size / 2**30:,.1f} GiB)", str(path))


# --- Room, and what a killed writer leaves ----------------------------------------------------------------------------


def check_room(folder: Path, size: int) -> None:
    """Raises `OSError` where nothing can be written in `folder`, or where it would be made, or not so many bytes."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    probe = _beside(folder / "room")
    try:
        with probe.open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)
    if (free := shutil.disk_usage(folder).free) < size:
        told = f"{free / 2**20:,.1f} MiB are free where at least {size / 2**20:,.1f} MiB will be written"
        raise OSError(errno.ENOSPC, told, str(folder))


def leftovers(folder: Path) -> list[Path]:
    """What writers that were killed may have left in `folder`: files with the names that only `_beside` gives."""
    with contextlib.suppress(OSError):
        return sorted(path for path in folder.iterdir() if _TEMPORARY.fullmatch(path.name) and _is_own_file(path))
    return []


def _is_own_file(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISREG(path.lstat().st_mode)
    return False


def _is_writer_gone(path: Path) -> bool:
    """Whether it is of a process that this system knows to have ended."""
    of = path.name.rpartition(".tmp")[0].rpartition(".")[2]
    return bool(boot()) and of.startswith(_mark()) and started(int(of[12:20], 16)) in (None, "ended")


def remove_leftovers(folder: Path) -> Iterator[Path]:
    """Removes what no writer can be about any more, and tells of it."""
    for path in leftovers(folder):
        with contextlib.suppress(OSError):
            if _is_writer_gone(path) or time.time() - path.stat().st_mtime > _SURELY_ENDED_SECONDS:
                path.unlink()
                yield path
