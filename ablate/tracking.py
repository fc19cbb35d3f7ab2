"""The mirror of the record in MLflow: written from Parquet by the parent process only, and never in the way.

Whatever happens to MLflow, training goes on: one warning, then the mirror is off until `sync` brings it up to date.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from filelock import FileLock

from ablate.inside import file_of
from ablate.mlflow_run import RunContent, run_content
from ablate.mlflow_view import CURRENT_TAG, RUN_COLOUR_TAG, VIEW_TAG, run_colour, view_state
from ablate.mlflow_view import comparison_links as comparison_links
from ablate.results import Store, places
from ablate.tables import ResultsError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_log = logging.getLogger(__name__)

_ENTITIES_PER_REQUEST = 1000
_PARAMS_PER_REQUEST = 100
_SECONDS_TO_WAIT_FOR_OTHERS = 60.0
_REPORT = "report"

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    # MLflow's own defaults keep an unreachable server's caller waiting for four minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
}


class TrackingError(RuntimeError):
    """Why MLflow cannot be used (`message`) and what to do about it (`cure`)."""

    def __init__(self, message: str, cure: str) -> None:
        super().__init__(f"{message}\n{cure}")
        self.message = message
        self.cure = cure


@dataclass
class SyncResult:
    """What `Tracker.sync` did, by trial id. `failed` says why it stopped early."""

    written: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    failed: str | None = None


# --- Where it is ------------------------------------------------------------------------------------------------------


def default_uri(results_root: Path) -> str:
    """`MLFLOW_TRACKING_URI` where it is set, else a SQLite file among the results."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(results_root).resolve()}/mlflow.db"


def is_server(uri: str) -> bool:
    """Whether `uri` is a running server's address, not a store of our own."""
    return urlsplit(uri).scheme in ("http", "https", "databricks")


def artifact_root(results_root: Path) -> Path:
    """Where the files of runs go when the store is ours."""
    return Path(results_root).resolve() / "mlartifacts"


# --- The mirror -------------------------------------------------------------------------------------------------------


