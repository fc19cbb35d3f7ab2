"""Everything that is stored of an experiment, checked: what is wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ablate import checkpoint_file
from ablate.documents import EXPERIMENT, MLFLOW, NOTES, read_json
from ablate.files import leftovers
from ablate.results import CHECKPOINTS, LOCK, Store, of_rows
from ablate.schema import SCHEMAS
from ablate.shelf import COMPACTED, Found, shown
from ablate.tables import ResultsError, is_sealed

Fault = tuple[str, str, str]
"""The file, what is wrong, and what to do."""

_OTHERS = {CHECKPOINTS, "leases"}
"""Folders of a run's own, which have their own readers."""

_AGAIN = "python -m ablate run FILE does again what is missing"
_AWAY = "move it away"
_LEFT = "the next run removes it, or results compact, once its writer is known to be gone or it is an hour old"

_DOCUMENTS: dict[str, tuple[Any, dict[str, list[str]], str]] = {
    "experiment.json": (
        EXPERIMENT,
        {"variants": ["name"], "invalid": ["variant", "reason"], "claims": ["claim"]},
        "run writes it again",
    ),
    "mlflow.json": (MLFLOW, {"": list(MLFLOW)}, "sync writes it again"),
    "capacity.json": (NOTES, {"": list(NOTES)}, "the next search writes it again"),
}


def verify(store: Store) -> dict[str, Any]:
    """The facts, with each fault's file, fault and cure."""
    with ExitStack() as held:
        with suppress(OSError):  # where nothing can be written nobody writes
            held.enter_context(store.alone())
        looks = {kind: store.look(kind) for kind in SCHEMAS}
        faults = [*_faults_of_documents(store.folder), *_foreign(store.folder), *_strangers(store, looks["trials"])]
        strange = {name for name, _, _ in faults}
        faults += [fault for fault in _of_rows(store, looks) if fault[0] not in strange]
    for kind, found in looks.items():
        faults += _of_kind(kind, found)
    faults += _of_checkpoints(store.folder / CHECKPOINTS)
    return {
        "folder": str(store.folder),
        "stored": {kind: len(found.write_ids()) for kind, found in looks.items()},
        "without_checksum": sum(not is_sealed(each) for found in looks.values() for each in _tables(found)),
        "faults": [dict(zip(("file", "fault", "cure"), each, strict=True)) for each in faults],
    }


def _tables(found: Found) -> list[Any]:
    return [*found.tables.values(), *([found.packed.table] if found.packed else [])]


def _faults_of_documents(folder: Path) -> Iterator[Fault]:
    for name, (shape, required, again) in _DOCUMENTS.items():
        try:
            read_json(folder / name, shape, required)
        except FileNotFoundError:
            if name == "experiment.json":
                yield name, "is not there", again
        except (OSError, TypeError, ValueError) as error:
            yield name, f"cannot be read: {error}", again


def _foreign(folder: Path) -> Iterator[Fault]:
    """What stands in the experiment's folder itself and is not of a run."""
    known = {*SCHEMAS, *_DOCUMENTS, *_OTHERS, LOCK, "logs"}
    left = {path.name for path in leftovers(folder)}
    for path in sorted(folder.iterdir()):
        if path.name in left:
            yield shown(path.name), "left over from a write that did not finish", _LEFT
        elif path.name not in known:
            yield shown(path.name), "not of ablate", _AWAY


def _of_kind(kind: str, found: Found) -> Iterator[Fault]:
    for name, fault in found.faults.items():
        cure = _LEFT if "did not finish" in fault else _AWAY if "not a file of ablate" in fault else _cure(fault)
        yield f"{kind}/{shown(name)}" if name else kind, fault, cure
    if stale := sorted(found.tables.keys() & (found.packed.parts.keys() if found.packed else set())):
        told = f"holds also what {len(stale)} files of their own hold, {stale[0]}.parquet for one"
        yield f"{kind}/{COMPACTED}", told, "python -m ablate results compact FILE merges them"


def _cure(fault: str) -> str:
    return "install that version" if "newer ablate" in fault else _AGAIN


def _strangers(store: Store, found: Found) -> Iterator[Fault]:
    """Rows that were put here from the folder of another experiment."""
    try:
        name = store.experiment().get("name")
    except ResultsError:
        return
    for trial_id, table in found.tables.items():
        others = {each for each in table["experiment"].to_pylist() if each is not None} - {name}
        for other in sorted(others) if name else ():
            yield f"trials/{trial_id}", f"is of the experiment {shown(other)}", _AWAY


def _of_rows(store: Store, looks: dict[str, Found]) -> Iterator[Fault]:
    """What belongs together is there together."""
    rows = looks["trials"].write_ids()
    for kind in ("curves", "profiles"):
        for each in of_rows(looks[kind], rows)[1]:
            name, _, fault = each.partition(": ")
            yield f"{kind}/{name}", fault, f"{_AGAIN}; or {_AWAY}"
        held = _held(looks[kind])
        for trial_id, write_id in rows.items():
            if (trial_id, write_id) not in held:
                yield f"trials/{trial_id}", f"its {kind} are gone", _AGAIN
    missing = [trial_id for trial_id in store.present() or () if trial_id not in rows]
    if missing:
        yield "experiment.json", f"{len(missing)} of its trials have no row, {missing[0]} for one", _AGAIN


def _of_checkpoints(folder: Path) -> Iterator[Fault]:
    """What a training could not go on from; it goes on from the one before."""
    for trial in sorted(folder.iterdir()) if folder.is_dir() else ():
        for name, fault in checkpoint_file.faults(trial):
            yield f"{CHECKPOINTS}/{shown(trial.name)}/{name}", fault, f"none is needed, it is not used; or {_AWAY}"


def _held(found: Found) -> set[tuple[str, bytes]]:
    packed = found.packed.parts if found.packed else {}
    return {*((name, part.write_id) for name, part in packed.items()), *Found(found.tables).write_ids().items()}
