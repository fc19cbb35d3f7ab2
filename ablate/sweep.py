"""What `run` does: everything that an experiment asks for, stored, mirrored and reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ablate import document
from ablate.asked import Wanted, check_claimed, judged, many, read, report, resources_for
from ablate.files import FULL, check_room
from ablate.inside import folder_of
from ablate.results import Store, places, told
from ablate.schema import SCHEMAS
from ablate.shelf import COMPACTED
from ablate.tables import ResultsError
from ablate.terminal import visible

if TYPE_CHECKING:
    from rich.console import Console

    from ablate.experiment import Experiment
    from ablate.machine import Resources
    from ablate.mirror import Mirror
    from ablate.plan import VariantPlan
    from ablate.progress import Progress
    from ablate.report.judgement import Judgement
    from ablate.runner import Run
    from ablate.tasks import Task
    from ablate.variant import Trial

_PARTS = (*SCHEMAS, "logs", "checkpoints", "leases")
_REPORT_LEASE = ".report"


@dataclass(frozen=True)
class Ran:
    """How a run ended: outcomes counted, what was there before, where the report is, the exit status, what could not be
    stored, with the reasons, and what became of the claims.
    """

    outcomes: Counter[str]
    started: int
    skipped: int
    report: Path | None
    status: int
    lost: tuple[str, ...] = ()
    claims: tuple[Judgement, ...] = ()


def run(wanted: Wanted, console: Console) -> Ran:
    """Plan, train, profile, record, report. Raises `FileFaults` before anything runs if the input is wrong."""
    from ablate import plan
    from ablate.interruption import signals
    from ablate.mlflow_address import check_address

    check_address()
    experiment = read(wanted)
    if wanted.check_claims:
        check_claimed(experiment.claims, experiment.file)
    plans = plan.plan(experiment, timed=False)
    resources = resources_for(wanted, plans)
    plan.check_device(experiment, resources.device)
    _check_writable(wanted, experiment.name)
    with signals() as received:
        ran = _Sweep(wanted, experiment, plans, resources, received).run(console)
    return replace(ran, status=128 + received[0]) if received else ran


class _Sweep:
    """One run of an experiment, from what is stored of it to the report."""

    def __init__(
        self,
        wanted: Wanted,
        experiment: Experiment,
        plans: list[VariantPlan],
        resources: Resources,
        received: list[int],
    ) -> None:
        from ablate.lease import Leases

        self.wanted, self.experiment, self.plans, self.resources = wanted, experiment, plans, resources
        self.received = received
        self.store = Store(wanted.results / experiment.name, create=True)
        self.trials = experiment.trials(resources.device, resources.threads)
        self.leases = Leases(self.store.folder / "leases")
        self.mirror: Mirror | None = None
        self.claims: tuple[Judgement, ...] = ()

    def run(self, console: Console) -> Ran:
        from ablate.progress import Progress

        names, queue = _names_of_trials(self.store), self._queue()
        progress = Progress(console, len(queue))
        running = self._begin(progress)
        rounds_left = len(running.rounds_left())
        opening = _opening(self.experiment, len(queue), _statuses(self.store, self.trials), rounds_left)
        for line in (opening, *_done_again(self.store, self.trials)):
            console.print(visible(line), markup=False, highlight=False, soft_wrap=True)
        is_renamed = _names_of_trials(self.store) != names
        self.mirror = _mirror(
            self.wanted, self.store, lambda: bool(self.received), new=bool(queue or rounds_left), behind=is_renamed
        )
        with self.mirror or nullcontext():
            with progress:
                running.carry_out(queue, self.received)
            written, fault = self._report()
        lost = (*running.keeper.lost(), *fault)
        outcomes = _outcomes(_statuses(self.store, self.trials), len(self.trials))
        failed = set(outcomes) - {"ok"} or self.experiment.invalid or lost or running.failed_rounds()
        if self.wanted.check_claims:
            failed = failed or any(each.verdict != "supported" for each in self.claims)
        started = len(queue)
        return Ran(outcomes, started, len(self.trials) - started, written, 1 if failed else 0, lost, self.claims)

    def _queue(self) -> list[Task]:
        """What is to be done. Raises `FileFaults` where it could not be stored."""
        from ablate.tasks import tasks, tidy

        tidy(self.trials, self.store)
        queue = tasks(self.trials, self.store, retry_failed=self.wanted.retry_failed, only=self.wanted.only)
        _check_places(self.store, [task.trial for task in queue])
        self.store.remove_leftovers()
        self.leases.tidy()
        return queue

    def _begin(self, progress: Progress) -> Run:
        """Store what the experiment is now."""
        from ablate import machine, plan
        from ablate.runner import Run, present

        document = plan.document(self.experiment, self.plans, machine.facts(self.resources), self.wanted.command())
        with present(self.leases, self.received):
            self.store.write_experiment(document)
            return Run(
                self.experiment,
                self.plans,
                self.store,
                self.resources,
                progress,
                lambda trial_id: self.mirror.mirror(trial_id) if self.mirror else None,
                fail_fast=self.wanted.fail_fast,
                retry_failed=self.wanted.retry_failed,
                repeated=self.wanted.only != "train",
                only=self.wanted.only,
            )

    def _report(self) -> tuple[Path | None, list[str]]:
        """Judge the claims, and write the report while no other run does. Returns where it is, and why it is not."""
        from ablate.lease import Leases

        if self.mirror and self.received:
            self.mirror.hurry()
        folder = self.wanted.reports / self.experiment.name
        try:
            with Leases(folder).wait(_REPORT_LEASE, stopped=lambda: bool(self.received)) or nullcontext():
                results = self.store.load()
                self.claims = tuple(judged(results))
                written = report(results, folder.parent)
            if self.mirror:
                self.mirror.attach(folder)
        except OSError as error:
            return None, [f"the report: {error.strerror or error}"]
        return written, []


def _check_writable(wanted: Wanted, name: str) -> None:
    """What cannot be written must not be noticed after hours of training."""
    folder_of(wanted.results, name, *_PARTS)
    folder_of(wanted.reports, name, "plots")
    store, report = Store(wanted.results / name), wanted.reports / name
    for folder in (*store.folders(), wanted.results):
        _check_room(folder, 0, "--results")
    for folder in (report, report / "plots"):
        _check_room(folder, _REPORT_BYTES, "--reports")


_REPORT_BYTES, _TRIAL_BYTES = 2**18, 2**16
"""What a report with its plots takes at least, and a trial's three files with its run in MLflow's database."""


def _check_room(folder: Path, size: int, option: str) -> None:
    try:
        check_room(folder, size)
    except OSError as error:
        reason = error.strerror or str(error)
        cure = f"free some space, or give another {option}" if error.errno in FULL else f"give another {option}"
        raise document.FileFaults([f"{folder}: no folder that can be written: {reason}\n  {cure}"]) from None


def _check_places(store: Store, trials: Sequence[Trial]) -> None:
    """There is room for what will be stored, and nothing stands there that a file cannot replace."""
    _check_room(store.folder, _TRIAL_BYTES * len(trials), "--results")
    paths = [shelf.path(trial.trial_id) for shelf in store.shelves.values() for trial in trials]
    for path in [*paths, *(store.log_path(trial.trial_id) for trial in trials), store.folder / "experiment.json"]:
        if path.is_dir() and not path.is_symlink():
            raise document.FileFaults([f"{path}: a folder where a file will be written\n  move it away"])


def _done_again(store: Store, trials: Sequence[Trial]) -> list[str]:
    """Which files cannot be read, so that what they held is done again."""
    ids, lines = {trial.trial_id for trial in trials}, []
    for kind in SCHEMAS:
        for name, fault in store.look(kind).faults.items():
            if kind == "repeats" or Path(name).stem in ids or name in ("", COMPACTED):
                lines.append(f"{told(kind, name, fault)}; what it held is done again where it is missing")
    return lines


def _statuses(store: Store, trials: Sequence[Trial]) -> Counter[str]:
    return Counter(row["status"] for trial in trials if (row := store.trial(trial.trial_id)))


def _names_of_trials(store: Store) -> dict[str, str]:
    """What each trial id is called now."""
    try:
        return {trial_id: variant["name"] for trial_id, (_, _, variant) in places(store.experiment()).items()}
    except ResultsError:
        return {}


def _mirror(wanted: Wanted, store: Store, stopped: Callable[[], bool], *, new: bool, behind: bool) -> Mirror | None:
    """The mirror, brought up to date where an earlier run left it behind; None where it has nothing to learn."""
    from ablate.mirror import Mirror

    mirrored = (store.mlflow() or {}).get("attempts", {})
    rows = ((trial_id, store.trial(trial_id)) for trial_id in _names_of_trials(store))
    behind = behind or any(row and mirrored.get(trial_id) != row["attempts"] for trial_id, row in rows)
    if not new and not behind:
        return None
    return Mirror(wanted.results, store, wanted.syncing(), behind=behind, stopped=stopped)


def _opening(experiment: Experiment, to_run: int, statuses: Counter[str], rounds_left: int) -> str:
    planned, seeds, total = experiment.counts["planned"], len(experiment.seeds), experiment.counts["trials"]
    size = " ".join([many(planned, "variant"), "x", many(seeds, "seed"), "=", many(total, "trial")])
    failed = {status: number for status, number in sorted(statuses.items()) if status != "ok"}
    rounds = (experiment.baseline.settings.profile.repeats if to_run else rounds_left) or 0
    then = f", and {many(rounds, 'round')} of timing to run" if rounds else ""
    if to_run == 0:
        said = ", ".join(f"{number} {status}" for status, number in failed.items())
        them = "it" if sum(failed.values()) == 1 else "them"
        again = f" ({said}; --retry-failed runs {them} again)" if failed else ""
        return f"{experiment.name}: {size}, all of them stored: nothing to train{again}{then}"
    stored = f", {total - to_run} of them stored" if to_run < total else ""
    return f"{experiment.name}: {size}{stored}, {to_run} to run{then.removesuffix(' to run')}"


def _outcomes(outcomes: Counter[str], planned: int) -> Counter[str]:
    if missing := planned - outcomes.total():
        outcomes["not run"] = missing
    return outcomes
