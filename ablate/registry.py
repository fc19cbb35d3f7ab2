"""The choices that exist: THE FILE IS THE NAME.

`attention: gqa` means the class `Config` in `ablate/attention/gqa.py`; a dotted name (`my_lab.talking_heads`) or a path
(`./talking_heads.py`) means the same class in the user's own code. Nothing is registered and no list is kept.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import logging
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ablate import choice, plug_in
from ablate.catalogue import SLOTS as SLOTS
from ablate.catalogue import SOURCES as SOURCES
from ablate.catalogue import names as names
from ablate.catalogue import text
from ablate.choice import Choice, Faults, SettingsError, unknown, validated
from ablate.files import is_file

_log = logging.getLogger(__name__)


def summary(slot: str, name: str) -> str:
    """The first line of a built-in choice's file, read without running it."""
    return text(slot, name).partition("\n")[0]


def is_foreign(name: str) -> bool:
    """Whether `name` points to the user's own code."""
    return "." in name or "/" in name or "\\" in name


def configure(slot: str, raw: object, path: choice.Path = ()) -> Choice:
    """The settings `raw` (a name, or a mapping with a name) of a slot, typed. Raises `Faults`."""
    settings = {"name": raw} if isinstance(raw, str) else raw
    if not isinstance(settings, Mapping):
        cure = f"write one of: {', '.join(names(slot))} (in quotes where YAML reads a word as something else)"
        raise Faults([SettingsError(path, f"{slot} needs a name or a mapping with a name, not {raw!r}", cure)])
    name = settings.get("name")
    if not isinstance(name, str):
        raise Faults([SettingsError(path, f"{slot} has no name: {name!r}", f"known: {', '.join(names(slot))}")])
    kind = config_class(slot, name, path)
    return _own(kind, settings, path) if is_foreign(name) else validated(kind, settings, path)


def _own(kind: type[Choice], settings: Mapping[str, Any], path: choice.Path) -> Choice:
    """A user's own settings, which may raise whatever they like, and must be plain: they are stored, and sent to
    children.
    """
    try:
        found = validated(kind, settings, path)
        json.dumps(found.settings())
    except (Faults, KeyboardInterrupt):
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        cure = "let them be plain: text, numbers, true or false, null, lists and mappings of these"
        raise Faults([SettingsError(path, f"the settings of {settings['name']} fail: {reason}", cure)]) from error
    return found


def config_class(slot: str, name: str, path: choice.Path = ()) -> type[Choice]:
    """The class `Config` behind a name. Raises `Faults` where there is none."""
    if not is_foreign(name) and name not in names(slot):
        raise Faults([unknown(name, names(slot), slot, path)])
    found = _loaded(slot, name, path)
    expected = slot_base(slot)
    if not (isinstance(found, type) and issubclass(found, expected)):
        cure = f"let its class Config derive from ablate.{slot}.{expected.__name__}"
        raise Faults([SettingsError(path, f"{slot} '{name}' holds no {slot} choice", cure)])
    return found


def slot_of(name: str) -> str:
    """The slot that a user's own choice fills: that of the class which its Config derives from. Raises `Faults`."""
    found = _loaded("choice", name, ())
    bases = {slot: slot_base(slot) for slot in (*SLOTS, *SOURCES)}
    if slot := next((s for s, base in bases.items() if isinstance(found, type) and issubclass(found, base)), None):
        return slot
    cure = f"let its class Config derive from one of: {', '.join(f'ablate.{s}.{b.__name__}' for s, b in bases.items())}"
    raise Faults([SettingsError((), f"'{name}' holds no choice", cure)])


def slot_base(slot: str) -> type[Choice]:
    """The class that every Config of a slot derives from."""
    found: type[Choice] = importlib.import_module(f"ablate.{slot}").Base
    return found


def source_sha256(name: str) -> str:
    """The hash of a user's own choice's file, and of what it imports of its package: part of its trials' identity."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in source_files(name))).hexdigest()


def source_files(name: str) -> list[Path]:
    """The files of a user's own choice: its own, and those that it imports of its package."""
    found = _foreign(name)
    package = found.__name__.partition(".")[0]
    inside = (module for key, module in sorted(sys.modules.items()) if key.startswith(f"{package}."))
    files = [Path(file) for module in (found, *inside) if (file := getattr(module, "__file__", None))]
    return list(dict.fromkeys(files))


def file_sha256(file: Path) -> str | None:
    """The hash of one file; None where it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def _loaded(slot: str, name: str, path: choice.Path) -> Any:
    """What a file calls `Config`. A user's own file neither ends the program nor prints among its results."""
    try:
        with redirect_stdout(sys.stderr):
            return _config(slot, name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if not is_foreign(name):
            raise
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        cure = "mend that code, or give another name"
        raise Faults([SettingsError(path, f"{slot} '{name}' cannot be loaded: {reason}", cure)]) from error


@cache
def _config(slot: str, name: str) -> Any:
    module = _foreign(name) if is_foreign(name) else importlib.import_module(f"ablate.{slot}.{name}")
    return getattr(module, "Config", None)


@cache
def announce(name: str) -> None:
    """Say which code of the user's own will be run, before it is, here or in a child."""
    if not plug_in.is_path(name) and (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    _log.warning("imports your own code: %s (%s)", name, ", ".join(plug_in.files_of(name)) or "no file found")


@cache
def _foreign(name: str) -> ModuleType:
    announce(name)
    return _module_at(Path(name).resolve()) if plug_in.is_path(name) else importlib.import_module(name)


class _SourceOnly(importlib.machinery.SourceFileLoader):
    """Runs what stands in the file: code that lies compiled beside it was neither announced nor hashed."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def _module_at(file: Path) -> ModuleType:
    name = f"ablate_choice_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file, loader=_SourceOnly(name, str(file)))
    if spec is None or spec.loader is None or not is_file(file):
        raise FileNotFoundError(f"no Python file at {file.name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
