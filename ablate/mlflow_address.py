"""Where MLflow's record is, told before MLflow is imported: an address, its kind, and what is wrong with it."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlsplit

from ablate.redaction import redacted

SYNC = "python -m ablate sync FILE"
"""What brings MLflow up to date, whatever happened to it."""

_SCHEMES = ("", "file", "http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks", "databricks-uc", "uc")
_ADDRESSES = (
    "Unset it to use a SQLite file among the results, or set http://HOST:PORT or sqlite:////absolute/mlflow.db."
)


class TrackingError(RuntimeError):
    """Why MLflow cannot be used (`message`) and what to do about it (`cure`)."""

    def __init__(self, message: str, cure: str) -> None:
        self.message, self.cure = redacted(message), redacted(cure)
        super().__init__(f"{self.message}\n  {self.cure}")


def default_uri(results_root: Path) -> str:
    """`MLFLOW_TRACKING_URI` where it is set, else a SQLite file among the results."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(results_root).resolve()}/mlflow.db"


def is_server(uri: str) -> bool:
    """Whether `uri` is a running server's address, not a store of our own."""
    return _kind(uri) in ("http", "https", "databricks")


def _kind(uri: str) -> str:
    """What stands before the colon; the one store that has a name alone is one too."""
    return uri if uri == "databricks" else urlsplit(uri).scheme.partition("+")[0]


def check_address() -> None:
    """Raises `TrackingError` where `MLFLOW_TRACKING_URI` is none that any MLflow could ever have used.

    A folder, as older ones had it, costs the mirror and no training.
    """
    if not (uri := os.environ.get("MLFLOW_TRACKING_URI")):
        return
    try:
        parts = urlsplit(uri)
        fault = "it names no host" if parts.scheme in ("http", "https") and not parts.hostname else ""
    except ValueError as error:
        raise TrackingError(f"MLFLOW_TRACKING_URI={uri}: {error}", _ADDRESSES) from None
    others = {each.name for each in entry_points(group="mlflow.tracking_store")}
    if (kind := _kind(uri)) not in _SCHEMES and kind not in others:
        fault = f"'{kind}' is no kind of store that MLflow knows"
    if fault:
        raise TrackingError(f"MLFLOW_TRACKING_URI={uri}: {fault}", _ADDRESSES)


def artifact_root(results_root: Path) -> Path:
    """Where the files of runs go when the store is ours."""
    return Path(results_root).resolve() / "mlartifacts"


def refuse_folder(uri: str) -> None:
    """Raises `TrackingError` for a folder of runs."""
    if _kind(uri) in ("", "file"):
        raise TrackingError(
            f"MLflow no longer keeps runs in plain folders, as MLFLOW_TRACKING_URI={uri} asks.",
            "Unset it to use a SQLite file among the results, or set sqlite:////absolute/path/mlflow.db.",
        )


def database_of(uri: str) -> Path | None:
    """The database file of a plain SQLite address."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") and "?" not in uri else None
