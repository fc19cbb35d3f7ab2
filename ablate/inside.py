"""Folders and files that stay where they are said to be, whatever a name says and whatever links lie in them.

Results may come from somebody else, and with them links: what is written to, or read to be passed on, must lie within.
"""

from __future__ import annotations

from pathlib import Path


class OutsideError(ValueError):
    """A name, or a link, that leads out of its folder."""

    cure = "remove it, or give the folder that it leads to"


def folder_of(root: Path, name: str, *parts: str) -> Path:
    """The folder `name` in `root`; neither it nor one of its `parts` may lead elsewhere. Raises `OutsideError`."""
    folder = root / name
    if not name or Path(name).name != name or "\\" in name or name == "..":
        raise OutsideError(f"{name!r} is no name of a folder in {root}")
    for each in (folder, *(folder / part for part in parts)):
        if each.resolve() != root.resolve() / each.relative_to(root):
            raise OutsideError(f"{each} leads out of {root}, to {each.resolve()}")
    return folder


def file_of(folder: Path, name: object) -> Path | None:
    """The file in `folder` that a stored row names; None where it is none, or lies elsewhere."""
    if not isinstance(name, str) or not name or "\0" in name:
        return None
    file = folder / name
    return file if file.is_file() and file.resolve().is_relative_to(folder.resolve()) else None
