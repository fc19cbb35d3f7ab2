"""All files of one kind: one a trial or round, and beside them one that may stand for many, `compacted.parquet`.

A file of a trial's own was written after the compacted one, or is what that was made of: it alone counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ablate.tables import Packed, UnreadableError, pack, read_packed, read_table, write_id_of, write_table

COMPACTED = "compacted.parquet"
_LOOKS = 5
"""So often is a folder looked at again that changes while it is read."""


def shown(name: str) -> str:
    """A file's name as text: it may be of bytes that are none."""
    return name.encode(errors="backslashreplace").decode()


@dataclass
class Found:
    """What one kind's folder holds: tables of files of their own, the compacted one, and what does not count."""

    tables: dict[str, Any] = field(default_factory=dict)
    packed: Packed | None = None
    faults: dict[str, str] = field(default_factory=dict)

    def packed_ids(self) -> dict[str, bytes]:
        """The write ids of what only the compacted file holds."""
        own = self.tables.keys() | {Path(name).stem for name in self.faults}
        parts = self.packed.parts if self.packed else {}
        return {name: part.write_id for name, part in parts.items() if name not in own}

    def write_ids(self) -> dict[str, bytes]:
        """When each that counts was written."""
        return self.packed_ids() | {name: write_id_of(table) for name, table in self.tables.items()}


class Shelf:
    """The folder of one kind."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder / kind, kind
        self._known: tuple[object, Packed | None] = (None, None)

    def path(self, name: str) -> Path:
        """Where a file of its own is, or would be."""
        return self.folder / f"{name}.parquet"

    def write(self, name: str, table: Any) -> None:
        """Stores it in place of what was there."""
        write_table(self.path(name), table)

    def forget(self, names: set[str]) -> None:
        """Takes out of the compacted file what has files of its own now: other readers would see it twice."""
        packed = self._packed_if_readable()
        if packed is not None and names & packed.parts.keys():
            self.pack({name: packed.part(name) for name in packed.parts if name not in names})

    def pack(self, tables: Mapping[str, Any]) -> None:
        """These in the compacted file, in place of what it held."""
        path = self.folder / COMPACTED
        write_table(path, pack(self.kind, tables)) if tables else path.unlink(missing_ok=True)

    def named(self, name: str) -> Iterator[Any]:
        """The readable tables of that name: of its own file, and what the compacted one holds."""
        for _ in range(2):  # it may move from the one to the other meanwhile
            is_there = False
            try:
                yield read_table(self.path(name), self.kind)
                is_there = True
            except FileNotFoundError:
                pass
            except UnreadableError:
                is_there = True
            packed = self._packed_if_readable()
            if packed is not None and name in packed.parts:
                yield packed.part(name)
                is_there = True
            if is_there:
                return

    def first(self, name: str) -> Any | None:
        """The table that counts, or None: an own file that cannot be read hides what is older."""
        if os.path.lexists(self.path(name)):
            try:
                return read_table(self.path(name), self.kind)
            except UnreadableError:
                return None
            except FileNotFoundError:
                pass
        return next(self.named(name), None)

    def names(self, start: str) -> list[str]:
        """The names that begin so, of files and of what the compacted one holds."""
        packed = self._packed_if_readable()
        held = [name for name in packed.parts if name.startswith(start)] if packed else []
        return sorted({*held, *(path.stem for path in self.folder.glob(f"{start}*.parquet"))})

    def _packed_if_readable(self) -> Packed | None:
        try:
            return self.packed()
        except UnreadableError:
            return None

    def packed(self) -> Packed | None:
        """The compacted file, read again only when it is another; None where there is none."""
        path = self.folder / COMPACTED
        try:
            told = path.stat()
            version = (told.st_ino, told.st_mtime_ns, told.st_size)
            if self._known[0] != version:
                self._known = (version, read_packed(path, self.kind))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UnreadableError(f"cannot be read: {error.strerror or error}") from error
        return self._known[1]

    def look(self) -> Found:
        """All that is here, each readable once, also while it is written or compacted."""
        found = Found()
        for _ in range(_LOOKS):
            new = [path for path in self._listed(found) if path.stem not in found.tables]
            for path in new:
                self._read(path, found)
            try:
                found.packed = self.packed()
            except UnreadableError as fault:
                found.packed, found.faults[COMPACTED] = None, str(fault)
            if not new:
                break
        return found

    def _listed(self, found: Found) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if path.name not in {COMPACTED, *found.faults})
        except FileNotFoundError:
            return []
        except OSError as error:
            found.faults.setdefault("", f"the folder cannot be read: {error.strerror or error}")
            return []

    def _read(self, path: Path, found: Found) -> None:
        try:
            found.tables[path.stem] = read_table(path, self.kind)
        except FileNotFoundError:
            pass  # compacted meanwhile
        except UnreadableError as fault:
            found.faults[path.name] = str(fault)