class Tracker:
    """Writes trials that are stored already into the MLflow experiment of the same name."""

    def __init__(self, store: Store, client: MlflowClient, experiment_id: str, lock: Path) -> None:
        self._store = store
        self._client = client
        self._experiment_id = experiment_id
        self._lock = lock
        self._off = False

    @classmethod
    def open(cls, results_root: Path, store: Store) -> Self | None:
        """The tracker, or one warning and None where MLflow cannot be used."""
        try:
            return cls.connect(results_root, store)
        except TrackingError as error:
            _log.warning("MLflow is off: %s %s", error.message, error.cure)
            return None

    @classmethod
    def connect(cls, results_root: Path, store: Store) -> Self:
        """Creates the store and the experiment where they are missing, and clears runs that were never finished."""
        uri = default_uri(results_root)
        _refuse_file_store(uri)
        _prepare()
        _check_database(uri)
        lock = _lock_path(uri, Path(results_root))
        with _tracking_errors(), _locked(lock):
            client = _client(uri)
            location = None if is_server(uri) else (artifact_root(results_root) / store.folder.name).as_uri()
            tracker = cls(store, client, _experiment_id(client, _experiment_name(store), location), lock)
            tracker._describe()
            tracker._clear_unfinished()
            tracker._mark_current()
        return tracker

    def mirror(self, trial_id: str) -> None:
        """One trial as one run, in place of the run it had. A failure is one warning, and no run follows."""
        self._safely(lambda: self._mirror(trial_id, SyncResult()))

    def attach(self, report_folder: Path) -> None:
        """The report as artifacts of the baseline's first run, in place of the one before."""
        self._safely(lambda: self._attach(Path(report_folder)))

    def sync(self) -> SyncResult:
        """Writes every trial that MLflow lacks or has differently. Nothing changes when called again."""
        result, present = SyncResult(), self._store.present()
        if present is None:
            result.failed = "There is no readable experiment.json: python -m ablate run FILE writes it."
        for trial_id in present or ():
            try:
                with _tracking_errors(), _locked(self._lock):
                    self._mirror(trial_id, result)
            except TrackingError as error:
                result.failed = f"{error.message} {error.cure}"
                break
        return result

    def _safely(self, action: Callable[[], None]) -> None:
        if self._off:
            return
        try:
            with _tracking_errors(), _locked(self._lock):
                action()
        except TrackingError as error:
            self._off = True
            _log.warning("MLflow is off from here on: %s %s", error.message, error.cure)

    # --- The experiment

    def _describe(self) -> None:
        """What the UI shows above the runs, and how it compares them."""
        tags = {"mlflow.experimentKind": "custom_model_development", VIEW_TAG: view_state()}
        with contextlib.suppress(ResultsError):
            if question := self._store.experiment().get("question"):
                tags["mlflow.note.content"] = question
        self._tag_experiment(tags)

    def _tag_experiment(self, tags: Mapping[str, str]) -> None:
        present = self._client.get_experiment(self._experiment_id).tags
        for key, value in tags.items():
            if present.get(key) != value:
                self._client.set_experiment_tag(self._experiment_id, key, value)

    def _clear_unfinished(self) -> None:
        """Runs of ours that still say RUNNING were being written when their writer was ended: written again."""
        for run in self._runs("attributes.status = 'RUNNING'"):
            if trial_id := run.data.tags.get("ablate.trial_id"):
                self._client.delete_run(run.info.run_id)
                self._mirror(trial_id, SyncResult())

    def _mark_current(self) -> None:
        """Runs of trials that left the experiment stay, but comparisons are without them."""
        present = self._store.present()
        for run in self._runs(""):
            if trial_id := run.data.tags.get("ablate.trial_id"):
                self._tag_run(run, CURRENT_TAG, "yes" if present is None or trial_id in present else "no")

    def _tag_run(self, run: Run, key: str, value: str) -> None:
        if run.data.tags.get(key) != value:
            self._client.set_tag(run.info.run_id, key, value)

    def _runs(self, condition: str) -> list[Run]:
        found: list[Run] = []
        token = None
        while True:
            page = self._client.search_runs(
                [self._experiment_id],
                filter_string=condition,
                max_results=_ENTITIES_PER_REQUEST,
                page_token=token,
            )
            found += page
            token = page.token
            if not token:
                return found

    # --- One run

    def _mirror(self, trial_id: str, result: SyncResult) -> None:
        """Afterwards exactly one run of the trial is there, with the content of the record."""
        row = self._store.trial(trial_id)
        if row is None:
            return
        content = self._content(row)
        fingerprint, colour = content.fingerprint(), self._colour(trial_id)
        runs = self._runs(f"tags.`ablate.trial_id` = '{trial_id}'")
        equal = [run for run in runs if _is_complete(run, fingerprint)]
        if equal:
            run_id = equal[0].info.run_id
            self._tag_run(equal[0], RUN_COLOUR_TAG, colour)
            self._tag_run(equal[0], CURRENT_TAG, "yes")
        else:
            tags = {"ablate.trial_id": trial_id, "ablate.fingerprint": fingerprint}
            tags |= {RUN_COLOUR_TAG: colour, CURRENT_TAG: "yes"}
            tags |= {"ablate.replaces": runs[0].info.run_id} if runs else {}
            run_id = self._write(row, content, tags)
        outcome = result.unchanged if equal else result.replaced if runs else result.written
        outcome.append(trial_id)
        self._keep_only(run_id, runs)
        self._note(trial_id, run_id)

    def _keep_only(self, run_id: str, runs: Sequence[Run]) -> None:
        for run in runs:
            if run.info.run_id != run_id:
                self._client.delete_run(run.info.run_id)

    def _content(self, row: Mapping[str, Any]) -> RunContent:
        trial_id, experiment = row["trial_id"], _experiment_or_empty(self._store)
        place = places(experiment).get(trial_id)
        variant = place[2] if place else {"name": row["variant"], "is_baseline": row["is_baseline"]}
        curves, profiles = self._store.curves(trial_id), self._store.profiles(trial_id)
        return run_content(row, curves, profiles, experiment, variant)

    def _colour(self, trial_id: str) -> str:
        order = places(_experiment_or_empty(self._store))
        return run_colour(order[trial_id][0] if trial_id in order else len(order))

    def _write(self, row: Mapping[str, Any], content: RunContent, tags: Mapping[str, str]) -> str:
        run = self._client.create_run(
            self._experiment_id, start_time=content.start_ms, tags=dict(tags), run_name=content.name
        )
        if run.info.experiment_id != self._experiment_id:
            raise TrackingError("MLflow put a run into another experiment.", "Look at the tracking server.")
        run_id: str = run.info.run_id
        self._log_content(run_id, content)
        self._log_files(run_id, row)
        self._verify(run_id, content)
        self._client.set_terminated(run_id, status=content.status, end_time=content.end_ms)
        return run_id

    def _log_content(self, run_id: str, content: RunContent) -> None:
        from mlflow.entities import Metric, Param, RunTag

        written_ms = content.end_ms if content.end_ms is not None else int(time.time() * 1000)
        metrics = [Metric(point.key, point.value, written_ms, point.step) for point in content.points]
        params = [Param(key, value) for key, value in content.params.items()]
        tags = [RunTag(key, value) for key, value in content.tags.items()]
        for chunk in _chunks(params, _PARAMS_PER_REQUEST):
            self._client.log_batch(run_id, params=chunk)
        for chunk in _chunks(tags, _PARAMS_PER_REQUEST):
            self._client.log_batch(run_id, tags=chunk)
        for chunk in _chunks(metrics, _ENTITIES_PER_REQUEST):
            self._client.log_batch(run_id, metrics=chunk)

    def _log_files(self, run_id: str, row: Mapping[str, Any]) -> None:
        if row["config"]:
            self._client.log_dict(run_id, json.loads(row["config"]), "config.json")
        log = file_of(self._store.folder, row["log"])
        if log:
            self._client.log_artifact(run_id, str(log))

    def _verify(self, run_id: str, content: RunContent) -> None:
        data, latest = self._client.get_run(run_id).data, content.latest()
        kept = data.metrics.keys() == latest.keys() and all(
            math.isclose(data.metrics[key], value, rel_tol=1e-9) for key, value in latest.items()
        )
        if not kept or data.params.keys() != content.params.keys():
            raise TrackingError(
                f"MLflow kept {len(data.metrics)} of {len(latest)} metrics and {len(data.params)} of "
                f"{len(content.params)} parameters of a run.",
                "Look at the tracking server.",
            )

    def _note(self, trial_id: str, run_id: str) -> None:
        """mlflow.json: where each trial's run is, in the order in which trials are shown."""
        document = self._store.mlflow() or {}
        runs = document.get("runs", {}) if document.get("experiment_id") == self._experiment_id else {}
        runs = {**runs, trial_id: run_id}
        order = [*places(_experiment_or_empty(self._store)), *runs]
        noted = {
            "experiment_id": self._experiment_id,
            "runs": {each: runs[each] for each in order if each in runs},
        }
        if noted != document or list(noted["runs"]) != list(document.get("runs", {})):
            self._store.write_mlflow(noted)

    # --- The report

    def _attach(self, report_folder: Path) -> None:
        run_id = self._report_run()
        files = sorted(path for path in report_folder.rglob("*") if path.is_file() and not path.name.startswith("."))
        if run_id is None or not files:
            return
        digest = _digest(report_folder, files)
        before = self._client.get_experiment(self._experiment_id).tags
        if before.get("ablate.report_run") == run_id and before.get("ablate.report_sha256") == digest:
            return
        for holder in {run_id, before.get("ablate.report_run", run_id)}:
            self._delete_report(holder)
        for path in files:
            place = (Path(_REPORT) / path.relative_to(report_folder).parent).as_posix()
            self._client.log_artifact(run_id, str(path), place)
        self._tag_experiment({"ablate.report_run": run_id, "ablate.report_sha256": digest})

    def _report_run(self) -> str | None:
        """The run of the baseline's first seed, or of the first trial that has one."""
        order = places(_experiment_or_empty(self._store))
        baseline_first = sorted(order, key=lambda trial_id: not order[trial_id][2].get("is_baseline"))
        runs = (self._store.mlflow() or {}).get("runs", {})
        return next((runs[trial_id] for trial_id in baseline_first if trial_id in runs), None)

    def _delete_report(self, run_id: str) -> None:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        if any(each.path == _REPORT for each in self._client.list_artifacts(run_id)):
            uri = self._client.get_run(run_id).info.artifact_uri
            # Typed in parts only; the client itself has no way to delete a file.
            files: Any = get_artifact_repository(uri, tracking_uri=self._client.tracking_uri)
            files.delete_artifacts(_REPORT)


