"""The mirror of the record in MLflow: written from Parquet, by one process at a time, and any time again.

Everything that can go wrong there is one kind of error, with its cure. `ablate.mirror` keeps it away from the training.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ablate.inside import file_of
from ablate.interleaved import Rounds
from ablate.mlflow_address import (
    SYNC,
    TrackingError,
    artifact_root,
    database_of,
    default_uri,
    is_server,
    refuse_folder,
)
from ablate.mlflow_experiment import (
    client_of,
    description,
    experiment_id_of,
    experiment_or_empty,
    import_early,
    lock_path,
    locked,
    prepare,
    tracking_errors,
)
from ablate.mlflow_run import RunContent, metrics_of_rounds, run_content
from ablate.mlflow_view import CURRENT_TAG, RUN_COLOUR_TAG, run_colour
from ablate.mlflow_view import comparison_links as comparison_links
from ablate.results import Store, places

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_ENTITIES_PER_REQUEST = 1000
_PARAMS_PER_REQUEST = 100
_REPORT = "report"
_OWNER = "ablate.owner"


@dataclass
class SyncResult:
    """What `Tracker.sync` did, by trial id. `failed` says why it stopped early."""

    written: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    failed: str | None = None


# --- The mirror -------------------------------------------------------------------------------------------------------


class Tracker:
    """Writes trials that are stored already into the MLflow experiment of the same name. Raises `TrackingError`.

    Runs of others in that experiment, those of another folder of results among them, are none of its business.
    """

    def __init__(
        self, store: Store, client: MlflowClient, experiment_id: str, lock: Path, database: Path | None = None
    ) -> None:
        self._store = store
        self._client = client
        self._experiment_id = experiment_id
        self._lock = lock
        self._owner = owner_of(store, database)
        self.notices: list[str] = []

    @classmethod
    def connect(cls, results_root: Path, store: Store) -> Self:
        """Creates the store and the experiment where they are missing, and clears runs that were never finished."""
        uri = default_uri(results_root)
        refuse_folder(uri)
        prepare()
        lock = lock_path(uri, Path(results_root))
        import_early()
        with tracking_errors(), locked(lock):
            artifacts = artifact_root(results_root)
            client = client_of(uri, artifacts)
            location = None if is_server(uri) else (artifacts / store.folder.name).as_uri()
            tracker = cls(store, client, experiment_id_of(client, store, location), lock, database_of(uri))
            tracker._describe()
            tracker._clear_unfinished()
            tracker._mark_current()
        return tracker

    def mirror(self, trial_id: str) -> None:
        """One trial as one run, in place of the run it had."""
        with tracking_errors(), locked(self._lock):
            self._mirror(trial_id, SyncResult())

    def attach(self, report_folder: Path) -> None:
        """The report as artifacts of the baseline's first run, in place of the one before; and the repeats' ratios."""
        with tracking_errors(), locked(self._lock):
            self._compare()
            self._attach(report_folder)

    def sync(self, report_folder: Path | None = None) -> SyncResult:
        """All of what a run would have written, as far as that is possible now. Nothing changes when called again."""
        result = SyncResult()
        try:
            self.catch_up(result)
            if report_folder and (report_folder / "report.md").is_file():
                self.attach(report_folder)
        except TrackingError as error:
            result.failed = f"{error.message} {error.cure}"
        return result

    def catch_up(self, result: SyncResult) -> None:
        """Writes every trial that MLflow lacks or has differently. Nothing changes when called again."""
        present = self._store.mirrored()
        if present is None:
            raise TrackingError("there is no readable experiment.json.", "python -m ablate run FILE writes it.")
        for trial_id in present:
            with tracking_errors(), locked(self._lock):
                self._mirror(trial_id, result)
        with tracking_errors(), locked(self._lock):
            self._compare()

    # --- The experiment

    def _describe(self) -> None:
        """What the UI shows above the runs, and how it compares them."""
        self._tag_experiment(description(self._store))

    def _tag_experiment(self, tags: Mapping[str, str]) -> None:
        present = self._client.get_experiment(self._experiment_id).tags
        for key, value in tags.items():
            if present.get(key) != value:
                self._client.set_experiment_tag(self._experiment_id, key, value)

    def _clear_unfinished(self) -> None:
        """Runs of ours that still say RUNNING were being written when their writer was ended: written again.

        Who writes holds the lock, so that no living writer's run is among them.
        """
        for run in self._own_runs("attributes.status = 'RUNNING'"):
            self._discard(run)
            self._mirror(run.data.tags["ablate.trial_id"], SyncResult())

    def _mark_current(self) -> None:
        """Runs of trials that left the experiment stay, but comparisons are without them."""
        present, own = self._store.present(), self._own_runs("")
        for run in own:
            in_use = present is None or run.data.tags["ablate.trial_id"] in present
            self._tag_run(run, CURRENT_TAG, "yes" if in_use else "no")
        self._tell_of_deleted({run.info.run_id for run in own})

    def _tell_of_deleted(self, there: set[str]) -> None:
        document = self._store.mlflow() or {}
        noted = document.get("runs", {}).values() if document.get("experiment_id") == self._experiment_id else ()
        if gone := [run_id for run_id in noted if run_id not in there]:
            self.notices.append(
                f"{len(gone)} of the experiment's runs were deleted there (the first is {gone[0]}). Their trials are "
                f"safe in Parquet. Restore it: mlflow runs restore --run-id {gone[0]}; or have them written again: "
                f"{SYNC}; or leave it so."
            )

    def _tag_run(self, run: Run, key: str, value: str) -> None:
        if run.data.tags.get(key) != value:
            self._client.set_tag(run.info.run_id, key, value)

    def _own_runs(self, condition: str) -> list[Run]:
        """Those of this store's trials; one that names no owner is of a time when there was one owner only."""
        tags = ((run, run.data.tags) for run in self._runs(condition))
        return [run for run, each in tags if "ablate.trial_id" in each and each.get(_OWNER, self._owner) == self._owner]

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

    def _discard(self, run: Run) -> None:
        if run.info.status == "RUNNING":
            # Also among what is deleted nothing says for ever that it runs.
            self._client.set_terminated(run.info.run_id, status="KILLED")
        self._client.delete_run(run.info.run_id)

    # --- One run

    def _mirror(self, trial_id: str, result: SyncResult) -> None:
        """Afterwards exactly one run of the trial is there, with the content of the record."""
        row = self._store.trial(trial_id)
        if row is None:
            return
        content = self._content(row)
        fingerprint, colour = content.fingerprint(), self._colour(trial_id)
        current = "no" if row["is_for_tuning"] else "yes"  # what a setting was chosen by is compared with nothing
        runs = self._own_runs(f"tags.`ablate.trial_id` = '{trial_id}'")
        equal = [run for run in runs if _is_complete(run, content, fingerprint)]
        if equal:
            run_id = equal[0].info.run_id
            self._tag_run(equal[0], RUN_COLOUR_TAG, colour)
            self._tag_run(equal[0], CURRENT_TAG, current)
            self._tag_run(equal[0], _OWNER, self._owner)
        else:
            tags = {"ablate.trial_id": trial_id, "ablate.fingerprint": fingerprint, _OWNER: self._owner}
            tags |= {RUN_COLOUR_TAG: colour, CURRENT_TAG: current}
            tags |= {"ablate.replaces": runs[0].info.run_id} if runs else {}
            run_id = self._write(row, content, tags)
        outcome = result.unchanged if equal else result.replaced if runs else result.written
        outcome.append(trial_id)
        self._keep_only(run_id, runs)
        self._note(row, run_id)

    def _keep_only(self, run_id: str, runs: Sequence[Run]) -> None:
        for run in runs:
            if run.info.run_id != run_id:
                self._discard(run)

    def _content(self, row: Mapping[str, Any]) -> RunContent:
        trial_id, experiment = row["trial_id"], experiment_or_empty(self._store)
        place = places(experiment).get(trial_id)
        variant = place[2] if place else {"name": row["variant"], "is_baseline": row["is_baseline"]}
        curves, profiles = self._store.curves(trial_id), self._store.profiles(trial_id)
        return run_content(row, curves, profiles, experiment, variant)

    def _colour(self, trial_id: str) -> str:
        order = places(experiment_or_empty(self._store))
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
        run = self._client.get_run(run_id)
        data, latest = run.data, content.latest()
        if not _holds(run, content):
            raise TrackingError(
                f"MLflow kept {len(data.metrics)} of {len(latest)} metrics and {len(data.params)} of "
                f"{len(content.params)} parameters of a run.",
                "Look at the tracking server.",
            )

    def _note(self, row: Mapping[str, Any], run_id: str) -> None:
        """mlflow.json: where each trial's run is and of which attempt, in the order in which trials are shown."""
        document, trial_id = self._store.mlflow() or {}, row["trial_id"]
        here = document.get("experiment_id") == self._experiment_id
        runs = {**(document["runs"] if here else {}), trial_id: run_id}
        attempts = {**(document.get("attempts", {}) if here else {}), trial_id: row["attempts"]}
        order = [each for each in dict.fromkeys([*places(experiment_or_empty(self._store)), *runs]) if each in runs]
        noted = {
            "experiment_id": self._experiment_id,
            "owner": self._owner,
            "runs": {each: runs[each] for each in order},
            "attempts": {each: attempts[each] for each in order if each in attempts},
        }
        if noted != document or list(noted["runs"]) != list(document.get("runs", {})):
            self._store.write_mlflow(noted)

    # --- The rounds of timing

    def _compare(self) -> None:
        """What the interleaved repeats say of each variant, on its runs: a point more where it says something new."""
        from mlflow.entities import Metric

        experiment = experiment_or_empty(self._store)
        rounds, order, now = self._rounds(experiment), places(experiment), int(time.time() * 1000)
        for run in self._own_runs("") if rounds.rows else ():
            place = order.get(run.data.tags["ablate.trial_id"])
            metrics, verdicts = metrics_of_rounds(rounds, place[2]["name"]) if place else ({}, {})
            new = {key: value for key, value in metrics.items() if not _is_close(run.data.metrics.get(key), value)}
            if new:
                points = [Metric(key, value, now, 0) for key, value in new.items()]
                self._client.log_batch(run.info.run_id, metrics=points)
            for key, verdict in verdicts.items():
                self._tag_run(run, key, verdict)

    def _rounds(self, experiment: Mapping[str, Any]) -> Rounds:
        timing = experiment.get("timing")
        stored = self._store.rounds(timing["timing_id"]) if timing else []
        named = [{**row, "variant": timing["members"].get(row["variant_id"])} for row in stored] if timing else []
        return Rounds.latest(named) if named else Rounds([])

    # --- The report

    def _attach(self, report_folder: Path) -> None:
        there = {run.info.run_id for run in self._own_runs("")}
        run_id = self._report_run(there)
        files = sorted(path for path in report_folder.rglob("*") if path.is_file() and not path.name.startswith("."))
        if run_id is None or not files:
            return
        digest = _digest(report_folder, files)
        before = self._client.get_experiment(self._experiment_id).tags
        if before.get("ablate.report_run") == run_id and before.get("ablate.report_sha256") == digest:
            return
        for holder in {run_id, before.get("ablate.report_run", run_id)} & there:
            self._delete_report(holder)
        for path in files:
            place = (Path(_REPORT) / path.relative_to(report_folder).parent).as_posix()
            self._client.log_artifact(run_id, str(path), place)
        self._tag_experiment({"ablate.report_run": run_id, "ablate.report_sha256": digest})

    def _report_run(self, there: set[str]) -> str | None:
        """The run of the baseline's first seed, or of the first trial that has one."""
        order = places(experiment_or_empty(self._store))
        baseline_first = sorted(order, key=lambda trial_id: not order[trial_id][2].get("is_baseline"))
        runs = (self._store.mlflow() or {}).get("runs", {})
        return next((runs[trial_id] for trial_id in baseline_first if runs.get(trial_id) in there), None)

    def _delete_report(self, run_id: str) -> None:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        if any(each.path == _REPORT for each in self._client.list_artifacts(run_id)):
            uri = self._client.get_run(run_id).info.artifact_uri
            # Typed in parts only; the client itself has no way to delete a file.
            files: Any = get_artifact_repository(uri, tracking_uri=self._client.tracking_uri)
            files.delete_artifacts(_REPORT)


