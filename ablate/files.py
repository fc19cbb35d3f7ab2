"""Files that hold all of what was written or all of what was there before, whatever happens on the way."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[Any], None]) -> None:
    """`path` holds either what it held before or all of the new content, whatever happens on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


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
