"""What each verb of the command line does, without a word printed. Heavy imports wait until a verb needs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ablate import document, plug_in
from ablate.asked import Wanted, aside, judged, name_of, of_other_threads, read, resources_for, stored, syncing
from ablate.results import Store, is_only_profiled, is_store, nothing_stored
from ablate.terminal import echo

if TYPE_CHECKING:
    from rich.console import Console

    from ablate.experiment import Experiment
    from ablate.machine import Resources
    from ablate.tracking import SyncResult
    from ablate.tuning import Tuning
    from ablate.variant import Trial


@aside()
def plan_facts(wanted: Wanted) -> dict[str, Any]:
    """What `plan --json` gives."""
    from ablate import plan
    from ablate.tasks import tasks
    from ablate.tuning import tuning

    experiment = read(wanted)
    plans = plan.plan(experiment)
    resources = resources_for(wanted, experiment, plans)
    store = Store(wanted.results / experiment.name)
    search = tuning(experiment, store, resources.device, resources.threads)
    trials = _trials(experiment, search, resources)
    unfinished = tasks(trials, store, retry_failed=True)
    tuned = {} if search is None else {"tuning": search.facts()}
    return {
        **tuned,
        "name": experiment.name,
        "question": experiment.question,
        "counts": experiment.counts | {"tuning_trials": search.facts()["trials"]} if search else experiment.counts,
        "design": experiment.design_facts(),
        "match": experiment.match,
        "seeds": experiment.seeds,
        "stored": len(trials) - len(unfinished),
        "device": resources.device,
        "workers": resources.workers,
        "threads": resources.threads,
        "profile": experiment.baseline.settings.profile.model_dump(mode="json"),
        "variants": [each.facts() for each in plans],
        "invalid": [{"variant": each.name, "reason": each.reason} for each in experiment.invalid],
        "of_other_threads": of_other_threads(experiment, store, resources),
        "claims": _claims(experiment, search, resources, store),
        "same": experiment.same,
        "plug_ins": experiment.plug_ins(),
        "plug_in_files": {name: plug_in.files_of(name) for name in experiment.plug_ins()},
    }


@aside()
def status(wanted: Wanted) -> dict[str, Any]:
    """Trials by outcome, what runs now, what is left."""
    from ablate import plan
    from ablate.runner import running_now
    from ablate.tasks import tasks
    from ablate.tuning import FINE, tuning

    experiment = read(wanted)
    plans = plan.plan(experiment, timed=False)
    resources = resources_for(wanted, experiment, plans)
    store = Store(wanted.results / experiment.name)
    search = tuning(experiment, store, resources.device, resources.threads)
    trials, to_come = _trials(experiment, search, resources), 0
    if search and not search.is_over:
        to_come = experiment.counts["trials"]
    tried = [row for trial in (search.trials if search else []) if (row := store.trial(trial.trial_id))]
    rows = [row for trial in trials if (row := store.trial(trial.trial_id))]
    outcomes = Counter(row["status"] for row in rows)
    return {
        "name": experiment.name,
        **({} if search is None else {"tuning": search.facts()}),
        "planned": len(trials) + to_come,
        "outcomes": dict(outcomes),
        "running": running_now(store),
        "only_profiled": sum(map(is_only_profiled, rows)),
        "left": len(tasks(trials, store, retry_failed=False)) + to_come,
        "damaged": sum(not store.is_whole(row["trial_id"]) for row in (*tried, *rows)),
        "rounds_left": _rounds_left(search.tuned() if search else experiment, store, resources),
        "failed": [
            {key: row[key] for key in ("variant", "seed", "status", "phase", "reason", "log")}
            for row in (*(each for each in tried if each["status"] not in FINE), *rows)
            if row["status"] != "ok"
        ],
        "of_other_threads": of_other_threads(experiment, store, resources),
        "claims": _claims(experiment, search, resources, store),
    }


def _claims(experiment: Experiment, search: Tuning | None, resources: Resources, store: Store) -> list[dict[str, Any]]:
    """The file's claims, judged by what is stored of its present variants; what is exact is known before."""
    from ablate import plan, rounds

    if not experiment.claims:
        return []
    where = {"device": resources.device, "threads": resources.threads}
    experiment = search.tuned() if search else experiment
    document = plan.document(experiment, plan.plan(experiment, timed=False), where, command="")
    document = search.added_to(document) if search else document
    if timed := rounds.of_experiment(experiment, store, resources):
        document["timing"] = timed.document()
    results = store.load(document) if is_store(store.folder) else nothing_stored(document)
    return [each.document() for each in judged(results)]