def _is_complete(run: Run, content: RunContent, fingerprint: str) -> bool:
    """Whether the run is what was written of this content, and nobody has changed what it says of it since."""
    same = run.data.tags.get("ablate.fingerprint") == fingerprint and run.info.status == content.status
    return same and _holds(run, content)


def _holds(run: Run, content: RunContent) -> bool:
    """Whether all of the content's numbers and settings are there; what others added is no matter."""
    metrics, params = run.data.metrics, run.data.params
    kept = all(_is_close(metrics.get(key), value) for key, value in content.latest().items())
    return kept and all(params.get(key) == value for key, value in content.params.items())


def _is_close(held: float | None, value: float) -> bool:
    return held is not None and math.isclose(held, value, rel_tol=1e-9)


def _chunks(entities: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (entities[start : start + size] for start in range(0, len(entities), size))


def _digest(folder: Path, files: Sequence[Path]) -> str:
    parts = [(path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def owner_of(store: Store, database: Path | None = None) -> str:
    """Whose runs they are: a folder of results, by a name that it keeps where it is moved.

    On a server others have runs of the same experiment, and even of the same trials. A database that lies beside the
    results moves with them, so that their name is not lost even with the file that keeps it.
    """
    folder = store.folder.resolve()
    place = f"{platform.node()}:{folder}"
    if database and folder.is_relative_to(home := database.resolve().parent):
        place = folder.relative_to(home).as_posix()
    found: str = (store.mlflow() or {}).get("owner") or hashlib.sha256(place.encode()).hexdigest()[:16]
    return found
