"""MLflow's database where it is a file: looked at before MLflow opens it, and whole from its first moment."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ablate.mlflow_address import SYNC, TrackingError, database_of


def check_database(uri: str, patience_seconds: float) -> None:
    """MLflow tries a file that cannot be opened for minutes, and tells of it in the words of its own layers."""
    path = database_of(uri)
    if path is None or not path.exists():
        return
    if not os.access(path, os.W_OK):
        raise TrackingError(f"{path.name} is read-only.", f"Let it be written to, or move it away, then: {SYNC}")
    fault = "it is a folder" if path.is_dir() else _fault_of_file(path, patience_seconds)
    if fault and "locked" in fault:
        raise TrackingError(f"{path.name} is locked by another program.", f"When that has ended: {SYNC}")
    if fault:
        raise TrackingError(f"{path.name} cannot be read: {fault}.", f"Move {path.name} away, then: {SYNC}")


def make_database(uri: str, artifacts: Path) -> None:
    """Where there is none yet, it is made beside, and renamed when it is whole: to be called under the lock.

    What a killed process left amid MLflow's hundred migrations might never open again. `artifacts` is where files of
    runs go whose experiment names no other place.
    """
    path = database_of(uri)
    if path is None or (path.exists() and path.stat().st_size):
        return
    beside = path.with_name(f".{path.name}.new")
    _remove(beside)
    try:
        with quiet():
            from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

            make: Any = SqlAlchemyStore  # has no types
            make(f"sqlite:///{beside.absolute().as_posix()}", artifacts.as_uri()).engine.dispose()
        beside.replace(path)
    finally:
        _remove(beside)  # on a full disk it takes what others need


def _remove(database: Path) -> None:
    for left in (database, database.with_name(f"{database.name}-journal")):
        left.unlink(missing_ok=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """MLflow's use of its own dependencies is not for us to warn about, and a new store's hundred migrations and each
    try in vain are of no interest at the terminal.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("alembic", "mlflow", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(logging.ERROR)
        yield


def _fault_of_file(path: Path, patience_seconds: float) -> str | None:
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=patience_seconds)) as database:
            found: str = database.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        return str(error)
    return None if found == "ok" else " ".join(found.split())
