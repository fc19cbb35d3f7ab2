"""The folder of packages that `tools/carry.py` fetched: those of them that are missing here, and the commit it was for.

Nothing but the standard library is needed to read it.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ".carried"
MANIFEST = "carried.json"


def manifest(folder: Path) -> dict[str, Any]:
    """What was fetched; empty where nothing was."""
    try:
        found: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError:
        return {}
    return found


def missing(folder: Path) -> list[Path]:
    """The folders of those packages that are not here, or too old for what was fetched with them."""
    packages = manifest(folder).get("packages", {})
    taken = {name for name, wanted in packages.items() if not (wanted.get("with") or _is_here(name, wanted["oldest"]))}
    taken |= {name for name, wanted in packages.items() if wanted.get("with") in taken}
    return [folder.resolve() / name for name in sorted(taken)]


def _is_here(name: str, oldest: str) -> bool:
    try:
        return numbers(metadata.version(name)) >= numbers(oldest)
    except metadata.PackageNotFoundError:
        return False


def numbers(version: str) -> list[int]:
    """A version's leading numbers, to compare by."""
    leading = re.match(r"[\d.]*", version)
    return [int(part) for part in (leading[0] if leading else "").split(".") if part]


def source() -> dict[str, Any]:
    """The commit of this code and whether files differ from it, by git; and what the code is, by itself."""
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changes is None else bool(changes), "digest": _digest()}


def commit(folder: Path) -> str:
    """The commit that runs here: by git, or where there is no repository by the code that was here at `carry`."""
    here, then = source(), manifest(folder)
    known = here if here["commit"] else then
    if not known.get("commit") or known["digest"] != here["digest"]:
        return "unknown"
    return f"{known['commit']}{' with changes' if known['changed'] else ''}"


def _digest() -> str:
    whole = hashlib.sha256()
    for file in sorted(file for part in ("ablate", "tools") for file in (ROOT / part).rglob("*.py")):
        whole.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return whole.hexdigest()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