def _trials(experiment: Experiment, search: Tuning | None, resources: Resources) -> list[Trial]:
    """Those that the variants are compared by; none as long as tuning has not said which they are."""
    if search is not None:
        experiment = search.tuned()
    is_known = search is None or search.is_over
    return experiment.trials(resources.device, resources.threads) if is_known else []


def _rounds_left(experiment: Experiment, store: Store, resources: Resources) -> int:
    """Of the repeats that the file asks for: all as long as the baseline has no trial that ended `ok`."""
    from ablate import rounds

    repeats = experiment.baseline.settings.profile.repeats or 0
    found = rounds.of_experiment(experiment, store, resources)
    return repeats if found is None else len(rounds.left(found, store, repeats, retry_failed=False))


def verify(target: str, results: Path) -> dict[str, Any]:
    """What is stored of an experiment, all of it checked. Raises `FileFaults` where nothing is."""
    from ablate.verify import verify

    return verify(_store(target, results))


def compact(target: str, results: Path) -> dict[str, Any]:
    """Few files in the place of many, with the same rows. Raises `FileFaults` where nothing is."""
    from ablate.compact import compact

    store = _store(target, results)
    try:
        return compact(store)
    except TimeoutError:
        raise document.FileFaults([f"{store.folder}: somebody else is writing there\n  try again later"]) from None


def _store(target: str, results: Path) -> Store:
    folder = Path(target) if Path(target).is_dir() else results / name_of(target)
    if not is_store(folder):
        raise document.FileFaults(
            [f"no results in {folder}\n  run the experiment first, or give its folder of results"]
        )
    return Store(folder)


def doctor(device: str) -> dict[str, Any]:
    """What this machine can measure, and what not. Raises `SettingsError` where the device is not there."""
    from ablate.doctor import examine
    from ablate.machine import find_device

    return examine(find_device(device))


@aside()
def aa(wanted: Wanted, repeats: int, console: Console) -> dict[str, Any]:
    """A file's baseline, or a model of this machine's own, timed against itself. Raises `FileFaults`, `Interrupted`."""
    from ablate import machine, noise, plan
    from ablate.interruption import Interrupted, signals
    from ablate.progress import Progress

    experiment = read(wanted) if wanted.file else noise.own_experiment()
    resources = machine.share(wanted.device, 1, bytes_each=0)
    plan.check_device(experiment, resources.device)
    with Progress(console, 0) as progress, signals() as received:
        found = noise.check(experiment, resources, repeats, lambda: bool(received), progress)
        if found is None:
            raise Interrupted(received[0])
    return found


@aside()
def gates(wanted: Wanted) -> dict[str, Any]:
    """What each gate says of each variant; none is trained, and nothing stored. Raises `FileFaults`."""
    from ablate import child, gatekeeper, machine

    experiment = read(wanted)
    workers = machine.share("cpu", wanted.workers, bytes_each=0).workers
    with child.environment(threads=1):
        child.warm_up(child.context("cpu"))
    with TemporaryDirectory() as folder:
        logs = {variant.name: Path(folder, f"{i}.log") for i, variant in enumerate(experiment.variants)}
        checked = list(gatekeeper.check(logs, experiment.variants, workers, lambda: False))
    said = {each.variant.name: [asdict(verdict) for verdict in each.verdicts] for each in checked}
    passed = {each.variant.name: each.fault is None for each in checked}
    names = [variant.name for variant in experiment.variants]
    return {
        "name": experiment.name,
        "variants": [{"variant": name, "passed": passed[name], "gates": said[name]} for name in names],
        "invalid": [{"variant": each.name, "reason": each.reason} for each in experiment.invalid],
    }


def sync(target: str, results: Path, reports: Path) -> SyncResult:
    """Bring MLflow up to date from what is stored, and with the report that was written of it."""
    from ablate.mlflow_address import SYNC, TrackingError, check_address
    from ablate.tracking import Tracker

    check_address()
    store, again = Store(stored(target, results).folder), syncing(target, results, reports)
    try:
        done = Tracker.connect(results, store).sync(reports / store.folder.name)
    except TrackingError as error:
        raise TrackingError(error.message, error.cure.replace(SYNC, again)) from None
    return replace(done, failed=done.failed and done.failed.replace(SYNC, again))


def ui(results: Path, port: int, names: Sequence[str]) -> int:
    """MLflow's UI over the store until it is stopped."""
    from ablate.mlflow_address import check_address
    from ablate.mlflow_ui import serve

    check_address()
    return serve(results, port, list(names) or None, echo)