def _is_complete(run: Run, fingerprint: str) -> bool:
    return run.info.status != "RUNNING" and run.data.tags.get("ablate.fingerprint") == fingerprint


def _chunks(entities: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (entities[start : start + size] for start in range(0, len(entities), size))


def _digest(folder: Path, files: Sequence[Path]) -> str:
    parts = [(path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _experiment_or_empty(store: Store) -> dict[str, Any]:
    try:
        return store.experiment()
    except ResultsError:
        return {}


def _experiment_name(store: Store) -> str:
    name: str = _experiment_or_empty(store).get("name") or store.folder.resolve().name
    return name


# --- Getting there ----------------------------------------------------------------------------------------------------


def _check_database(uri: str) -> None:
    """MLflow tries a file that cannot be opened for minutes, and tells of it in the words of its own layers."""
    path = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or not path.exists():
        return
    fault = "it is a folder" if path.is_dir() else _fault_of_database(path)
    if fault:
        raise TrackingError(
            f"{path.name} cannot be read: {fault}.",
            f"Move {path.name} away, then: python -m ablate sync FILE",
        )


def _fault_of_database(path: Path) -> str | None:
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=_SECONDS_TO_WAIT_FOR_OTHERS)) as database:
            found: str = database.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        # Someone who writes for long is no fault of the file.
        return None if "locked" in str(error) else str(error)
    return None if found == "ok" else " ".join(found.split())


def _refuse_file_store(uri: str) -> None:
    if urlsplit(uri).scheme in ("", "file"):
        raise TrackingError(
            f"MLflow no longer keeps runs in plain folders, as MLFLOW_TRACKING_URI={uri} asks.",
            "Unset it to use a SQLite file among the results, or set sqlite:////absolute/path/mlflow.db.",
        )


def _prepare() -> None:
    """Before MLflow is imported: it reads some of this only then."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _client(uri: str) -> MlflowClient:
    """Creates and migrates the store where it is new: to be called under the lock."""
    try:
        with warnings.catch_warnings():
            # MLflow's use of its own dependencies is not for us to warn about.
            warnings.simplefilter("ignore")
            from mlflow import MlflowClient

            # A new store's hundred migrations and each try in vain are of no interest at the terminal.
            for name in ("alembic", "mlflow.store.db.utils", "urllib3.connectionpool"):
                logging.getLogger(name).setLevel(logging.ERROR)
            return MlflowClient(tracking_uri=uri)
    except ImportError as error:
        if error.name not in (None, "mlflow") and not uri.startswith("sqlite:") and not is_server(uri):
            raise TrackingError(
                f"{error.name}, the driver of the database in MLFLOW_TRACKING_URI, is not installed.",
                f"Install it (pip install {error.name}), or unset MLFLOW_TRACKING_URI.",
            ) from error
        raise TrackingError(f"it cannot be imported ({error}).", "To have the mirror: pip install mlflow") from error


def _experiment_id(client: MlflowClient, name: str, location: str | None) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name, artifact_location=location)
        except MlflowException:
            # On a server another machine may have been first.
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        raise _deleted(name, experiment.experiment_id)
    experiment_id: str = experiment.experiment_id
    return experiment_id


def _deleted(name: str, experiment_id: str) -> TrackingError:
    return TrackingError(
        f"the experiment {name} was deleted in MLflow and still owns its name.",
        f"Restore it: mlflow experiments restore --experiment-id {experiment_id}; or give the experiment another name; "
        f"or remove it for good: mlflow gc --experiment-ids {experiment_id}. Then: python -m ablate sync",
    )


@contextlib.contextmanager
def _tracking_errors() -> Iterator[None]:
    """Whatever goes wrong in there becomes one kind of error: no fault of the mirror may stop a training."""
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise TrackingError(reason, "The results are safe in Parquet; later: python -m ablate sync") from error


def _lock_path(uri: str, results_root: Path) -> Path:
    """Beside the store where it is a file: that is what several processes must not create at once."""
    if uri.startswith("sqlite:///"):
        return Path(uri.removeprefix("sqlite:///") + ".lock")
    return results_root / ".mlflow.lock"


def _locked(path: Path) -> FileLock:
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path, timeout=_SECONDS_TO_WAIT_FOR_OTHERS)
