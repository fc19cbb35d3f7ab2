"""Which files an import of the user's own code would run, found without running one of them."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ablate import files


def is_path(name: str) -> bool:
    """Whether a choice is named by its path, and not as a module."""
    return "/" in name or "\\" in name or name.endswith(".py")


def files_of(name: str) -> list[str]:
    """The files that are run to import what `name` means, the outermost package first; none where there is none.

    `importlib.util.find_spec` would import the packages around a module to look for it.
    """
    if is_path(name):
        return [_shown(Path(name).resolve())] if files.is_file(Path(name)) else []
    found, parts, places = list[str](), name.split("."), None
    for i in range(len(parts)):
        spec = _spec(".".join(parts[: i + 1]), places)
        if spec is None:
            return []
        found += [_shown(Path(spec.origin)) if spec.has_location else spec.origin] if spec.origin else []
        places = list(spec.submodule_search_locations or [])
    return found


def _spec(name: str, places: list[str] | None) -> ModuleSpec | None:
    """That of a module which lies in `places`, or anywhere. Another finder than that of files may be asked only there:
    for a module of its own it runs nothing.
    """
    try:
        if name in sys.modules or places is None:
            known = getattr(sys.modules.get(name), "__spec__", None)
            return known or importlib.util.find_spec(name)
        return PathFinder.find_spec(name, places)
    except (ImportError, ValueError):
        return None


def _shown(file: Path) -> str:
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)
