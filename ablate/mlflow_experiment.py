"""The way to MLflow: its store, the place of an experiment there, the lock of who writes, and one kind of error."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from ablate.mlflow_address import SYNC, TrackingError, database_of, is_server
from ablate.mlflow_database import check_database, make_database, quiet
from ablate.mlflow_view import VIEW_TAG, view_state
from ablate.results import Store
from ablate.tables import ResultsError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment

SECONDS_TO_WAIT_FOR_OTHERS = 300.0  # many that start at one instant, on a busy machine; no training waits for it

SILENCE = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
"""MLflow would tell its makers how it is used."""

_PATIENCE = {
    # MLflow's own defaults keep an unreachable server's caller waiting for four minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}


def prepare() -> None:
    """Before MLflow is imported: it reads some of this only then."""
    os.environ.update(SILENCE)
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)


def import_early() -> None:
    """Before the lock is taken: others would wait for it. That it fails is told by who needs it."""
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        import mlflow.tracking  # noqa: F401


def client_of(uri: str, artifacts: Path) -> MlflowClient:
    """Creates the store where it is new, and looks whether it is whole: to be called under the lock."""
    check_database(uri, SECONDS_TO_WAIT_FOR_OTHERS)
    try:
        with quiet():
            from mlflow import MlflowClient

            make_database(uri, artifacts)
            return MlflowClient(tracking_uri=uri)
    except ImportError as error:
        if error.name not in (None, "mlflow") and not uri.startswith("sqlite:") and not is_server(uri):
            raise TrackingError(
                f"{error.name}, the driver of the database in MLFLOW_TRACKING_URI, is not installed.",
                f"Install it (pip install {error.name}), or unset MLFLOW_TRACKING_URI.",
            ) from error
        raise TrackingError(f"it cannot be imported ({error}).", "To have the mirror: pip install mlflow") from error


def lock_path(uri: str, results_root: Path) -> Path:
    """Beside the store where it is a file: that is what several processes must not create at once."""
    path = database_of(uri)
    return path.with_name(f"{path.name}.lock") if path else results_root / ".mlflow.lock"


def locked(path: Path) -> FileLock:
    """While this is held no other process writes there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path, timeout=SECONDS_TO_WAIT_FOR_OTHERS)


def experiment_id_of(client: MlflowClient, store: Store, location: str | None) -> str:
    """The MLflow experiment of the same name, created where it is missing. Raises `TrackingError` where it is gone, or
    is of somebody else.
    """
    from mlflow.exceptions import MlflowException

    name = _experiment_name(store)
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name, artifact_location=location, tags=description(store))
        except MlflowException:
            # On a server another machine may have been first.
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        raise _deleted(name, experiment.experiment_id)
    if VIEW_TAG not in experiment.tags and not _is_blank(client, experiment):
        raise _of_another(name, experiment.experiment_id)
    experiment_id: str = experiment.experiment_id
    return experiment_id


def _is_blank(client: MlflowClient, experiment: Experiment) -> bool:
    """Whether someone made it only for others to fill."""
    from mlflow.entities import ViewType

    if "mlflow.note.content" in experiment.tags:
        return False
    return not client.search_runs([experiment.experiment_id], run_view_type=ViewType.ALL, max_results=1)


def _deleted(name: str, experiment_id: str) -> TrackingError:
    return TrackingError(
        f"the experiment {name} was deleted in MLflow and still owns its name.",
        f"Restore it: mlflow experiments restore --experiment-id {experiment_id}; or give the experiment another name; "
        f"or remove it for good: mlflow gc --experiment-ids {experiment_id}. Then: {SYNC}",
    )


def _of_another(name: str, experiment_id: str) -> TrackingError:
    rename = f"mlflow experiments rename --experiment-id {experiment_id} --new-name OTHER"
    return TrackingError(
        f"an experiment {name} is in MLflow that is not of ablate's making; it is left as it is.",
        f"Give yours another name; or rename that one: {rename}; or set MLFLOW_TRACKING_URI to another store. "
        f"Then: {SYNC}",
    )


def _experiment_name(store: Store) -> str:
    name: str = experiment_or_empty(store).get("name") or store.folder.resolve().name
    return name


def description(store: Store) -> dict[str, str]:
    """The tags that say what the experiment asks, and how the UI shows it."""
    question = experiment_or_empty(store).get("question")
    tags = {"mlflow.experimentKind": "custom_model_development", VIEW_TAG: view_state()}
    return {**tags, **({"mlflow.note.content": question} if question else {})}


def experiment_or_empty(store: Store) -> dict[str, Any]:
    """What `experiment.json` says; nothing where it cannot be read."""
    try:
        return store.experiment()
    except ResultsError:
        return {}


@contextlib.contextmanager
def tracking_errors() -> Iterator[None]:
    """Whatever goes wrong in there becomes one kind of error: no fault of the mirror may stop a training."""
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        reason = _reason(error)
        raise TrackingError(reason, _cure(reason)) from error


def _reason(error: BaseException) -> str:
    """What the system said where that is the root of it, as of a server that is not there; else the error's words."""
    within: BaseException | None = error
    while within is not None:
        is_of_network = isinstance(within, ConnectionError) or type(within).__name__ == "gaierror"  # a name unknown
        if is_of_network and (reason := getattr(within, "strerror", None)):
            return f"the server cannot be reached: {reason}."
        within = within.__cause__ or within.__context__
    return " ".join(str(error).split())[:300] or type(error).__name__


def _cure(reason: str) -> str:
    if "database schema" in reason:
        return (
            f"Its file is of another version of MLflow. Upgrade the file (mlflow db upgrade ADDRESS, after a copy), or "
            f"MLflow (pip install -U mlflow), or move the file away; then: {SYNC}"
        )
    return f"The results are safe in Parquet; later: {SYNC}"
